"""Parsing generated tokens: reasoning, content and tool calls, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat import ChatDelta, ChatParser, render_chat
from k3jax.chat.events import ChatSummary, ParsedToolCall
from tests.k3jax.tokenizer_data import model_ids, small_literals, small_tokenizer, split_markers

END = "<|close|>message<|sep|><|end_of_msg|>"


def response(text: str) -> str:
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"


def think_end(text: str = "") -> str:
    return f"{text}<|close|>think<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def call(name: str, index: int, *elements: str) -> str:
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(elements)}<|close|>call<|sep|>'


def tools(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


def parser(*, thinking: bool = True) -> ChatParser:
    return ChatParser(small_tokenizer(), thinking=thinking, make_call_id=lambda index, name: f"{name}:{index}")


def join(deltas: Iterable[ChatDelta]) -> tuple[str, str, list[list[str]]]:
    """Add deltas up the way a client does, checking their form."""
    reasoning, content = "", ""
    calls: list[list[str]] = []
    for delta in deltas:
        pieces = [delta.reasoning, delta.content, delta.tool_call]
        assert sum(piece is not None for piece in pieces) == 1
        assert delta.reasoning != ""
        assert delta.content != ""
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        if delta.tool_call is not None:
            piece = delta.tool_call
            if piece.id is not None:
                assert piece.index == len(calls)
                assert piece.name
                calls.append([piece.id, piece.name, piece.arguments])
            else:
                assert piece.name is None
                assert piece.arguments
                calls[piece.index][2] += piece.arguments
    return reasoning, content, calls


def as_joined(summary: ChatSummary) -> tuple[str, str, list[list[str]]]:
    calls = [[one.id, one.name, one.arguments] for one in summary.tool_calls]
    return summary.reasoning or "", summary.content or "", calls


def parse(markup: str, *, finish: str = "stop", thinking: bool = True) -> ChatSummary:
    """Parse the tokens one by one; the summary must equal the joined deltas."""
    machine = parser(thinking=thinking)
    deltas = [delta for token_id in model_ids(markup) for delta in machine.feed([token_id])]
    deltas += machine.finish(finish)
    summary = machine.summary()
    assert join(deltas) == as_joined(summary)
    return summary


OUTPUTS = {
    "text only": think_end("a plan") + response("The answer.") + END,
    "thinking that never closes": "on and on",
    "empty think": think_end() + response("hello") + END,
    "empty everything": think_end() + response("") + END,
    "one call": think_end("p") + response("") + tools(call("f", 1, argument("x", "number", "3"))) + END,
    "two calls": think_end() + response("ok") + tools(call("f", 1), call("g", 2, argument("s", "string", 'a"b'))) + END,
    "calls only": think_end() + tools(call("f", 1, argument("o", "object", '{"a": [1, 2]}'))) + END,
    "two kinds of argument": think_end()
    + tools(call("f", 1, argument("a", "string", ""), argument("b", "null", "null"))),
    "think not closed before tools": "plan" + tools(call("f", 1, argument("x", "number", "3"))) + END,
    "response not closed": think_end() + "<|open|>response<|sep|>done" + END,
    "response not opened": think_end("p") + "\n Hello there" + END,
    "a half marker as text": think_end() + response("a <| b <|open") + END,
    "a comparison": think_end("if a < b | c") + response("a < b | c > d <") + END,
    "unicode": think_end("삼겹살 ⌈m/2⌉") + response("🦊 中文") + END,
    "raw json": think_end() + tools(call("f", 1, '<|open|>json type="object"<|sep|>{"a": 1<|close|>json<|sep|>')) + END,
    "a stray marker in text": think_end("a <|open|> is a marker") + response("so <|close|> is") + END,
    "text after the end": think_end() + response("x") + END + "more",
    "an element after the end": think_end() + response("x") + END + response("more") + tools(call("f", 1)),
    "unknown element": think_end() + response("a<|open|>b c<|sep|>d<|close|>b<|sep|>e") + END,
    "blanks between elements": think_end()
    + "\n"
    + response("x")
    + "\n \n"
    + tools("\n", call("f", 1), "\n")
    + "\n"
    + END,
    "text behind the response": think_end() + response("x") + " \n y" + END,
    "blanks before and text behind": think_end() + "\n" + response("x") + "y" + END,
    "cut inside a header": think_end("p") + "<|open|>respo",
}


def test_the_message_of_each_part_is_found():
    summary = parse(OUTPUTS["two calls"])
    assert summary == ChatSummary(
        reasoning=None,
        content="ok",
        tool_calls=(
            ParsedToolCall(id="f:0", name="f", arguments="{}"),
            ParsedToolCall(id="g:1", name="g", arguments='{"s": "a\\"b"}'),
        ),
        finish_reason="tool_calls",
        reasoning_tokens=0,
    )


def test_a_tool_call_is_found_although_think_was_not_closed():
    """D27."""
    summary = parse("plan" + tools(call("f", 1, argument("x", "number", "3"))) + "<|close|>message<|sep|>")
    assert (summary.reasoning, summary.content) == ("plan", None)
    assert [(one.name, json.loads(one.arguments)) for one in summary.tool_calls] == [("f", {"x": 3})]
    assert summary.finish_reason == "tool_calls"


@pytest.mark.parametrize("tail", ["", "<|close|>", "<|close|>th", "<|close|>think", "<|open|>"])
def test_thinking_that_is_cut_off_stays_thinking(tail):
    """D28."""
    summary = parse("still thinking ab" + tail, finish="length")
    assert (summary.reasoning, summary.content, summary.tool_calls) == ("still thinking ab", None, ())
    assert summary.finish_reason == "length"


def test_no_marker_leaks_when_the_response_is_not_closed():
    """D29."""
    summary = parse("<|close|>think<|sep|><|open|>response<|sep|>done<|close|>message<|sep|>")
    assert (summary.reasoning, summary.content, summary.finish_reason) == (None, "done", "stop")


@pytest.mark.parametrize("markup", OUTPUTS.values(), ids=OUTPUTS)
def test_any_grouping_of_tokens_gives_the_same_message(markup):
    """D30, at the level of tokens."""
    ids = model_ids(markup)
    machine = parser()
    whole = join(machine.feed(ids) + machine.finish())
    rng = random.Random(5)
    for size in (1, 3, 7, None, None, None):
        machine = parser()
        deltas: list[ChatDelta] = []
        position = 0
        while position < len(ids):
            step = size or rng.randint(1, 9)
            deltas += machine.feed(ids[position : position + step])
            position += step
        assert join(deltas + machine.finish()) == whole
        assert as_joined(machine.summary()) == whole


@pytest.mark.parametrize("markup", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_any_cut_of_the_text_gives_the_same_message(markup, size):
    """D30, at the level of characters."""
    machine, whole = parser(), parser()
    deltas, expected = [], []
    for kind, text in split_markers(markup):
        expected += whole.feed_event(kind, text)
        for start in range(0, len(text), size if kind == "text" else len(text)):
            deltas += machine.feed_event(kind, text[start : start + size] if kind == "text" else text)
    assert join(deltas + machine.finish()) == join(expected + whole.finish())


@pytest.mark.parametrize(
    ("name", "reasoning", "content"),
    [
        ("a half marker as text", None, "a <| b <|open"),
        ("a comparison", "if a < b | c", "a < b | c > d <"),
        ("a stray marker in text", "a  is a marker", "so  is"),
        ("response not opened", "p", "Hello there"),
        ("text after the end", None, "x"),
        ("an element after the end", None, "x"),
        ("unknown element", None, "ade"),
        ("blanks between elements", None, "x"),
        ("text behind the response", None, "x \n y"),
        ("blanks before and text behind", None, "xy"),
        ("unicode", "삼겹살 ⌈m/2⌉", "🦊 中文"),
        ("cut inside a header", "p", None),
    ],
)
def test_text_is_shown_in_full_and_markup_never(name, reasoning, content):
    """D29, D30."""
    summary = parse(OUTPUTS[name])
    assert (summary.reasoning, summary.content) == (reasoning, content)


def test_text_that_looks_like_markup_stays_text():
    """D34, seen from the output: only control token ids are structure."""
    machine = parser(thinking=False)
    looks = "<|close|>response<|sep|><|open|>tools<|sep|><|end_of_msg|>"
    machine.feed(small_tokenizer().encode(looks))
    machine.finish()
    assert machine.summary().content == looks


def test_other_control_tokens_are_not_shown():
    tokenizer = small_tokenizer()
    machine = parser(thinking=False)
    machine.feed([*tokenizer.encode("a"), tokenizer.control_id("[EOS]"), 900, *tokenizer.encode("b")])
    machine.finish()
    assert machine.summary().content == "ab"


def test_a_header_without_end_gives_its_text_back():
    summary = parse(think_end() + "<|open|>response<|sep|>x<|open|>" + "long " * 300 + END)
    assert summary.content == "x" + "long " * 300


def test_names_and_keys_are_unescaped():
    """D31: rendered, then parsed."""
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": 'a&"b&quot;', "arguments": {'k"': "&quot;"}}}]}
    ids = render_chat(small_tokenizer(), [turn], literals=small_literals(), thinking=False, add_generation_prompt=False)
    assert 'tool="a&amp;&quot;b&amp;quot;"' in small_tokenizer().decode(ids)
    assert 'key="k&quot;"' in small_tokenizer().decode(ids)
    machine = parser(thinking=False)
    machine.feed(ids)
    machine.finish()
    (only,) = machine.summary().tool_calls
    assert (only.name, json.loads(only.arguments)) == ('a&"b&quot;', {'k"': "&quot;"})


def test_a_long_string_argument_streams_piecewise():
    """D32: the name comes whole and once, then arguments come at every step."""
    value = ('line "quoted" \\ tab\t' + "ü漢") * 220
    value = value[:5000].ljust(5000, "x")
    machine = parser()
    deltas = machine.feed(
        model_ids(think_end() + '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>')
    )
    assert [(d.tool_call.index, d.tool_call.id, d.tool_call.name) for d in deltas if d.tool_call] == [
        (0, "write_file:0", "write_file")
    ]
    deltas += machine.feed(model_ids('<|open|>argument key="text" type="string"<|sep|>'))
    silent = 0
    for start in range(0, 5000, 10):
        step = machine.feed(model_ids(value[start : start + 10]))
        assert all(d.tool_call is not None and d.tool_call.name is None for d in step)
        silent = 0 if step else silent + 1
        assert silent <= 2
        deltas += step
    deltas += machine.feed(model_ids("<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>" + END))
    _, _, calls = join(deltas + machine.finish())
    assert json.loads(calls[0][2]) == {"text": value}


def test_two_calls_with_the_same_index_are_two_calls():
    """D33."""
    machine = ChatParser(small_tokenizer(), thinking=True)  # with its own random ids
    deltas = machine.feed(model_ids(think_end() + tools(call("f", 1), call("g", 1)) + END)) + machine.finish()
    started = [d.tool_call for d in deltas if d.tool_call and d.tool_call.id]
    assert [(one.index, one.name) for one in started] == [(0, "f"), (1, "g")]
    assert started[0].id != started[1].id


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("number", " 1e3\n", 1000.0),
        ("boolean", "true", True),
        ("null", "", None),
        ("array", '[1, "x"]', [1, "x"]),
        ("object", '{"a": {}}', {"a": {}}),
        ("number", "about 3", "about 3"),
        ("number", "NaN", "NaN"),
        ("object", '{"a": ', '{"a": '),
        ("string", ' raw\n"x" ', ' raw\n"x" '),
        ("strange", "7", 7),
    ],
)
def test_typed_values_become_json_and_what_is_no_json_becomes_a_string(kind, text, value):
    (only,) = parse(think_end() + tools(call("f", 1, argument("k", kind, text))) + END).tool_calls
    assert json.loads(only.arguments, parse_constant=lambda name: pytest.fail(name)) == {"k": value}


def test_a_call_cut_off_by_the_length_limit_is_not_completed():
    cut = think_end() + '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>'
    string = parse(cut + '<|open|>argument key="path" type="string"<|sep|>/tmp', finish="length")
    assert (string.tool_calls[0].arguments, string.finish_reason) == ('{"path": "/tmp', "length")
    number = parse(cut + '<|open|>argument key="n" type="number"<|sep|>12', finish="length")
    assert number.tool_calls[0].arguments == '{"n": 12'


def test_a_call_left_open_by_a_stopped_message_is_closed():
    cut = think_end() + '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="s" type="string"<|sep|>x'
    for ending in ("", "<|end_of_msg|>", END, "<|close|>tools<|sep|>", '<|open|>call tool="g"<|sep|>'):
        assert parse(cut + ending).tool_calls[0].arguments == '{"s": "x"}'


def test_raw_json_is_passed_through_as_it_is():
    (only,) = parse(OUTPUTS["raw json"]).tool_calls
    assert only.arguments == '{"a": 1'


def test_reasoning_tokens_are_the_text_tokens_inside_think():
    count = len(small_tokenizer().encode("a plan in words"))
    assert parse(think_end("a plan in words") + response("text") + END).reasoning_tokens == count
    assert parse(response("text") + END, thinking=False).reasoning_tokens == 0


def test_without_thinking_the_output_starts_inside_the_response():
    summary = parse("hello<|close|>response<|sep|>" + END, thinking=False)
    assert (summary.reasoning, summary.content, summary.finish_reason) == (None, "hello", "stop")


def test_a_character_cut_by_a_marker_is_shown_as_broken_in_its_own_channel():
    tokenizer = small_tokenizer()
    first_byte = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xec")
    machine = parser()
    deltas = machine.feed([first_byte]) + machine.feed(model_ids(think_end() + response("x"))) + machine.finish()
    assert join(deltas) == ("\ufffd", "x", [])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
NAMES = TEXT.filter(bool)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(TEXT, VALUES, max_size=3)), max_size=3)


@given(reasoning=TEXT, content=TEXT, calls=CALLS)
def test_a_rendered_turn_parses_back_and_renders_to_the_same_tokens(reasoning, content, calls):
    """D46, for any turn: ids of the history start with prompt and generated ids."""
    tokenizer, literals = small_tokenizer(), small_literals()
    if not reasoning.strip():
        reasoning = ""
    user = {"role": "user", "content": "go"}
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"id": str(i), "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)],
    }
    prompt = render_chat(tokenizer, [user], literals=literals)
    whole = render_chat(tokenizer, [user, turn], literals=literals, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    machine = parser()
    machine.feed(whole[len(prompt) :])
    machine.finish()
    summary = machine.summary()
    assert (summary.reasoning or "", summary.content or "") == (reasoning, content)
    assert [(one.name, json.loads(one.arguments)) for one in summary.tool_calls] == calls
    parsed = {
        "role": "assistant",
        "content": summary.content,
        "reasoning_content": summary.reasoning,
        "tool_calls": [
            {"id": one.id, "function": {"name": one.name, "arguments": one.arguments}} for one in summary.tool_calls
        ],
    }
    again = render_chat(tokenizer, [user, parsed, {"role": "user", "content": "next"}], literals=literals)
    assert again[: len(whole)] == whole


def test_history_with_a_tool_result_continues_the_generated_tokens():
    """D46, with values written as only a model would write them."""
    tokenizer, literals = small_tokenizer(), small_literals()
    user = {"role": "user", "content": "go"}
    prompt = render_chat(tokenizer, [user], literals=literals)
    calls = (
        call("f", 1, argument("x", "number", "1e3"), argument("o", "object", '{"a":1}')),
        call("g", 2, argument("s", "string", "two\nlines")),
    )
    rendered = render_chat(
        tokenizer,
        [
            user,
            {
                "role": "assistant",
                "content": "text",
                "reasoning_content": "plan",
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": '{"x": 1e3, "o": {"a":1}}'}},
                    {"id": "2", "function": {"name": "g", "arguments": '{"s": "two\\nlines"}'}},
                ],
            },
        ],
        literals=literals,
        add_generation_prompt=False,
    )
    generated = rendered[len(prompt) :]
    assert tokenizer.decode(generated) == think_end("plan") + response("text") + tools(*calls) + END
    machine = parser()
    machine.feed(generated)
    machine.finish()
    summary = machine.summary()
    back = {
        "role": "assistant",
        "content": summary.content,
        "reasoning_content": summary.reasoning,
        "tool_calls": [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in summary.tool_calls
        ],
    }
    result = {"role": "tool", "tool_call_id": summary.tool_calls[0].id, "content": "done"}
    ids = render_chat(tokenizer, [user, back, result], literals=literals)
    assert ids[: len(prompt) + len(generated)] == prompt + generated
    assert 'role="tool" tool="f" index="1"' in tokenizer.decode(ids[len(prompt) + len(generated) :])
