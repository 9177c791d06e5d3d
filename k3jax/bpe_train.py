"""Train a byte-pair vocabulary on text and write it as a K3 tokenizer folder.

The `tokenizers` trainer counts, with K3's own pre-split; its byte alphabet is translated back to raw bytes and its ids
become the ranks. Where the trainer joins one token in two ways at different times, `tiktoken.model` cannot say so; the
vocabulary is the same, and encoding follows the ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import models, trainers

from k3jax.tokenizer import Tokenizer, load_tokenizer
from k3jax.tokenizer_files import CONFIG_FILE, write_ranks
from k3jax.tokenizer_hub import byte_alphabet, byte_level, to_hub

# Distance of each named control token from the first slot, as in the released vocabulary; negative ones count from
# the end of the slots. A name whose distance lies outside the slots is left out.
CONTROL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": -2,
    "[PAD]": -1,
}
RELEASED_SLOTS = 256
MIN_SLOTS = 32


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike[str],
    *,
    control_slots: int = RELEASED_SLOTS,
    verify_chars: int = 200_000,
) -> Tokenizer:
    """Train on `texts`, write `tiktoken.model` and `tokenizer_config.json` into `folder`, return what loads from there.

    `vocab_size` counts everything: text tokens, then `control_slots` slots for control tokens. The first
    `verify_chars` characters must encode to the same ids by tiktoken and by `tokenizers`, and decode back.

    Raises:
        ValueError: the sizes do not fit, or there is too little text for so many tokens.
    """
    num_text = vocab_size - control_slots
    if control_slots < MIN_SLOTS or num_text < 256:
        raise ValueError(
            f"vocab_size={vocab_size} with control_slots={control_slots} leaves {num_text} text tokens. At least "
            f"{MIN_SLOTS} slots and 256 text tokens, one per byte, are needed."
        )
    alphabet = byte_alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_text, show_progress=False, special_tokens=[], initial_alphabet=list(alphabet.values())
    )
    kept: list[str] = []
    trained = byte_level(models.BPE())
    trained.train_from_iterator(_keep_first(texts, kept, verify_chars), trainer)
    value_of = {character: value for value, character in alphabet.items()}
    ranks = {bytes(value_of[character] for character in token): rank for token, rank in trained.get_vocab().items()}
    if len(ranks) != num_text:
        raise ValueError(
            f"vocab_size={vocab_size} needs {num_text} text tokens, the texts give {len(ranks)}. Add text."
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_ranks(target, ranks)
    _write_config(target, first_slot=num_text, control_slots=control_slots)
    tokenizer = load_tokenizer(target)
    _verify(tokenizer, kept)
    return tokenizer


def _keep_first(texts: Iterable[str], kept: list[str], max_chars: int) -> Iterator[str]:
    for text in texts:
        if max_chars > 0:
            kept.append(text[:max_chars])
            max_chars -= len(text)
        yield text


def _verify(tokenizer: Tokenizer, texts: list[str]) -> None:
    hub = to_hub(tokenizer)
    hub.encode_special_tokens = True
    for text in texts:
        token_ids = tokenizer.encode(text)
        if token_ids != hub.encode(text).ids or tokenizer.decode(token_ids) != text:
            raise AssertionError(f"tiktoken and tokenizers disagree about {text[:80]!r}")


def _write_config(folder: Path, *, first_slot: int, control_slots: int) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {
        str(first_slot + offset % control_slots): {"content": name, **flags}
        for name, offset in CONTROL_OFFSETS.items()
        if offset < control_slots
    }
    config = {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
