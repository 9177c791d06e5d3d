"""K3's tokenizer: byte-pair ranks from `tiktoken.model`, control tokens from `tokenizer_config.json`.

Loads from a local folder only; nothing is downloaded and no code of the folder runs. Encoding text can never give a
control id: the encoder is built without control tokens, whoever wants one asks for it by name.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

from k3jax.tokenizer_files import TokenizerError, read_control_tokens, read_ranks

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerError", "load_tokenizer", "split_pattern"]

END_OF_MESSAGE = "<|end_of_msg|>"
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")


def split_pattern() -> str:
    """Return the regular expression that cuts text into the pieces merges stay inside.

    Alternatives in order: Han runs; words by letter case, with one leading other character and an English
    contraction behind; up to three digits; punctuation with a leading space and trailing line ends; blanks.
    Needs a dialect with class intersection (`&&`): tiktoken's and Oniguruma have it.
    """
    not_han = r"&&[^\p{Han}]"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    contraction = "(?i:" + "|".join(f"'{ending}" for ending in ("s", "t", "re", "ve", "m", "ll", "d")) + ")?"
    return "|".join(
        (
            r"[\p{Han}]+",
            f"{lead}{upper}*{lower}+{contraction}",
            f"{lead}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


class Tokenizer:
    """Text to ids and back. Immutable after construction, safe to share between threads."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        control_ids: dict[str, int],
        *,
        vocab_size: int,
        bos_id: int,
        eos_id: int,
        pad_id: int,
    ) -> None:
        """`ranks` are contiguous from 0 and hold every single byte; control tokens fill the slots behind them."""
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=split_pattern(), mergeable_ranks=ranks, special_tokens={}, explicit_n_vocab=len(ranks)
        )
        names = {token_id: name for name, token_id in control_ids.items()}
        self._num_text = len(ranks)
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        for token_id in range(self._num_text, vocab_size):
            self._bytes.append(names.get(token_id, f"<|reserved_token_{token_id}|>").encode())
        self.control_ids = dict(control_ids)
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.end_of_message_id = self.control_id(END_OF_MESSAGE)

    @property
    def num_text_tokens(self) -> int:
        """Ids below this are text, ids from here to `vocab_size` are control tokens."""
        return self._num_text

    def encode(self, text: str) -> list[int]:
        """Encode text; what looks like a control token is text like any other. Lone surrogates become U+FFFD."""
        if len(text) <= MAX_RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        return [token_id for piece in cut_long_text(text) for token_id in self._encoding.encode_ordinary(piece)]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode ids, control tokens as their names; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, for a control token its name in UTF-8."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}.")
        return self._bytes[token_id]

    def is_control(self, token_id: int) -> bool:
        """Tell whether the id is a control token or an unnamed slot."""
        return self._num_text <= token_id < self.vocab_size

    def control_id(self, name: str) -> int:
        """Return the id of a control token by its name.

        Raises:
            KeyError: the tokenizer has no such control token.
        """
        try:
            return self.control_ids[name]
        except KeyError:
            raise KeyError(f"no control token {name!r}; this tokenizer names {sorted(self.control_ids)}") from None


class IncrementalDetokenizer:
    """Turn a stream of ids into text that never shows half a character.

    The joined results equal `Tokenizer.decode` of all ids. A character is released with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """Return what is left: nothing, or U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        TokenizerError: a file is missing or malformed; the message names it.
    """
    folder = Path(path)
    ranks = read_ranks(folder)
    control = read_control_tokens(folder, num_text_tokens=len(ranks))
    if END_OF_MESSAGE not in control.ids:
        raise TokenizerError(f"{folder / 'tokenizer_config.json'} names no {END_OF_MESSAGE} in added_tokens_decoder.")
    return Tokenizer(
        ranks,
        control.ids,
        vocab_size=control.vocab_size,
        bos_id=control.bos_id,
        eos_id=control.eos_id,
        pad_id=control.pad_id,
    )


def cut_long_text(text: str) -> Iterator[str]:
    """Cut long text: at fixed lengths, and inside overlong runs of blanks or non-blanks.

    Where the cuts are is part of the vocabulary's definition: other cuts give other ids.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        begin = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]
