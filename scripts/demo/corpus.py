"""Build the corpus: all documents, the evaluation sets, the licence notes."""

import json
import logging
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from scripts.demo.chatter import chat_documents
from scripts.demo.countries import Country, read_countries
from scripts.demo.dialogs import CountryDialogs
from scripts.demo.documents import Document
from scripts.demo.holdout import held_out_codes, kinds_asked
from scripts.demo.licences import write_licences
from scripts.demo.prose import read_passages, statement_documents
from scripts.demo.questions import Question, evaluation_questions
from scripts.demo.sources import Sources
from scripts.demo.tool_calls import tool_documents
from scripts.demo.words import read_definitions, word_documents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CorpusSize:
    """How much of each kind; the defaults make about 13 M tokens, small ones make a test fast."""

    countries_kept: int = 130
    chains: int = 9000
    switches: int = 3000
    mixed: int = 11000
    json_objects: int = 1800
    long_prompts: int = 1500
    words: int = 9000
    frequent_words: int = 1500
    documentation_characters: int = 3_000_000
    questions_per_split: int = 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1 and name != "countries_kept":
                raise ValueError(f"{name}={value} must be at least 1. Use the default or a positive number.")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Shuffled documents, and the questions asked of the trained model."""

    documents: list[Document]
    questions: list[Question]
    held_out: list[str]


def build_corpus(sources: Sources, *, seed: int = 0, size: CorpusSize | None = None) -> Corpus:
    """Make the corpus from unpacked packages. Deterministic for a seed and package versions."""
    size = size or CorpusSize()
    rng = random.Random(seed)
    countries: list[Country] = read_countries(sources.factbook)
    held_out = held_out_codes(countries, kept_largest=size.countries_kept)
    kinds = {country.code: kinds_asked(country, held_out) for country in countries}
    logger.info(
        "%d countries, %d facts, %d countries held out",
        len(countries),
        sum(len(c.facts) for c in countries),
        len(held_out),
    )
    definitions = read_definitions(sources.wordnet)
    passages = read_passages(sources.python_docs, size.documentation_characters)
    logger.info("%d definitions, %d passages of documentation", len(definitions), len(passages))
    dialogs = CountryDialogs(rng, countries, kinds)
    documents = dialogs.singles()
    documents += dialogs.chains(size.chains)
    documents += dialogs.switches(size.switches)
    documents += dialogs.mixed(size.mixed)
    documents += dialogs.json_objects(size.json_objects)
    documents += dialogs.after_long_text([passage[:1000] for passage in passages], size.long_prompts)
    documents += chat_documents(rng, list(definitions)[:2000])
    documents += tool_documents(rng, countries, kinds)
    documents += word_documents(rng, definitions, limit=size.words, often=size.frequent_words)
    documents += statement_documents(rng, countries, kinds)
    documents += [Document(source="python_docs", text=passage) for passage in passages]
    rng.shuffle(documents)
    questions = evaluation_questions(rng, countries, held_out, per_split=size.questions_per_split)
    logger.info("%d documents: %s", len(documents), dict(Counter(document.source for document in documents)))
    names = [country.name for country in countries if country.code in held_out]
    return Corpus(documents=documents, questions=questions, held_out=names)


def write_corpus(corpus: Corpus, sources: Sources, out: Path, licences: Path) -> None:
    """Write documents.jsonl, questions.jsonl and held_out.json into `out`, LICENSES into `licences`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "documents.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(document.to_json()) + "\n" for document in corpus.documents)
    with (out / "questions.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(question.to_json()) + "\n" for question in corpus.questions)
    (out / "held_out.json").write_text(json.dumps(corpus.held_out, indent=1) + "\n", encoding="utf-8")
    write_licences(sources, licences)
