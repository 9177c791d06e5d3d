"""Encoding, decoding and loading of K3's tokenizer, on a small vocabulary of our own in the released file format."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from k3jax.tokenizer import MAX_RUN_CHARS, Tokenizer, TokenizerError, cut_long_text, load_tokenizer, split_pattern
from tests.k3jax.tokenizer_data import FOLDER, small_tokenizer

GOLDEN = json.loads((FOLDER / "golden.json").read_text())


def reference_encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode by definition: split, then join the neighbours of lowest rank until none joins. Slow, another engine."""
    ranks = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.num_text_tokens)}
    ids = []
    for piece in regex.findall("(?V1)" + split_pattern(), text):
        parts = [bytes([value]) for value in piece.encode()]
        while True:
            joins = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            rank, index = min(joins, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def copy_folder(target: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, target)
    return target


def test_ids_of_markers_and_of_200_mixed_strings_are_the_stored_ones():
    """D69."""
    tokenizer = small_tokenizer()
    assert tokenizer.control_ids == GOLDEN["control_ids"]
    assert len(GOLDEN["strings"]) == 200
    for text, ids in GOLDEN["strings"]:
        assert tokenizer.encode(text) == ids, text


def test_ids_of_mixed_strings_follow_the_definition_of_byte_pair_merging():
    tokenizer = small_tokenizer()
    for text, _ in GOLDEN["strings"]:
        assert tokenizer.encode(text) == reference_encode(tokenizer, text), text


@given(st.text())
def test_decoding_an_encoded_text_gives_the_text_back(text):
    tokenizer = small_tokenizer()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.sampled_from([*GOLDEN["control_ids"], "<|reserved_token_900|>", " a", "<|", "|>"])))
def test_no_text_encodes_to_a_control_token(parts):
    """D34, the tokenizer's part."""
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("".join(parts))
    assert not any(tokenizer.is_control(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == "".join(parts)


def test_lone_surrogates_encode_as_replacement_characters():
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello World", ["Hello", " World"]),
        ("HTTPServer's", ["HTTPServer's"]),
        ("we'LL don't", ["we'LL", " don't"]),
        ("中文abc中", ["中文", "abc", "中"]),
        ("(中", ["(", "中"]),
        ("12345", ["123", "45"]),
        ("a, b!?\n\nc", ["a", ",", " b", "!?\n\n", "c"]),
        ("a   b", ["a", "  ", " b"]),
        ("a \n b  ", ["a", " \n", " b", "  "]),
        ("\tÉa", ["\tÉa"]),
    ],
)
def test_text_is_cut_into_these_pieces_before_merging(text, pieces):
    assert regex.findall("(?V1)" + split_pattern(), text) == pieces


@pytest.mark.parametrize(("before", "run"), [(" ", "x"), ("x", " "), ("", "x"), ("x", "\n\t")])
def test_long_runs_of_blanks_or_others_are_cut_every_25000_characters(before, run):
    first, second = run * (MAX_RUN_CHARS // len(run)), run * (MAX_RUN_CHARS // len(run))
    tail = run + ("x" if run.isspace() else " ") * 3
    assert list(cut_long_text(before + first + second + tail)) == [before + first, second, tail]


def test_text_is_cut_every_400000_characters_even_inside_a_word():
    text = "message " * 60_000
    assert list(cut_long_text("a" + text)) == ["a" + text[:399_999], text[399_999:]]


def test_a_cut_inside_a_word_separates_its_tokens():
    tokenizer = small_tokenizer()
    text = "ing" * 8334  # 25,002 characters: the cut falls behind the first letter of the last "ing"
    (whole,) = tokenizer.encode("ing")
    assert tokenizer.encode(text) == [whole] * 8333 + tokenizer.encode("i") + tokenizer.encode("ng")


def test_control_tokens_and_unnamed_slots_decode_as_their_names():
    tokenizer = small_tokenizer()
    assert tokenizer.decode([tokenizer.control_id("<|open|>"), 900]) == "<|open|><|reserved_token_900|>"
    assert tokenizer.is_control(900)
    assert not tokenizer.is_control(tokenizer.num_text_tokens - 1)


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = small_tokenizer()
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary of 1024"):
            tokenizer.decode([token_id])


def test_the_message_end_is_the_generation_end_not_the_document_end():
    tokenizer = small_tokenizer()
    assert tokenizer.eos_id == tokenizer.end_of_message_id == tokenizer.control_id("<|end_of_msg|>")
    assert tokenizer.bos_id == tokenizer.control_id("[BOS]")
    assert tokenizer.pad_id == tokenizer.control_id("[PAD]") == tokenizer.vocab_size - 1


def test_the_models_config_decides_size_and_special_ids(tmp_path):
    copy_folder(tmp_path)
    config = {
        "text_config": {"vocab_size": 1088, "eos_token_id": [770, 769], "bos_token_id": 769, "pad_token_id": 1087}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (1088, 770, 769, 1087)
    assert tokenizer.decode([1087]) == "<|reserved_token_1087|>"


def test_it_loads_without_network_transformers_or_code_of_the_folder(tmp_path):
    """D69: in a fresh process in which sockets and transformers do not work; the folder's code would end it."""
    copy_folder(tmp_path)
    for name in ("tokenization_kimi.py", "encoding_k3.py"):
        (tmp_path / name).write_text("raise SystemExit('remote code ran')\n")
    program = f"""
import json, socket, sys
def refuse(*args, **kwargs):
    raise OSError("no network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.modules["transformers"] = None
from k3jax.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(tmp_path)!r})
golden = json.load(open({str(FOLDER / "golden.json")!r}))
assert all(tokenizer.encode(text) == ids for text, ids in golden["strings"])
print("same", len(golden["strings"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same 200\n"


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(TokenizerError, match=r"tiktoken\.model cannot be read"):
        load_tokenizer(tmp_path)
    shutil.copy(FOLDER / "tiktoken.model", tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is missing"):
        load_tokenizer(tmp_path)


def ranks_text(tokens: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


BYTES = [bytes([value]) for value in range(256)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("IQ== 0\n???? 1\n", r"line 2 is not a base64 token and its rank"),
        ("IQ==\n", r"line 1 is not a base64 token"),
        ("IQ== 0\nIg== 2\n", r"0, 1, 2, \.\.\. without gaps"),
        (ranks_text([*BYTES, b"A"]), r"without gaps"),
        (ranks_text(BYTES[1:]), r"lacks the single bytes \[0\]"),
        ("", r"lacks the single bytes"),
    ],
)
def test_a_malformed_rank_file_is_an_error_that_says_where(tmp_path, content, message):
    copy_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(TokenizerError, match=r"tiktoken\.model.*" + message):
        load_tokenizer(tmp_path)


def test_control_tokens_among_the_text_tokens_are_refused(tmp_path):
    copy_folder(tmp_path)
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["5"] = {"content": "<|odd|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"<\|odd\|> has id 5, but control tokens lie behind the 768 ranks"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no object `added_tokens_decoder`"),
        ('{"added_tokens_decoder": {"x": {}}}', "is not an id with a new content"),
        ('{"added_tokens_decoder": {"768": {"content": "[BOS]"}}}', "does not name '<|end_of_msg|>'"),
    ],
)
def test_a_malformed_tokenizer_config_is_an_error_that_names_it(tmp_path, content, message):
    copy_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)
    assert message in str(caught.value)
