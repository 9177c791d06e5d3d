"""Plain text to continue: statements about countries, country profiles, the Python documentation."""

import random
import re
from pathlib import Path

from scripts.demo.countries import Country
from scripts.demo.documents import Document
from scripts.demo.facts import capitalised, fill, state
from scripts.demo.phrasings import PHRASINGS

# The chapters that read as prose come first; reference lists and change logs teach little.
_DOC_FOLDERS = ("tutorial", "howto", "faq", "library", "reference", "using")
_PASSAGE = 1400


def statement(rng: random.Random, country: Country, kind: str) -> str:
    return capitalised(state(rng.choice(PHRASINGS[kind].statements), country, country.facts[kind]))


def statement_documents(rng: random.Random, countries: list[Country], asked: dict[str, list[str]]) -> list[Document]:
    """Facts as statements: profiles of one country, short texts about several, and "Q: ... A: ..." lines.

    Every fact of every country stands here, also what no conversation asks; only the "Q:" lines keep to `asked`.
    """
    texts = []
    for country in countries:
        if not country.facts:
            continue
        for _ in range(6):
            kinds = rng.sample(list(country.facts), len(country.facts))
            texts.append(" ".join(statement(rng, country, kind) for kind in kinds))
    stated = [(country, kind) for country in countries for kind in country.facts]
    capitals = [(country, "capital") for country in countries if "capital" in country.facts]
    for drawn in (stated, capitals, capitals):
        rng.shuffle(drawn)
        for first in range(0, len(drawn), 3):
            texts.append(" ".join(statement(rng, *pair) for pair in drawn[first : first + 3]))
    asked_pairs = [(country, kind) for country in countries for kind in asked[country.code]]
    for _ in range(1500):
        lines = []
        for country, kind in rng.sample(asked_pairs, rng.randint(1, 3)):
            phrasing = PHRASINGS[kind]
            answer = rng.choice((capitalised(country.facts[kind].text), statement(rng, country, kind)))
            lines.append(f"Q: {capitalised(fill(rng.choice(phrasing.asked), country))}\nA: {answer}")
        texts.append("\n".join(lines))
    texts += [text for country in countries for text in (country.background, country.overview) if text]
    return [Document(source="statements", text=text) for text in texts]


def _readable(source: str) -> str:
    """Strip reStructuredText down to prose and code."""
    kept = []
    for line in source.splitlines():
        if re.match(r"\s*(\.\. |:[a-z-]+:|[=\-~^*#\"]{4,}\s*$|\+[-=+]+$|\|)", line):
            continue
        line = re.sub(r":[a-z:+]+:`~?!?([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", line)
        line = re.sub(r"``([^`]*)``", r"\1", line)
        line = re.sub(r"`([^`<]*?)\s*<[^>]*>`_+", r"\1", line)
        kept.append(line.replace("\\", "").rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def read_passages(folder: Path, limit: int) -> list[str]:
    """Passages of at most 1,400 characters out of the documentation's sources, `limit` characters altogether.

    Raises:
        ValueError: no documentation source is found in `folder`.
    """
    passages: list[str] = []
    total = 0
    for name in _DOC_FOLDERS:
        for path in sorted((folder / name).glob("*.rst.txt")):
            passage = ""
            for paragraph in _readable(path.read_text(encoding="utf-8")).split("\n\n"):
                if len(passage) + len(paragraph) > _PASSAGE and len(passage) > 300:
                    passages.append(passage)
                    total += len(passage)
                    passage = ""
                passage = f"{passage}\n\n{paragraph}".strip("\n") if len(paragraph) <= _PASSAGE else passage
            if total > limit:
                return passages
    if not passages:
        raise ValueError(
            f"folder={folder} holds no *.rst.txt page. Run `make_demo_model.py corpus` to fetch the package."
        )
    return passages
