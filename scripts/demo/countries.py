"""Read the World Factbook profiles into clean, short facts.

A fact is what one question asks for: the words of the answer, and the strings that count as right. Free text of the
profiles is cut down to what a person would say; what cannot be cut down cleanly is left out rather than guessed.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.demo.country_data import ALIASES, CODES_LEFT_OUT, CURRENCY_SINGULARS, FACT_FIXES, NAMES, WITH_ARTICLE

_REGIONS_WITH_ARTICLE = ("Caribbean", "Middle East", "Eastern Mediterranean")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One answerable fact: `text` as said in a sentence, `accepted` as matched in an evaluation."""

    text: str
    accepted: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.text or not self.accepted:
            raise ValueError(
                f"text={self.text!r}, accepted={self.accepted!r}: a fact needs both; leave the fact out instead."
            )


@dataclass(frozen=True, kw_only=True)
class Country:
    """A country or territory with its facts by kind (`capital`, `currency`, ...)."""

    code: str
    name: str
    aliases: tuple[str, ...] = ()
    facts: dict[str, Fact] = field(default_factory=dict)
    background: str = ""
    overview: str = ""
    borders: tuple[str, ...] = ()
    area_km2: float = 0.0
    population: int = 0
    landlocked: bool = False

    @property
    def said(self) -> str:
        """The name as it stands inside a sentence: "the Netherlands", "France"."""
        return f"the {self.name}" if takes_article(self.name) else self.name


def takes_article(name: str) -> bool:
    return name in WITH_ARTICLE or (name.endswith(" Islands") and not name.startswith("the "))


def _text(profile: dict[str, Any], path: str) -> str:
    node: Any = profile
    for key in path.split("/"):
        node = node.get(key) if isinstance(node, dict) else None
    value = node.get("text") if isinstance(node, dict) else None
    value = (value or "").strip()
    return "" if value in ("NA", "none", "N/A") else value


def _outside_brackets(text: str) -> str:
    """Drop bracketed parts, nested ones too."""
    kept, depth = [], 0
    for char in text:
        depth += char in "(["
        if depth == 0:
            kept.append(char)
        depth -= char in ")]" and depth > 0
    return re.sub(r"\s+([,;.])", r"\1", re.sub(r"\s+", " ", "".join(kept))).strip()


def _items(text: str) -> list[str]:
    parts = re.split(r"[,;]\s*", _outside_brackets(text))
    return [part.strip() for part in parts if part.strip()]


def join_words(words: list[str] | tuple[str, ...]) -> str:
    if len(words) <= 1:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _listed(words: list[str], limit: int) -> Fact | None:
    kept = words[:limit]
    return Fact(text=join_words(kept), accepted=(join_words(kept),)) if kept else None


def _capital(profile: dict[str, Any]) -> Fact | None:
    raw = re.split(r"[;:]| in Romanian", _text(profile, "Government/Capital/name"))[0].strip()
    name = _outside_brackets(raw)
    if not name or name.startswith("no official"):
        return None
    in_brackets = re.search(r"\(([^)]*)\)", raw)
    others = [] if in_brackets is None else re.split(r"[,/]\s*", in_brackets.group(1))
    others = [other for other in others if other[:1].isupper()]
    return Fact(text=name, accepted=(name, *others))


def _currency(profile: dict[str, Any]) -> Fact | None:
    raw = _text(profile, "Economy/Exchange rates")
    if re.match(r"the US dollar (is used|became)", raw):
        return Fact(text="US dollar", accepted=("US dollar",))
    found = re.match(r"([A-Za-z'/ -]+?)\s*(?:\([A-Z/]+\))? per ", raw)
    if found is None:
        return None
    plural = re.split(r"/| or ", found.group(1))[0]
    for ending, singular in CURRENCY_SINGULARS.items():
        if plural == ending or plural.endswith(" " + ending):
            plural = plural[: len(plural) - len(ending)] + singular
            break
    plural = plural.replace("NZ ", "New Zealand ")
    name = plural if plural in CURRENCY_SINGULARS.values() else re.sub(r"(?<=[a-z])s$", "", plural)
    return Fact(text=name, accepted=(name,))


def _languages(profile: dict[str, Any]) -> Fact | None:
    raw = _text(profile, "People and Society/Languages")
    official, spoken = [], []
    for part in re.split(r"[,;]\s*(?![^()]*\))", raw):
        name = re.sub(r"\s*[\d.]+%.*", "", _outside_brackets(part))
        name = (
            re.sub(r" (is |are )?(the most )?(widely |commonly )?(used|spoken|understood).*", "", name)
            .split(" or ")[0]
            .strip()
        )
        if re.fullmatch(r"[A-Z][\w'-]*( [A-Z][\w'-]*){0,2}", name):
            (official if "official" in part else spoken).append(name)
    names = official[:3] if official else spoken[:2]
    return _listed(names, 3)


def _number_words(value: float) -> str:
    """Three leading digits at most, as a person would say them: 45925301 -> 45.9 million."""
    if value >= 1e6:
        scaled, word = (value / 1e9, "billion") if value >= 1e9 else (value / 1e6, "million")
        digits = f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.1f}".removesuffix(".0")
        return f"{digits} {word}"
    if value < 10:
        return f"{value:g}"
    unit = 10 ** max(len(str(int(value))) - 3, 0)
    return f"{round(value / unit) * unit:,.0f}"


def _leading_number(text: str) -> float:
    found = re.match(r"[\d,]*\.?\d+", text)
    if found is None:
        return 0.0
    value = float(found.group(0).replace(",", ""))
    return value * 1e6 if re.match(r"[\d,.]+ million", text) else value


def _about(value: float, unit: str) -> Fact | None:
    if value <= 0:
        return None
    words = _number_words(value)
    return Fact(text=f"about {words} {unit}".strip(), accepted=(words,))


def _government(profile: dict[str, Any]) -> Fact | None:
    raw = _outside_brackets(_text(profile, "Government/Government type"))
    name = re.sub(r"^an? ", "", re.split(r"[;,]", raw)[0]).strip()
    if (
        not name
        or len(name) > 70
        or " in March " in name
        or name.startswith(("defines", "formally", "federation with"))
    ):
        return None
    return Fact(text=name, accepted=(name,))


def _location(profile: dict[str, Any]) -> tuple[Fact | None, Fact | None]:
    raw = _text(profile, "Geography/Location") or _text(profile, "Geography/Location/metropolitan France")
    place = _outside_brackets(raw.split(";")[0]).strip(" .")
    region = place.split(",")[0].replace("Southeast Europe", "Southeastern Europe")
    if not region[:1].isupper() or len(region) > 40:
        return None, None
    if len(place) > 150:
        place = ",".join(place[:150].split(",")[:-1])
    article = "the " if region in _REGIONS_WITH_ARTICLE else ""
    return Fact(text=article + region, accepted=(region,)), Fact(text=article + place, accepted=(place,))


def _high_point(profile: dict[str, Any]) -> Fact | None:
    found = re.match(
        r"([A-Z][\w .'/-]+?)(?: \([^)]*\))? ([\d,]+) m\b", _text(profile, "Geography/Elevation extremes/highest point")
    )
    if found is None or "unnamed" in found.group(1):
        return None
    name = found.group(1).strip()
    return Fact(text=f"{name}, at {found.group(2)} metres", accepted=(name,))


def _borders(profile: dict[str, Any]) -> tuple[str, ...]:
    raw = _text(profile, "Geography/Land boundaries/border countries")
    names = []
    for part in re.split(r",\s+(?=[A-Z])", raw):
        found = re.match(r"([A-Z][A-Za-z' -]+?)(?: \([^)]*\))? [\d,.]+ km", part)
        if found is not None:
            names.append(found.group(1))
    return tuple(dict.fromkeys(names))


def _independence(profile: dict[str, Any]) -> Fact | None:
    raw = _text(profile, "Government/Independence")
    found = re.match(r"(\d{1,2} [A-Z][a-z]+ (\d{4}))(?: \(from ([^();]{2,40})\))?", raw)
    if found is None:
        return None
    origin = f", from {found.group(3)}" if found.group(3) else ""
    return Fact(text=f"on {found.group(1)}{origin}", accepted=(found.group(1),))


def _first_items(profile: dict[str, Any], path: str, limit: int) -> Fact | None:
    words = [re.sub(r"\s*[\d.]+%.*", "", item) for item in _items(_text(profile, path))]
    words = [
        word for word in words if 2 < len(word) <= 30 and not word.startswith(("note", "other", "none", "NEGL", "and "))
    ]
    return _listed(words, limit)


def _plain(profile: dict[str, Any], path: str, pattern: str) -> Fact | None:
    found = re.match(pattern, _text(profile, path))
    return None if found is None else Fact(text=found.group(1), accepted=(found.group(1),))


def _people(profile: dict[str, Any]) -> Fact | None:
    raw = re.split(r"[;,]| or ", _text(profile, "People and Society/Nationality/noun"))[0]
    name = re.sub(r"\(([a-z]+)\)", r"\1", raw.replace("man(men)", "men"))
    name = _outside_brackets(name)
    return Fact(text=name, accepted=(name,)) if re.fullmatch(r"[A-Z][A-Za-z' -]{2,30}", name) else None


def _climate(profile: dict[str, Any]) -> Fact | None:
    raw = _outside_brackets(_text(profile, "Geography/Climate"))
    words = re.sub(r" with (cold|mild)$", "", re.split(r"[;,]", raw)[0].strip())
    return Fact(text=words, accepted=(words,)) if 4 < len(words) <= 60 and " varies" not in f" {words}" else None


def _facts(profile: dict[str, Any]) -> dict[str, Fact]:
    region, location = _location(profile)
    borders = _borders(profile)
    found = {
        "capital": _capital(profile),
        "currency": _currency(profile),
        "languages": _languages(profile),
        "region": region,
        "location": location,
        "population": _about(_leading_number(_text(profile, "People and Society/Population")), "people"),
        "area": _about(_leading_number(_text(profile, "Geography/Area/total")), "square kilometres"),
        "government": _government(profile),
        "high_point": _high_point(profile),
        "borders": _listed(list(borders), 20),
        "independence": _independence(profile),
        "people": _people(profile),
        "climate": _climate(profile),
        "resources": _first_items(profile, "Geography/Natural resources", 4),
        "exports": _first_items(profile, "Economy/Exports - commodities", 3),
        "crops": _first_items(profile, "Economy/Agriculture - products", 4),
        "industries": _first_items(profile, "Economy/Industries", 3),
        "religion": _plain(profile, "People and Society/Religions", r"([A-Z][a-z]+(?: [A-Z][a-z]+)?)\b"),
        "internet": _plain(profile, "Communications/Internet country code", r"(\.[a-z]{2})\b"),
        "calling": _plain(profile, "Communications/Telephone system/international", r"country code - (\d+(?:-\d+)?)"),
        "symbol": _plain(
            profile,
            "Government/National symbol(s)",
            r"((?!white|four|a |the |stylized|two|three|red|national)[a-z][^;,(]{2,40}?)\s*(?:[;,(]|$)",
        ),
        "anthem": _plain(profile, "Government/National anthem/name", r'"([^"]+?),?"'),
    }
    return {kind: fact for kind, fact in found.items() if fact is not None}


def _sentences(text: str, limit: int) -> str:
    """The first whole sentences of at most `limit` characters."""
    kept = ""
    for sentence in re.split(r"(?<=[a-z0-9)]\.)\s+(?=[A-Z])", re.sub(r"\s+", " ", text)):
        if len(kept) + len(sentence) > limit:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def _country(code: str, profile: dict[str, Any]) -> Country | None:
    name = NAMES.get(code) or _text(profile, "Government/Country name/conventional short form")
    name = _outside_brackets(name).removeprefix("The ")
    if not name or ";" in name:
        return None
    facts = _facts(profile) | {
        kind: Fact(text=text, accepted=(text.split(", at ")[0],))
        for kind, text in FACT_FIXES.get(code, {}).items()
        if text
    }
    for kind, text in FACT_FIXES.get(code, {}).items():
        if not text:
            facts.pop(kind, None)
    return Country(
        code=code,
        name=name,
        aliases=ALIASES.get(code, ()),
        facts=facts,
        background=_sentences(_text(profile, "Introduction/Background"), 1600),
        overview=_sentences(_text(profile, "Economy/Economy - overview"), 1600),
        borders=_borders(profile),
        area_km2=_leading_number(_text(profile, "Geography/Area/total")),
        population=int(_leading_number(_text(profile, "People and Society/Population"))),
        landlocked="landlocked" in _text(profile, "Geography/Coastline"),
    )


def read_countries(folder: Path) -> list[Country]:
    """Read every profile of the unpacked package, ordered by code; oceans and the world are left out.

    Raises:
        ValueError: no profile is found in `folder`.
    """
    countries = []
    for path in sorted(folder.glob("*/??.json"), key=lambda path: path.stem):
        if path.stem in CODES_LEFT_OUT or path.parent.name == "oceans":
            continue
        country = _country(path.stem, json.loads(path.read_text(encoding="utf-8")))
        if country is not None:
            countries.append(country)
    if not countries:
        raise ValueError(
            f"folder={folder} holds no country profile. Run `make_demo_model.py corpus` to fetch the package."
        )
    return countries
