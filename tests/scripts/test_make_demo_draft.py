"""`make_demo_draft.py`: its files, its steps on a tiny model, and the draft that travels with the demo model."""

import argparse
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.checkpoint_writer import write_checkpoint
from k3jax.config import K3Config
from k3jax.draft_loading import load_draft, open_draft
from k3jax.draft_train_states import teacher_states
from k3jax.train_step import initial_params
from scripts import make_demo_draft
from scripts.demo.documents import Document, Mode, assistant, user
from scripts.demo.pack import (
    PROMPT_FILE,
    TOKEN_FILE,
    load_encoder,
    pack_documents,
    read_token_file,
    write_prompts,
    write_token_file,
)
from scripts.demo.questions import Question
from scripts.demo.replies import read_prompts
from scripts.demo_draft.answers import Ask
from scripts.demo_draft.collect_cmd import ROW_TOKENS
from scripts.demo_draft.conversations import (
    CONVERSATION_FILE,
    Amounts,
    Conversation,
    asks,
    conversation_line,
    corpus_conversations,
    read_conversations,
)
from scripts.demo_draft.eval_cmd import summary
from scripts.demo_draft.shape import ROOT, draft_config
from scripts.demo_draft.states import RECORD_FILE, extend_states, open_states, pack, states_of_rows
from scripts.make_demo_draft import STEPS, main, parser
from tests.k3jax.tiny_training import TOKENIZER, tiny_config

DEMO_DRAFT = ROOT / "demo/draft"


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Random ones, with one or two spans."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = tuple(rng.integers(0, 1000, rng.integers(8, 40)).tolist())
        edges = np.sort(rng.choice(len(tokens) + 1, 2 * rng.integers(1, 3), replace=False)).tolist()
        found.append(Conversation(kind="corpus", tokens=tokens, spans=tuple(zip(edges[::2], edges[1::2], strict=True))))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed corpus of short conversations and one plain text, with questions of two splits."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(TOKENIZER, folder / "tokenizer", ignore=shutil.ignore_patterns("*.py", "golden.json"))
    encoder, mode = load_encoder(folder / "tokenizer"), Mode(thinking=True)
    documents = [Document(source="statements", text="some plain text")]
    for number in range(12):
        turns = [user(f"What is {number}?"), assistant(f"It is {number}.", "I know.", mode)]
        documents.append(Document(source="factbook", messages=turns * (1 + number % 2), mode=mode))
    write_token_file(pack_documents(documents, encoder), folder / TOKEN_FILE)
    with (folder / "questions.jsonl").open("w") as file:
        for split in ("train", "held_out_phrasing"):
            for number in range(4):
                question = Question(question=f"{split} {number}?", answers=(str(number),), kind="capital", split=split)
                file.write(json.dumps(question.to_json()) + "\n")
    write_prompts(folder / "questions.jsonl", folder / PROMPT_FILE, encoder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with random weights."""
    folder = tmp_path_factory.mktemp("model")
    params = jax.jit(initial_params, static_argnums=(0, 1))(tiny_config(), 3)
    write_checkpoint(params, tiny_config(), folder)
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.py", "golden.json"), dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> k3jax.Model:
    return k3jax.load(model_folder, dtype="float32")


# --- files -----------------------------------------------------------------------------------------------------------
def test_conversations_read_back_and_a_line_cut_off_is_dropped(tmp_path: Path):
    path = tmp_path / CONVERSATION_FILE
    assert read_conversations(path) == []
    lines = [conversation_line(one) for one in conversations(5)]
    path.write_text("".join(lines) + lines[0][:-5])
    assert read_conversations(path) == conversations(5)
    assert path.read_text() == "".join(lines)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"conversations.jsonl, line 1, holds no conversation"):
        read_conversations(path)


@pytest.mark.parametrize("spans", [(), ((3, 3),), ((2, 1),), ((0, 11),), ((0, 4), (2, 6))])
def test_spans_that_are_none_are_refused(spans):
    with pytest.raises(ValueError, match="spans="):
        Conversation(kind="corpus", tokens=tuple(range(10)), spans=spans)


def test_packed_rows_have_every_token_its_end_and_its_place():
    some = conversations(40)
    rows, places = pack(some, 64)
    flat_tokens = np.concatenate([one.tokens for one in some])
    flat_ends = np.concatenate([one.ends() for one in some])
    lengths = [len(one.tokens) for one in some]
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)  # of its conversation, for every place
    live = np.asarray(rows.segments) > 0
    assert sorted(places[live].tolist()) == list(range(len(flat_tokens)))
    np.testing.assert_array_equal(np.asarray(rows.tokens)[live], flat_tokens[places[live]])
    for row, at in zip(*np.nonzero(live), strict=True):
        place, end = places[row, at], rows.ends[row, at]
        assert (end == 0) == (flat_ends[place] == 0)
        if end:  # ends count within the row, spans within the conversation
            assert end - at == flat_ends[place] - (place - begins[place])
    cut, cut_places = pack(some, 16)
    live = np.asarray(cut.segments) > 0
    assert live.sum() == sum(min(length, 16) for length in lengths) and np.max(cut.ends) == 16
    np.testing.assert_array_equal(np.asarray(cut.tokens)[live], flat_tokens[cut_places[live]])


def test_asks_are_greedy_for_questions_and_corpus_and_the_same_for_a_seed(data: Path):
    file, prompts = read_token_file(data / TOKEN_FILE), read_prompts(data / PROMPT_FILE)
    small, large = (Amounts(questions=n, answers=n, samples=2 * n, documents=n) for n in (2, 4))
    wanted = asks(prompts, file, small, 0)
    assert wanted == asks(prompts, file, small, 0)
    assert [ask.kind for ask in wanted].count("greedy") == 4
    assert len({ask.seed for ask in wanted if ask.kind == "sampled"}) > 1
    held_out = {prompt.ids for prompt in prompts if prompt.question.split == "held_out_phrasing"}
    assert not held_out & {ask.prompt for ask in asks(prompts, file, large, 0)}
    few, many = ({ask.prompt for ask in asks(prompts, file, a, 0) if ask.kind == "greedy"} for a in (small, large))
    assert few < many
    whole, cut = (list(corpus_conversations(file, 13, 0, max_tokens=tokens)) for tokens in (400, 70))
    assert len(whole) == 13 and any(len(one.spans) == 2 for one in whole)
    assert cut and all(one.tokens in {other.tokens[:70] for other in whole} for one in cut)


def test_amounts_and_prompts_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="samples=-1 must not be negative"):
        Amounts(samples=-1)
    with pytest.raises(ValueError, match="a prompt of 0 tokens cannot be asked"):
        Ask(prompt=())


def test_states_lie_in_the_order_of_tokens_and_grow(model: k3jax.Model, tmp_path: Path):
    draft, some = draft_config(model, layers=1), conversations(30)
    extend_states(tmp_path, some[:11], model, draft, 64)
    with pytest.raises(ValueError, match="lacks 19 conversations"):
        open_states(tmp_path, some, draft)
    with (tmp_path / "states.bin").open("ab") as file:
        file.write(b"left over")
    extend_states(tmp_path, some, model, draft, 64)
    flat = open_states(tmp_path, some, draft)
    rows, places = pack(some, 64)
    found = states_of_rows(flat, places, draft)(np.arange(len(places)))
    alone = teacher_states(model.params, model.config, draft, jnp.asarray(rows.tokens), jnp.asarray(rows.segments))
    live = np.asarray(rows.segments) > 0
    for name in ("taps", "hidden"):
        one, other = (np.asarray(getattr(states, name), np.float32)[live] for states in (found, alone))
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)  # stored in bf16
    with pytest.raises(ValueError, match="states of other conversations or taps"):
        open_states(tmp_path, some[1:], draft)


def test_a_summary_counts_tokens_and_steps():
    line = summary("some", [np.ones((8, 3)), np.zeros((4, 3))])
    assert line.startswith("some ") and " 2.00 tokens a step (12 tokens)" in line  # 8 in 2 steps, 4 in 4


# --- the command -----------------------------------------------------------------------------------------------------
def test_help_lists_the_steps(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(step in out for step in STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_every_step_has_help_and_defaults(step: str, capsys: pytest.CaptureFixture[str]):
    assert isinstance(parser().parse_args([step]), argparse.Namespace)
    with pytest.raises(SystemExit):
        main([step, "--help"])
    assert "--work" in capsys.readouterr().out


@pytest.mark.parametrize("fails", [None, "train"])
def test_without_arguments_all_steps_run_in_turn_until_one_fails(monkeypatch: pytest.MonkeyPatch, fails: str | None):
    ran: list[str] = []

    def run(args: argparse.Namespace) -> int:
        ran.append(args.step)
        return 2 if args.step == fails else 0

    monkeypatch.setattr(make_demo_draft, "_run", run)
    monkeypatch.setattr(make_demo_draft.make_demo_model, "main", lambda argv: ran.append(argv[0]) or 0)
    assert main([]) == (0 if fails is None else 2)
    steps = [step for step in ran if step in STEPS]
    assert steps == (["collect", "train", "export", "eval"] if fails is None else ["collect", "train"])
    assert [step for step in ran if step not in STEPS] in ([], ["corpus", "pack"])  # where there is none


def test_steps_without_what_comes_before_end_in_one_line(
    model_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shared = ["--model", str(model_folder), "--work", str(tmp_path)]
    other = tmp_path / "other"
    shutil.copytree(data, other)
    (other / "tokenizer/tiktoken.model").write_text("YQ== 0\n")
    for arguments, message in (
        (["collect", "--data", str(tmp_path / "none")], "Run `make_demo_model.py corpus`, then `pack`"),
        (["collect", "--data", str(other)], "is another vocabulary than"),
        (["train"], "has no conversations. Run `make_demo_draft.py collect` first"),
        (["export"], "has no draft. Run `make_demo_draft.py train` first"),
        (["eval", "--draft", str(tmp_path / "none")], "none"),
    ):
        assert main([*arguments, *shared]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_all_steps_on_a_tiny_model(
    model_folder: Path, model: k3jax.Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shared = ["--model", str(model_folder), "--data", str(data), "--work", str(tmp_path)]
    amounts = ["--questions", "3", "--answers", "2", "--samples", "2", "--documents", "6", "--rows", "3"]
    assert main(["collect", *amounts, *shared]) == 0
    collected = read_conversations(tmp_path / CONVERSATION_FILE)
    greedy = [one for one in collected if one.kind == "greedy"]
    assert len(greedy) == 5
    for one in greedy[:2]:
        room = min(192, ROW_TOKENS - len(one.prompt))
        assert one.tokens[len(one.prompt) :] == model.generate(one.prompt, room).token_ids
    before = (tmp_path / CONVERSATION_FILE).read_bytes(), (tmp_path / RECORD_FILE).read_bytes()
    assert main(["collect", *amounts, *shared]) == 0
    assert before == ((tmp_path / CONVERSATION_FILE).read_bytes(), (tmp_path / RECORD_FILE).read_bytes())

    train = ["train", "--steps", "20", "--layers", "1", "--batch-rows", "2", "--anchors", "16", *shared]
    assert main(train) == 0
    lines = [json.loads(line) for line in (tmp_path / "trained/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["run"]["conversations"] == {"corpus": 6, "greedy": 5, "sampled": 2} and lines[-1]["step"] == 20
    draft = tmp_path / "draft"
    assert main(["export", "--draft", str(draft), *shared]) == 0
    assert {path.name for path in draft.iterdir()} == {"config.json", "model.safetensors", "metrics.jsonl", "LICENSES"}
    capsys.readouterr()
    questions = ["--questions", str(data / "questions.jsonl"), "--rows", "4"]
    assert main(["eval", "--draft", str(draft), *questions, *shared]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line[:38].strip() for line in table] == [
        f"{name}, temperature {temperature}"
        for name in ("training questions", "held-out phrasings")
        for temperature in (0, 1)
    ]
    assert all(1.0 <= float(line[38:].split()[0]) <= 8.0 for line in table)


# --- what travels with the demo model --------------------------------------------------------------------------------
def test_the_demo_draft_fits_the_demo_model_and_has_finite_weights():
    folder = open_draft(DEMO_DRAFT, K3Config.from_file(ROOT / "demo"))
    config = folder.config
    assert (config.attention, config.stream, config.block_size, config.causal) == ("gqa", "attn_res", 7, False)
    assert config.has_confidence and config.confidence_reads_markov and config.markov_rank >= 1
    assert 2 <= config.num_hidden_layers <= 4
    params = load_draft(folder, jnp.float32)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(params))
    assert sum(path.stat().st_size for path in DEMO_DRAFT.iterdir()) <= 8_000_000
