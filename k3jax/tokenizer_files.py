"""Read and write the files of a tokenizer folder, and check them.

The control tokens' ids come from `tokenizer_config.json`; the vocabulary's size and the begin, end and padding ids from
the model's `config.json` where there is one.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"


class TokenizerError(ValueError):
    """A tokenizer file is missing or malformed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """Named control tokens and the size of the whole vocabulary."""

    ids: dict[str, int]
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int


def read_ranks(folder: Path) -> dict[bytes, int]:
    """Read `tiktoken.model`, a base64 token and its rank per line: ranks contiguous, every single byte present."""
    path = folder / RANKS_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}. A K3 tokenizer needs it.") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            message = f"{path} line {number} is not a base64 token and its rank: {line[:80]!r} ({error})."
            raise TokenizerError(message) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or b"" in ranks:
        raise TokenizerError(f"{path} must number its {len(ranks)} distinct tokens 0, 1, 2, ... without gaps.")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{path} lacks the single bytes {missing[:8]}: text with them could not be encoded.")
    return ranks


def write_ranks(folder: str | os.PathLike[str], ranks: Mapping[bytes, int]) -> Path:
    """Write `tiktoken.model`."""
    path = Path(folder) / RANKS_FILE
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered))
    return path


def read_control_tokens(folder: Path, *, num_text_tokens: int) -> ControlTokens:
    """Read the named control tokens and derive the vocabulary's size."""
    path = folder / CONFIG_FILE
    config = _read_json(path)
    if config is None:
        raise TokenizerError(f"{path} is missing: the control tokens' ids are only there.")
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{path} has no object `added_tokens_decoder` (id -> content).")
    ids: dict[str, int] = {}
    for key, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or not isinstance(content, str) or not content or content in ids:
            raise TokenizerError(f"{path}: added_tokens_decoder[{key!r}] = {entry!r} is not an id with a new content.")
        ids[content] = int(key)
    model = _model_config(folder)
    vocab_size = model.get("vocab_size", max(ids.values(), default=-1) + 1)
    for name, token_id in ids.items():
        if not num_text_tokens <= token_id < vocab_size:
            raise TokenizerError(
                f"{path}: {name} has id {token_id}, but control tokens lie behind the {num_text_tokens} ranks of "
                f"{RANKS_FILE} and below the vocabulary size {vocab_size}."
            )

    def pick(model_key: str, config_key: str | None, default: str) -> int:
        found = model.get(model_key)
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and 0 <= found < vocab_size:
            return found
        name = config.get(config_key, default) if config_key else default
        name = name.get("content") if isinstance(name, dict) else name
        if name not in ids:
            raise TokenizerError(f"{path}: added_tokens_decoder does not name {name!r}, wanted as {model_key}.")
        return ids[name]

    return ControlTokens(
        ids=ids,
        vocab_size=vocab_size,
        bos_id=pick("bos_token_id", "bos_token", "[BOS]"),
        # Generation ends at the end of a message. The tokenizer's own eos_token ends documents, so it is not asked.
        eos_id=pick("eos_token_id", None, "<|end_of_msg|>"),
        pad_id=pick("pad_token_id", "pad_token", "[PAD]"),
    )


def _model_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / "config.json") or {}
    text_config = config.get("text_config")
    return {**config, **text_config} if isinstance(text_config, dict) else config


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold a JSON object, found {type(data).__name__}.")
    return data
