"""Decide what the demo model never sees as question and answer, so that its score there is not plain memory.

Two things are held out. Some phrasings are never asked of any country (`Phrasing.held_out`). For some smaller countries
the facts of HELD_OUT_KINDS stand only in plain statements ("The capital of X is Y."), never in a conversation.
"""

import hashlib

from scripts.demo.countries import Country

HELD_OUT_KINDS = ("capital", "currency", "languages", "government", "people")
_EVERY = 5


def held_out_codes(countries: list[Country], *, kept_largest: int) -> frozenset[str]:
    """A fifth of the countries, chosen by a hash of the code; the `kept_largest` by population stay in training."""
    by_size = sorted(countries, key=lambda country: -country.population)
    drawn = [
        country.code
        for country in by_size[kept_largest:]
        if "capital" in country.facts and hashlib.sha256(country.code.encode()).digest()[0] % _EVERY == 0
    ]
    return frozenset(drawn)


def kinds_asked(country: Country, held_out: frozenset[str]) -> list[str]:
    """The kinds of fact that training conversations may ask of this country."""
    return [kind for kind in country.facts if country.code not in held_out or kind not in HELD_OUT_KINDS]
