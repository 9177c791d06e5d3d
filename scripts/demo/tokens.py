"""Render documents to token ids with K3's chat format, and mark which of them are trained on."""

from collections.abc import Iterator

from k3jax.chat.literals import ChatLiterals
from k3jax.chat.render import render_chat
from k3jax.tokenizer import Tokenizer
from scripts.demo.documents import Document, Mode, user


class DocumentEncoder:
    """Encodes documents of one vocabulary; `encode` gives ids and, per id, whether its prediction counts."""

    def __init__(self, tokenizer: Tokenizer, literals: ChatLiterals):
        self._tokenizer = tokenizer
        self._literals = literals
        names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        self._open, self._close, self._sep, self._end = (tokenizer.control_id(name) for name in names)
        self._assistant = self._opening("message", ("role", "assistant"))
        think, response = self._opening("think"), self._opening("response")
        no_thought = [*think, self._close, *tokenizer.encode("think"), self._sep]
        # What stands before the first id that the model writes itself; an empty thought is what a client left out.
        self._before_answer = (no_thought, think, response)

    def _opening(self, tag: str, *attributes: tuple[str, str]) -> list[int]:
        ids = [self._open, *self._tokenizer.encode(tag)]
        for key, value in attributes:
            for segment in (f" {key}", '="', value, '"'):
                ids += self._tokenizer.encode(segment)
        return [*ids, self._sep]

    def prompt(self, question: str, mode: Mode) -> list[int]:
        """The ids of one question, ready for generation."""
        return render_chat(
            self._tokenizer,
            [user(question)],
            literals=self._literals,
            thinking=mode.thinking,
            reasoning_effort=mode.effort,
        )

    def encode(self, document: Document) -> tuple[list[int], list[bool]]:
        """Return ids and loss marks. In plain text everything counts, in a conversation what the assistant wrote.

        Raises:
            AssertionError: no part of a conversation would be trained on.
        """
        if document.text:
            ids = [*self._tokenizer.encode(document.text), self._end]
            return ids, [True] * len(ids)
        ids = self._render(document)
        marks = [False] * len(ids)
        for start, stop in self._answers(ids):
            marks[start:stop] = [True] * (stop - start)
        if not any(marks):
            raise AssertionError(f"no assistant part found in {document.messages!r}")
        return ids, marks

    def _render(self, document: Document) -> list[int]:
        common = {
            "literals": self._literals,
            "tools": document.tools,
            "thinking": document.mode.thinking,
            "reasoning_effort": document.mode.effort,
        }
        whole = render_chat(self._tokenizer, document.messages, add_generation_prompt=False, **common)
        if document.tool_choice is None and document.response_format is None:
            return whole
        # These notes stand just before the answer, so the prompt is rendered as a server would and the answer appended.
        asked = document.messages[:-1]
        plain = render_chat(self._tokenizer, asked, **common)
        noted = render_chat(
            self._tokenizer, asked, tool_choice=document.tool_choice, response_format=document.response_format, **common
        )
        if whole[: len(plain)] != plain:
            raise AssertionError(f"the prompt of {document.messages!r} is no prefix of the conversation")
        return noted + whole[len(plain) :]

    def _answers(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        header = self._assistant
        position = 0
        while position < len(ids):
            if ids[position : position + len(header)] != header:
                position += 1
                continue
            start = position + len(header)
            opening = next(opening for opening in self._before_answer if ids[start : start + len(opening)] == opening)
            stop = ids.index(self._end, start) + 1
            yield start + len(opening), stop
            position = stop
