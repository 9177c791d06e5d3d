"""Assembly of one choice from engine deltas, bursts of several tokens included."""

from __future__ import annotations

import pytest

from k3jax.chat import ChatParser
from serving.core.types import FinishReason, OutputDelta, TokenLogprobs
from serving.text.choices import AssembledMessage, ChatChoice, Choice, ChoiceUpdate, CompletionChoice
from tests.k3jax.tokenizer_data import model_ids, small_tokenizer

TOKENIZER = small_tokenizer()
END = TOKENIZER.end_of_message_id
BYTE_IDS = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.num_text_tokens)}
CALLS = (
    "<|close|>think<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
    '<|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def feed(choice: Choice, token_ids: list[int], size: int, reason: FinishReason = FinishReason.LENGTH):
    """Feed `size` tokens a step; the last delta carries `reason`. Stop where the choice stops."""
    updates: list[ChoiceUpdate] = []
    for start in range(0, len(token_ids), size):
        is_last = start + size >= len(token_ids)
        delta = OutputDelta(
            request_id="r",
            token_ids=tuple(token_ids[start : start + size]),
            finish_reason=reason if is_last else None,
        )
        updates.append(choice.push(delta))
        if updates[-1].finish_reason is not None:
            break
    return updates


def chat_choice(**options) -> ChatChoice:
    return ChatChoice(TOKENIZER, ChatParser(TOKENIZER, thinking=True), **options)


@pytest.mark.parametrize("text", ["삼겹살", "⌈m/2⌉", "a🙂b"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_character_comes_whole_with_the_token_that_completes_it(text: str, size: int):
    """D35."""
    ids = [BYTE_IDS[bytes([byte])] for byte in text.encode()]
    updates = feed(CompletionChoice(TOKENIZER), ids, size)
    assert "".join(update.text for update in updates) == text
    for count, _ in enumerate(updates, start=1):
        complete = text.encode()[: count * size].decode("utf-8", "ignore")
        assert "".join(update.text for update in updates[:count]) == complete


def test_a_character_that_is_never_completed_ends_as_a_replacement():
    ids = [BYTE_IDS[bytes([byte])] for byte in "살".encode()[:2]]
    assert "".join(update.text for update in feed(CompletionChoice(TOKENIZER), ids, 1)) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_string_ends_the_text_and_the_count_inside_a_burst(size: int):
    """D36, D37: the tokens behind the one that completes the stop string are neither shown nor counted."""
    before, after = TOKENIZER.encode("The quick br") + TOKENIZER.encode("own") + TOKENIZER.encode(" fox"), [1] * 10
    choice = CompletionChoice(TOKENIZER, stop_strings=["own fox"])
    updates = feed(choice, before + after, size)
    assert "".join(update.text for update in updates) == "The quick br"
    assert updates[-1].finish_reason == "stop"
    assert choice.completion_tokens == len(before)
    assert sum(len(update.tokens) for update in updates) == len(before)


def test_a_stop_token_is_counted_and_not_shown():
    choice = CompletionChoice(TOKENIZER)
    ids = [*TOKENIZER.encode("abc"), END]
    assert "".join(update.text for update in feed(choice, ids, 1, FinishReason.STOP)) == "abc"
    assert choice.completion_tokens == len(ids)


def test_control_tokens_are_shown_when_asked_for():
    ids = [TOKENIZER.control_id("<|open|>"), *TOKENIZER.encode("think")]
    shown = feed(CompletionChoice(TOKENIZER, skip_special_tokens=False), ids, 1)
    hidden = feed(CompletionChoice(TOKENIZER), ids, 1)
    assert "".join(update.text for update in shown) == "<|open|>think"
    assert "".join(update.text for update in hidden) == "think"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tool_calls_come_whole_whatever_the_burst(size: int):
    """D33, D43: indices in order, finish reason tool_calls."""
    updates = feed(chat_choice(), model_ids("plan" + CALLS), size, FinishReason.STOP)
    message = AssembledMessage()
    for update in updates:
        message.add(update.deltas)
    assert message.reasoning == "plan"
    assert message.content == ""
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"x": 3}'), ("g", "{}")]
    assert updates[-1].finish_reason == "tool_calls"


def test_without_parallel_calls_the_message_ends_before_a_second_one():
    choice = chat_choice(parallel_tool_calls=False)
    updates = feed(choice, model_ids(CALLS), 1, FinishReason.STOP)
    message = AssembledMessage()
    for update in updates:
        message.add(update.deltas)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"x": 3}')]
    assert updates[-1].finish_reason == "tool_calls"
    assert choice.completion_tokens < len(model_ids(CALLS))


def test_stop_strings_are_looked_for_in_the_content_only():
    markup = "a STOP b<|close|>think<|sep|><|open|>response<|sep|>c STOP d<|close|>response<|sep|>"
    updates = feed(chat_choice(stop_strings=["STOP"]), model_ids(markup), 1)
    message = AssembledMessage()
    for update in updates:
        message.add(update.deltas)
    assert (message.reasoning, message.content) == ("a STOP b", "c ")
    assert updates[-1].finish_reason == "stop"


def test_text_held_for_a_stop_string_is_released_at_the_end():
    markup = "<|close|>think<|sep|><|open|>response<|sep|>half a ST"
    updates = feed(chat_choice(stop_strings=["STOP"]), model_ids(markup), 1)
    message = AssembledMessage()
    for update in updates:
        message.add(update.deltas)
    assert message.content == "half a ST"
    assert updates[-1].finish_reason == "length"


def test_every_token_keeps_its_logprobs():
    ids = TOKENIZER.encode("Hello")
    logprobs = tuple(TokenLogprobs(chosen=-float(index)) for index, _ in enumerate(ids))
    delta = OutputDelta(request_id="r", token_ids=tuple(ids), logprobs=logprobs, finish_reason=FinishReason.LENGTH)
    update = CompletionChoice(TOKENIZER).push(delta)
    assert [token.logprobs for token in update.tokens] == list(logprobs)
    offsets = [len(TOKENIZER.decode(ids[:count])) for count, _ in enumerate(ids)]
    assert [token.text_offset for token in update.tokens] == offsets
