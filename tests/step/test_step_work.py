"""Padding costs no work: loops stop at the last live tile, whatever the bucket (D65)."""

import collections
import functools
from unittest import mock

import jax
import pytest

from k3jax import kda, mla, moe
from k3jax.step_inputs import StepShape
from serving import executor_plan
from tests.k3jax.golden_data import mini_config, random_params
from tests.step.driver import CACHE, Chunk, Machine, Request, Session
from tests.step.models import prompt

BUCKET = StepShape(rows=8, prefill_tokens=512)
CONTEXT_BLOCK = 256
MAX_BATCH, MAX_TOKENS = 256, 49_152
visits: collections.Counter[str] = collections.Counter()


def counted(name: str, function):
    """The function, which also counts how often the running program reaches it."""

    @functools.wraps(function)
    def wrapper(*arguments, **keywords):
        jax.debug.callback(lambda: visits.update([name]))
        return function(*arguments, **keywords)

    return wrapper


@pytest.fixture(scope="module")
def machine():
    """Two layers, KDA dense and MLA MoE, whose inner functions count their visits."""
    config = mini_config(num_hidden_layers=2, kda_layers=(0,), mla_layers=(1,))
    machine = Machine(config, random_params(config), "float32", optimise=False)
    with (
        mock.patch.object(kda, "chunk", counted("KDA chunk", kda.chunk)),
        mock.patch.object(mla, "expand", counted("context block", mla.expand)),
        mock.patch.object(moe, "route", counted("token tile", moe.route)),
        mock.patch.object(moe, "_expert_mlp", counted("expert tile", moe._expert_mlp)),
    ):
        machine.compiled(BUCKET)
    return machine


def visits_of(machine: Machine, lengths: list[int], cached: int = 0) -> dict[str, int]:
    """Visits of one step that prefills prompts of these lengths, the first after `cached` tokens."""
    session = Session(machine, BUCKET)
    requests = [Request(row=i, slot=i + 1, pages=range(8 * i + 1, 8 * i + 9)) for i in range(len(lengths))]
    vocabulary = machine.program.config.vocab_size

    def tokens(length: int) -> list[int]:
        return [token % vocabulary for token in prompt(seed=length, length=length)]

    if cached:
        session.prefill(requests[0], tokens(cached))
    jax.effects_barrier()
    visits.clear()
    session.step(chunks=[Chunk(request=r, tokens=tokens(n)) for r, n in zip(requests, lengths, strict=True)])
    jax.effects_barrier()
    return dict(visits)


def tiles(tokens: int, size: int) -> int:
    return -(-tokens // size)


@pytest.mark.parametrize("lengths", [[1], [64], [65, 10], [100, 1, 200], [512]])
def test_loops_end_at_the_last_live_tile(machine, lengths):
    """D65. One KDA chunk and one query tile per 64 tokens of a prompt, one token tile per quarter of the bucket."""
    got = visits_of(machine, lengths)
    assert got["KDA chunk"] == sum(tiles(n, 64) for n in lengths)
    assert got["token tile"] == tiles(BUCKET.rows + sum(lengths), BUCKET.token_tile)
    ends = [end for n in lengths for end in (*range(64, n, 64), n)]
    assert got["context block"] == sum(tiles(end, CONTEXT_BLOCK) for end in ends)


def test_one_token_visits_only_its_own_experts(machine):
    """D65."""
    assert visits_of(machine, [1])["expert tile"] == machine.program.config.num_experts_per_token


def test_experts_are_visited_for_live_rows_only(machine):
    """D65. At most one short tile per expert and token tile beyond the full ones."""
    config = machine.program.config
    for lengths in ([64], [65, 10], [512]):
        got = visits_of(machine, lengths)
        rows = sum(lengths) * config.num_experts_per_token
        tile = moe.tile_size(BUCKET.token_tile * config.num_experts_per_token, config.num_experts)
        assert got["expert tile"] <= rows // tile + config.num_experts * got["token tile"]


def test_attention_reads_the_context_and_no_more(machine):
    """Ten tokens after 300 in the cache: one query tile over two blocks of 256, not the row's whole table."""
    assert CACHE.pages_per_row * 64 > 2 * CONTEXT_BLOCK - 1
    assert visits_of(machine, [10], cached=300)["context block"] == 2


@pytest.mark.parametrize("max_rows", range(1, MAX_BATCH + 1))
def test_the_largest_bucket_is_the_budget(max_rows):
    """D65."""
    shapes = executor_plan.buckets(max_rows, MAX_TOKENS)
    assert (max(s.rows for s in shapes), max(s.prefill_tokens for s in shapes)) == (max_rows, MAX_TOKENS)
    assert StepShape(rows=max_rows, prefill_tokens=MAX_TOKENS) in shapes and len(shapes) <= 16


def tokens_worked(shape: StepShape, live: int) -> int:
    """Tokens that the per-token blocks compute when the last live one is number `live`."""
    return tiles(live, shape.token_tile) * shape.token_tile


@pytest.mark.parametrize("max_tokens", [513, 8192, MAX_TOKENS])
def test_the_smallest_filling_of_a_bucket_costs_at_most_twice_the_exact_size(max_tokens):
    """D65. Below the first bucket, where a step costs what reading the weights costs, a quarter of that bucket."""
    for max_rows in (1, 8, 9, 32, 100, 128, 200, MAX_BATCH):
        shapes = executor_plan.buckets(max_rows, max_tokens)
        for shape in shapes:
            smaller = [s.prefill_tokens for s in shapes if s.prefill_tokens < shape.prefill_tokens]
            live = shape.rows + max(smaller, default=0) + 1
            if shape.prefill_tokens > 512:
                assert tokens_worked(shape, live) <= 2 * live, shape
            elif shape.prefill_tokens:
                assert tokens_worked(shape, live) <= live + 128 + 8, shape


def test_the_smallest_number_of_rows_of_a_bucket_costs_at_most_twice_the_exact_number():
    """D65."""
    for max_rows in range(9, MAX_BATCH + 1):
        sizes = sorted({s.rows for s in executor_plan.buckets(max_rows, 512)})
        for smaller, size in zip(sizes[:-1], sizes[1:], strict=True):
            shape = StepShape(rows=size, prefill_tokens=0)
            assert tokens_worked(shape, smaller + 1) <= 2 * (smaller + 1), shape
