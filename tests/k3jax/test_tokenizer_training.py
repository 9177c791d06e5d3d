"""Training a vocabulary, and its form for the hub's clients."""

from __future__ import annotations

import json

import pytest
import tokenizers

from k3jax.bpe_train import train_bpe
from k3jax.tokenizer import load_tokenizer
from k3jax.tokenizer_hub import byte_alphabet, write_tokenizer_json
from tests.k3jax.tokenizer_data import FOLDER, small_tokenizer

TEXTS = [f"the thing number {i} sings, and the string rings {i * 37}\n" for i in range(300)]


def test_a_trained_vocabulary_has_the_asked_size_and_loads_from_its_folder(tmp_path):
    tokenizer = train_bpe(iter(TEXTS), 352, tmp_path, control_slots=32)
    assert (tokenizer.vocab_size, tokenizer.num_text_tokens) == (352, 320)
    assert tokenizer.control_id("<|end_of_msg|>") == 322
    assert tokenizer.control_id("[PAD]") == 351
    assert "<osagent_mode>" not in tokenizer.control_ids
    again = load_tokenizer(tmp_path)
    assert again.encode(TEXTS[7]) == tokenizer.encode(TEXTS[7])


def test_training_joins_frequent_strings(tmp_path):
    tokenizer = train_bpe(TEXTS, 352, tmp_path, control_slots=32)
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("the thing")] == [b"the", b" thing"]


def test_the_same_texts_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        train_bpe(TEXTS, 352, tmp_path / name, control_slots=32)
    assert (tmp_path / "a/tiktoken.model").read_bytes() == (tmp_path / "b/tiktoken.model").read_bytes()


def test_too_little_text_and_too_small_vocabularies_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 768 text tokens, the texts give"):
        train_bpe(["ab ab"], 1024, tmp_path)
    with pytest.raises(ValueError, match="vocab_size=500 with control_slots=256 leaves 244 text tokens"):
        train_bpe(TEXTS, 500, tmp_path)


def test_the_byte_alphabet_gives_every_byte_its_own_character():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "Ġ", "Ċ")


def test_the_hub_form_gives_the_same_ids_on_200_mixed_strings(tmp_path):
    write_tokenizer_json(small_tokenizer(), tmp_path)
    hub = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hub.encode_special_tokens = True  # text that looks like a control token stays text
    for text, ids in json.loads((FOLDER / "golden.json").read_text())["strings"]:
        assert hub.encode(text).ids == ids, text
        assert hub.decode(ids) == text


def test_the_hub_form_knows_every_slot_by_id_and_name(tmp_path):
    tokenizer = small_tokenizer()
    write_tokenizer_json(tokenizer, tmp_path)
    hub = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert hub.get_vocab_size() == tokenizer.vocab_size
    for token_id in range(tokenizer.num_text_tokens, tokenizer.vocab_size):
        assert hub.id_to_token(token_id) == tokenizer.token_bytes(token_id).decode()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|end_of_msg|>"
    assert config["added_tokens_decoder"]["771"]["content"] == "<|open|>"
