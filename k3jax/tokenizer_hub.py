"""Write a tokenizer in the hub's `tokenizer.json` form, for clients that only load that.

What the form cannot say: text is not cut at K3's lengths, and control tokens are recognised in text unless the client
sets `encode_special_tokens`. The server never uses these files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from k3jax.tokenizer import Tokenizer, split_pattern
from k3jax.tokenizer_files import CONFIG_FILE


def byte_alphabet() -> dict[int, str]:
    """Map every byte to the printable character that byte-level tokenizers write for it.

    Printable Latin-1 stands for itself, the other bytes are numbered from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """Put K3's pre-split in front of a byte-level model."""
    tokenizer = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(tokenizers.Regex(split_pattern()), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def to_hub(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return the same vocabulary as a `tokenizers` object."""
    alphabet = byte_alphabet()
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_text_tokens)]
    written = {token: "".join(alphabet[value] for value in token) for token in tokens}
    merges = [(written[left], written[right]) for left, right in _merges(tokens)]
    vocab = {written[token]: token_id for token_id, token in enumerate(tokens)}
    # A piece that is a token is taken whole even where no chain of merges reaches it, as tiktoken does.
    hub = byte_level(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    for token_id in range(tokenizer.num_text_tokens, tokenizer.vocab_size):
        content = tokenizer.token_bytes(token_id).decode()
        hub.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
    return hub


def write_tokenizer_json(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write `tokenizer.json` and a matching `tokenizer_config.json` into `folder`, creating it."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    to_hub(tokenizer).save(str(target / "tokenizer.json"))
    name = {token_id: tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.control_ids.values()}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(token_id): {"content": name[token_id], **flags} for token_id in sorted(name)},
        "bos_token": name.get(tokenizer.bos_id),
        "eos_token": name.get(tokenizer.eos_id),
        "pad_token": name.get(tokenizer.pad_id),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (target / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _merges(tokens: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield every way to make a token from two others, cheapest token first.

    Ranks say which joins are allowed only implicitly: any two neighbours may join when the result is a token.
    """
    rank = {token: token_id for token_id, token in enumerate(tokens)}
    for token in tokens:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in rank and pair[1] in rank]
        yield from sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
