"""Tokenising the demo corpus, packing it into rows, and scoring replies."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat.literals import OWN_LITERALS
from k3jax.chat.render import render_chat
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer_files import CONFIG_FILE
from scripts.demo import pack
from scripts.demo.corpus import CorpusSize, build_corpus, write_corpus
from scripts.demo.documents import Document, Mode, assistant, user
from scripts.demo.pack import TokenFile, load_encoder, pack_documents, read_token_file, write_token_file
from scripts.demo.questions import Question, is_right, score
from scripts.demo.rows import fill_rows, pack_rows
from scripts.demo.tokens import DocumentEncoder
from scripts.make_demo_model import main
from tests.scripts.demo_sources import write_sources

THINKING = Mode(thinking=True)
VOCABULARY = 1024


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, packed with a small vocabulary."""
    folder = tmp_path_factory.mktemp("work")
    sources = write_sources(tmp_path_factory.mktemp("packages"))
    size = CorpusSize(
        countries_kept=0, chains=60, switches=20, mixed=80, json_objects=40, long_prompts=5, words=40, frequent_words=5,
        documentation_characters=1000, questions_per_split=30,
    )  # fmt: skip
    corpus = build_corpus(sources, size=size)
    kept = random.Random(0).sample(corpus.documents, 1200)
    write_corpus(dataclasses.replace(corpus, documents=kept), sources, folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "VOCABULARY", VOCABULARY)
        pack.pack_corpus(folder, folder / "packed")
    return folder


@pytest.fixture(scope="module")
def encoder(work: Path) -> DocumentEncoder:
    return load_encoder(work / "packed" / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(work: Path) -> Tokenizer:
    return pack.load_tokenizer(work / "packed" / "tokenizer")


@pytest.fixture(scope="module")
def packed(work: Path) -> TokenFile:
    return read_token_file(work / "packed" / "train.npz")


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()


def trained_text(encoder: DocumentEncoder, tokenizer: Tokenizer, document: Document) -> str:
    ids, marks = encoder.encode(document)
    return spelled(tokenizer, [token_id for token_id, mark in zip(ids, marks, strict=True) if mark])


def test_only_what_the_assistant_writes_is_trained_on(encoder: DocumentEncoder, tokenizer: Tokenizer) -> None:
    document = Document(
        source="chat", messages=[user("Hi <|open|>"), assistant("Hello!", "Greet.", THINKING)], mode=THINKING
    )
    assert trained_text(encoder, tokenizer, document) == (
        "Greet.<|close|>think<|sep|><|open|>response<|sep|>Hello!<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


def test_a_left_out_earlier_thought_is_not_learnt_as_an_empty_thought(
    encoder: DocumentEncoder, tokenizer: Tokenizer
) -> None:
    messages = [user("a"), assistant("b", "", THINKING), user("c"), assistant("d", "e", THINKING)]
    text = trained_text(encoder, tokenizer, Document(source="chat", messages=messages, mode=THINKING))
    assert text.startswith("<|open|>response<|sep|>b<|close|>")
    assert "<|end_of_msg|>e<|close|>think<|sep|>" in text


def test_without_thinking_the_answer_alone_is_trained_on(encoder: DocumentEncoder, tokenizer: Tokenizer) -> None:
    mode = Mode(thinking=False)
    document = Document(source="chat", messages=[user("a"), assistant("b", "unused", mode)], mode=mode)
    expected = "b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    assert trained_text(encoder, tokenizer, document) == expected


def test_the_trained_part_follows_the_prompt_that_a_server_renders(
    encoder: DocumentEncoder, tokenizer: Tokenizer
) -> None:
    """Also with notes that stand behind the last question, such as a wanted response format."""
    wanted = {"type": "json_object"}
    messages = [user("France as JSON"), assistant("{}", "x", THINKING)]
    document = Document(source="factbook", messages=messages, mode=THINKING, response_format=wanted)
    ids, marks = encoder.encode(document)
    prompt = render_chat(tokenizer, messages[:1], literals=OWN_LITERALS, response_format=wanted)
    assert ids[: len(prompt)] == prompt
    assert marks == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


def test_plain_text_counts_whole_and_ends_the_message(encoder: DocumentEncoder, tokenizer: Tokenizer) -> None:
    ids, marks = encoder.encode(Document(source="statements", text="Paris is the capital of France."))
    assert spelled(tokenizer, ids) == "Paris is the capital of France.<|end_of_msg|>"
    assert all(marks)


def test_control_tokens_stand_at_the_released_distances_from_the_first_slot(work: Path) -> None:
    config = json.loads((work / "packed" / "tokenizer" / CONFIG_FILE).read_text())
    ids = {entry["content"]: int(token_id) for token_id, entry in config["added_tokens_decoder"].items()}
    first = VOCABULARY - 256
    assert (ids["[BOS]"], ids["<|end_of_msg|>"], ids["<|open|>"]) == (first, first + 2, first + 3)
    assert (ids["[UNK]"], ids["[PAD]"]) == (VOCABULARY - 2, VOCABULARY - 1)


def test_the_token_file_survives_being_written(encoder: DocumentEncoder, tmp_path: Path) -> None:
    documents = [Document(source="statements", text=f"Text number {number}.") for number in range(7)]
    written = pack_documents(documents, encoder)
    write_token_file(written, tmp_path / "train.npz")
    read = read_token_file(tmp_path / "train.npz")
    for name in ("tokens", "starts", "loss", "sources"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))


def test_a_token_file_too_large_to_travel_is_refused(
    encoder: DocumentEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "MAX_FILE_BYTES", 100)
    file = pack_documents([Document(source="statements", text="Some text.")], encoder)
    with pytest.raises(ValueError, match="more than 100. Build a smaller corpus"):
        write_token_file(file, tmp_path / "train.npz")


def test_rows_keep_documents_apart_and_predict_only_inside_them(packed: TokenFile) -> None:
    rows = pack_rows(packed, row_tokens=512, seed=0)
    same_document = (rows.segments[:, :-1] == rows.segments[:, 1:]) & (rows.segments[:, 1:] > 0)
    assert not rows.counts[:, :-1][~same_document].any()
    assert not rows.counts[:, -1].any()
    assert rows.segments.max() > 1
    assert (rows.segments > 0).mean() > 0.9


def test_rows_train_every_marked_token_once(packed: TokenFile) -> None:
    """Except for what opens a document: nothing stands before it."""
    rows = pack_rows(packed, row_tokens=int(np.diff(packed.starts).max()), seed=3)
    trained = np.roll(rows.tokens, -1, axis=1)[rows.counts]
    expected = packed.loss.copy()
    expected[packed.starts[:-1]] = False
    np.testing.assert_array_equal(np.sort(trained), np.sort(packed.tokens[expected]))


def test_rows_depend_on_the_seed_alone(packed: TokenFile) -> None:
    one, same, other = (pack_rows(packed, row_tokens=256, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.tokens, same.tokens)
    assert one.tokens.shape != other.tokens.shape or not np.array_equal(one.tokens, other.tokens)


def test_documents_longer_than_a_row_are_cut(encoder: DocumentEncoder) -> None:
    file = pack_documents(
        [Document(source="statements", text="one two three four five six seven eight nine ten")], encoder
    )
    rows = pack_rows(file, row_tokens=4, seed=0)
    kept = len(file.tokens) - (len(file.tokens) % 4 == 1)  # a lone last token predicts nothing
    assert sorted(rows.tokens[rows.segments > 0]) == sorted(file.tokens[:kept])
    assert rows.segments.max() == 1


def test_rows_of_one_token_are_refused(packed: TokenFile) -> None:
    with pytest.raises(ValueError, match="row_tokens=1 leaves nothing to predict"):
        pack_rows(packed, row_tokens=1, seed=0)


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 8))
def test_rows_hold_every_item_once_and_never_overflow(lengths: list[int], look_back: int) -> None:
    rows = fill_rows(np.asarray(lengths, np.int64), 50, look_back=look_back)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 50 for row in rows)


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("Paris", "The capital of France is Paris.", True),
        ("Paris", "It is Parisian.", False),
        ("US dollar", "Ecuador uses the US dollar.", True),
        ("45.9 million", "About 45.9 million people.", True),
        ("45.9 million", "About 459 million people.", False),
        ("N'Djamena", "n'djamena", True),
        ("Saint John's", "Saint George's", False),
    ],
)
def test_a_reply_is_right_when_it_holds_the_answer_as_whole_words(answer: str, reply: str, right: bool) -> None:
    question = Question(question="?", answers=(answer,), kind="capital", split="train")
    assert is_right(question, reply) is right


def test_scores_are_counted_per_split_and_kind() -> None:
    questions = [
        Question(question="?", answers=(answer,), kind=kind, split=split)
        for answer, kind, split in (
            ("a1", "capital", "train"),
            ("b1", "area", "train"),
            ("c1", "capital", "held_out_country"),
        )
    ]
    scores = score(questions, ["a1", "no", "c1"])
    assert scores["train"] == {"accuracy": 0.5, "right": 1, "total": 2}
    assert scores["train/area"]["right"] == 0
    assert scores["held_out_country"]["accuracy"] == 1.0
    with pytest.raises(ValueError):
        score(questions, ["a1"])


def test_packing_without_a_corpus_says_which_step_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", "--out", str(tmp_path)]) == 2
    assert "Run `make_demo_model.py corpus` first." in capsys.readouterr().err
