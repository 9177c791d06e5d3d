"""WordNet: definitions of the words that people use most."""

import random
import re
from pathlib import Path

from scripts.demo.documents import Document, conversation, draw_mode
from scripts.demo.facts import Turn
from scripts.demo.phrasings import SYSTEM_PROMPTS

_PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_ASKED = (
    "What does {w} mean?",
    'What does "{w}" mean?',
    "What is the meaning of {w}?",
    "Define {w}.",
    "Explain the word {w}.",
    "What is the definition of {w}?",
    "meaning of {w}?",
)


def _gloss(data: bytes, offset: int) -> str:
    line = data[offset : data.index(b"\n", offset)].decode("utf-8")
    text = line.split(" | ", 1)[1]
    text = re.split(r";\s*\"|;\s*`", text)[0].strip(" ;")
    return re.sub(r"\s+", " ", text)


def read_definitions(folder: Path) -> dict[str, str]:
    """Word -> definition of its most used sense, most used words first (by WordNet's own counts of tagged text).

    Raises:
        ValueError: the folder does not hold WordNet's index and data files.
    """
    best: dict[str, tuple[int, str, int]] = {}
    counts: dict[str, int] = {}
    try:
        for line in (folder / "cntlist.rev").read_text(encoding="utf-8").splitlines():
            key, _, count = line.split()
            word, _, rest = key.partition("%")
            counts[f"{word}%{rest[0]}"] = counts.get(f"{word}%{rest[0]}", 0) + int(count)
        data = {part: (folder / f"data.{part}").read_bytes() for part in _PARTS}
        for part, digit in zip(_PARTS, "1234", strict=True):
            for line in (folder / f"index.{part}").read_text(encoding="utf-8").splitlines():
                if line.startswith(" "):
                    continue
                fields = line.split()
                count = counts.get(f"{fields[0]}%{digit}", 0)
                if digit == "3":
                    count += counts.get(f"{fields[0]}%5", 0)
                first_sense = fields[-int(fields[2])]
                if count > best.get(fields[0], (0, "", 0))[0]:
                    best[fields[0]] = (count, part, int(first_sense))
    except OSError as error:
        raise ValueError(
            f"folder={folder} lacks {Path(error.filename).name}. Run `make_demo_model.py corpus` to fetch the package."
        ) from error
    definitions = {}
    for word, (_, part, offset) in sorted(best.items(), key=lambda item: (-item[1][0], item[0])):
        gloss = _gloss(data[part], offset)
        if re.fullmatch(r"[a-z]{2,}(_[a-z]+)?", word) and 10 <= len(gloss) <= 140:
            definitions[word.replace("_", " ")] = gloss
    return definitions


def define(rng: random.Random, word: str, gloss: str) -> Turn:
    return (
        rng.choice(_ASKED).replace("{w}", word),
        f"The user asks what {word} means.",
        f"{word.capitalize()} means: {gloss}.",
    )


def word_documents(rng: random.Random, definitions: dict[str, str], *, limit: int, often: int) -> list[Document]:
    """One or two words per conversation; the `often` most used come up three times."""
    words = list(definitions)[:limit]
    drawn = words + words[:often] * 2
    rng.shuffle(drawn)
    documents = []
    while drawn:
        turns = [
            define(rng, word, definitions[word])
            for word in (drawn.pop() for _ in range(min(len(drawn), rng.choice((1, 1, 2)))))
        ]
        prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
        documents.append(conversation(rng, "wordnet", turns, mode=draw_mode(rng), prompt=prompt))
    return documents
