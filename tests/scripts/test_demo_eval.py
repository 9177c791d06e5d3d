"""`make_demo_model.py eval` against a server that answers what the test lets it."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat import load_chat_literals, render_chat
from k3jax.tokenizer import load_tokenizer
from scripts.demo import eval_cmd
from scripts.demo.pack import write_prompts
from scripts.demo.questions import SPLITS, Question
from scripts.demo.replies import Prompt, Reply, draw_per_split, read_prompts, read_replies, reply_line, score_replies
from scripts.demo.tokens import DocumentEncoder
from scripts.make_demo_model import main
from serving.fake_executor import Fault
from tests.api.served import serve
from tests.k3jax.tokenizer_data import FOLDER, model_ids, small_literals, small_tokenizer
from tests.project.tracked import REPOSITORY

END = "<|close|>message<|sep|><|end_of_msg|>"
QUESTIONS = [
    Question(question="What is the capital of France?", answers=("Paris",), kind="capital", split="train"),
    Question(question="What is the capital of Spain?", answers=("Madrid",), kind="capital", split="train"),
    Question(question="Which city rules Kenya?", answers=("Nairobi",), kind="capital", split="held_out_phrasing"),
    Question(question="What is the capital of Oman?", answers=("Muscat",), kind="capital", split="held_out_country"),
    Question(question="What is the capital of Zor?", answers=("do not know",), kind="unknown", split="unknown_country"),
]


def message(answer: str, thought: str = "Hm.") -> list[int]:
    return model_ids(f"{thought}<|close|>think<|sep|><|open|>response<|sep|>{answer}<|close|>response<|sep|>{END}")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """What `pack` leaves: the vocabulary and the questions as ids."""
    folder = tmp_path / "packed"
    folder.mkdir()
    shutil.copytree(FOLDER, folder / "tokenizer")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(question.to_json()) + "\n" for question in QUESTIONS))
    write_prompts(questions, folder / "prompts.jsonl", DocumentEncoder(small_tokenizer(), small_literals()))
    return folder


def answering(packed: Path, answer: Callable[[Question], list[int]]) -> Callable[[tuple[int, ...]], Any]:
    """A model that knows the packed prompts by their ids and nothing else."""
    replies = {prompt.ids: answer(prompt.question) for prompt in read_prompts(packed / "prompts.jsonl")}
    return lambda prompt: replies.get(prompt, model_ids(END))


def run_eval(packed: Path, out: Path, *arguments: str) -> int:
    return main(["eval", "--data", str(packed), "--out", str(out), *arguments])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_packed_prompts_are_what_the_chat_endpoint_would_render_by_default(packed):
    [first, *_] = read_prompts(packed / "prompts.jsonl")
    messages = [{"role": "user", "content": first.question.question}]
    with serve(says=message("x")) as served:
        body = served.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True}).json()
    assert tuple(body["prompt_token_ids"]) == first.ids


def test_replies_are_scored_by_their_content_and_not_by_their_reasoning(packed, tmp_path, caplog):
    def answer(question: Question) -> list[int]:
        if question.split == "train":
            return message(f"It is {question.answers[0]}.")
        return message("No idea.", thought=f"{question.answers[0]}?")

    caplog.set_level("INFO")
    with serve(says=answering(packed, answer)) as served:
        assert run_eval(packed, tmp_path / "replies.jsonl", "--url", served.url) == 0
    lines = [line for line in caplog.messages if "%" in line]
    assert [line.split("%")[0].split()[-1] for line in lines] == ["100.0", "0.0", "0.0", "0.0"]
    assert lines[0].startswith("training questions")
    assert {record["question"]: record["right"] for record in records(tmp_path / "replies.jsonl")} == {
        question.question: question.split == "train" for question in QUESTIONS
    }


def test_an_answer_that_never_came_is_wrong_and_said_to_be_cut_off(packed, tmp_path, caplog):
    caplog.set_level("INFO")
    with serve(says=answering(packed, lambda question: message("x", thought=question.answers[0] * 9))) as served:
        assert run_eval(packed, tmp_path / "replies.jsonl", "--url", served.url, "--max-tokens", "4") == 0
    assert "5 replies were cut off at --max-tokens" in caplog.messages
    assert {record["finish_reason"] for record in records(tmp_path / "replies.jsonl")} == {"length"}


def test_replies_that_are_there_are_not_asked_again(packed, tmp_path):
    out = tmp_path / "replies.jsonl"
    with serve(says=answering(packed, lambda question: message(question.answers[0]))) as served:
        assert run_eval(packed, out, "--url", served.url) == 0
    lines = out.read_text().splitlines(keepends=True)
    # Killed in the middle of writing the fourth reply.
    out.write_text("".join(lines[:3]) + lines[3][:40])
    with serve(says=message("Else.")) as served:
        assert run_eval(packed, out, "--url", served.url) == 0
        ended = re.findall(r"^k3jax_request_success_total{.*} (.*)$", served.http.get("/metrics").text, re.MULTILINE)
    assert sum(map(float, ended)) == 2
    assert out.read_text().startswith("".join(lines[:3]))
    assert [record["reply"] for record in records(out)][3:] == ["Else.", "Else."]


def test_a_failed_request_leaves_the_other_replies_and_says_how_to_go_on(packed, tmp_path, capsys):
    out = tmp_path / "replies.jsonl"
    says = answering(packed, lambda question: message(question.answers[0]))
    steps = len(message(QUESTIONS[0].answers[0]))
    with serve(says=says, faults=[Fault(step=steps + 5, kind="nan")]) as served:
        assert run_eval(packed, out, "--url", served.url, "--concurrency", "1") == 2
    error = capsys.readouterr().err
    assert "Run the same command again to go on." in error
    assert len(records(out)) == 1
    with serve(says=says) as served:
        assert run_eval(packed, out, "--url", served.url) == 0
    assert all(record["right"] for record in records(out))


def test_without_a_server_the_file_is_scored_alone_and_missing_replies_are_an_error(packed, tmp_path, capsys):
    out = tmp_path / "replies.jsonl"
    assert run_eval(packed, out) == 2
    assert "5 of 5 prompts have no reply yet" in capsys.readouterr().err
    with serve(says=answering(packed, lambda question: message(question.answers[0]))) as served:
        assert run_eval(packed, out, "--url", served.url) == 0
    assert run_eval(packed, out) == 0


def test_replies_of_another_model_are_not_mixed_in(packed, tmp_path, capsys):
    out = tmp_path / "replies.jsonl"
    out.write_text(reply_line(Prompt(question=QUESTIONS[0]), Reply(text="a", finish_reason="stop"), "other"))
    with serve(says=message("x")) as served:
        assert run_eval(packed, out, "--url", served.url) == 2
    assert "replies of model 'other', not of 'demo'" in capsys.readouterr().err


def test_wrong_answers_are_shown_beside_the_right_ones(packed, tmp_path, caplog):
    caplog.set_level("INFO")
    with serve(says=message("Lima.")) as served:
        assert run_eval(packed, tmp_path / "replies.jsonl", "--url", served.url, "--show-wrong", "2") == 0
    shown = [json.loads(line.removeprefix("wrong: ")) for line in caplog.messages if line.startswith("wrong: ")]
    assert [(line["said"], line["right"]) for line in shown] == [("Lima.", ["Paris"]), ("Lima.", ["Madrid"])]


def test_a_checkout_without_the_packed_prompts_asks_the_sample_as_chats(tmp_path, monkeypatch, caplog):
    sample = tmp_path / "sample.jsonl"
    sample.write_text("".join(json.dumps(question.to_json()) + "\n" for question in QUESTIONS))
    monkeypatch.setattr(eval_cmd, "SAMPLE_FILE", sample)
    caplog.set_level("INFO")
    with serve(says=message("Paris, Madrid or Nairobi.")) as served:
        assert run_eval(tmp_path / "absent", tmp_path / "replies.jsonl", "--url", served.url) == 0
    assert f"5 questions of {sample}" in caplog.messages
    assert sum(record["right"] for record in records(tmp_path / "replies.jsonl")) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no model answers there"),
        (["--url", "nonsense"], "no model answers there"),
        (["--limit", "0"], "--limit=0"),
        (["--concurrency", "0"], "--concurrency=0"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(packed, tmp_path, arguments, message, capsys):
    assert run_eval(packed, tmp_path / "replies.jsonl", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_line_that_is_no_reply_is_named(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="line 1, holds no reply"):
        read_replies(path)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.sampled_from(SPLITS), max_size=40))
def test_a_smaller_draw_is_part_of_a_larger_one(few, more, splits):
    prompts = [
        Prompt(question=Question(question=f"{number}?", answers=("yes",), kind="capital", split=split))
        for number, split in enumerate(splits)
    ]
    small, large = (draw_per_split(prompts, limit) for limit in sorted((few, more)))
    assert {prompt.key for prompt in small} <= {prompt.key for prompt in large}
    sizes = Counter(prompt.question.split for prompt in large)
    assert sizes == {split: min(count, max(few, more)) for split, count in Counter(splits).items()}


def test_one_reply_counts_for_every_question_with_the_same_prompt():
    asked_twice = [Prompt(question=question) for question in (QUESTIONS[0], QUESTIONS[0])]
    scores = score_replies(asked_twice, {QUESTIONS[0].question: Reply(text="Paris", finish_reason="stop")})
    assert scores["train"]["right"] == 2


def test_the_committed_sample_has_fifty_questions_of_every_split_and_stays_small():
    path = REPOSITORY / "demo" / "questions.jsonl"
    prompts = read_prompts(path)
    assert Counter(prompt.question.split for prompt in prompts) == dict.fromkeys(SPLITS, 50)
    assert path.stat().st_size < 60_000
    tokenizer, literals = load_tokenizer(path.parent), load_chat_literals(path.parent)
    lengths = [
        len(render_chat(tokenizer, [{"role": "user", "content": prompt.question.question}], literals=literals))
        for prompt in prompts
    ]
    assert max(lengths) < 200
