"""The step divided over 2, 4 and 8 devices equals one device, and runs the collectives it is meant to."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import params, program_text, programs
from k3jax.sharding.mesh import make_mesh, parallel_of
from tests.step.driver import CACHE, Chunk, Request, Session, assert_close
from tests.step.models import DECODE, SMALL, hybrid4, mesh, prompt

ATOL = 1e-9
# Every degree, latents replicated and sharded, experts sliced and whole; the other combinations run with -m slow.
CASES = [(2, False, False), (4, False, True), (8, True, False)]
OTHER_CASES = [
    (tp, latents, whole)
    for tp in (2, 4, 8)
    for latents in (False, True)
    for whole in (False, True)
    if (tp, latents, whole) not in CASES
]
ALL_CASES = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)]


def serve(tp: int, shard_latents: bool, whole_experts: bool):
    """Prompts of a greedy and two sampling rows, then mixed steps: lanes by step, and the states of all rows."""
    session = Session(mesh(tp, shard_latents, whole_experts), SMALL)
    greedy = Request(row=2, slot=5, pages=(3, 4))
    warm = Request(row=0, slot=1, pages=(7,), temperature=0.8, seed=11)
    late = Request(row=6, slot=9, pages=(1,), temperature=1.5, seed=12)
    lanes = [
        session.step(
            chunks=[
                Chunk(request=greedy, tokens=prompt(seed=60, length=41)),
                Chunk(request=warm, tokens=prompt(seed=61, length=23)),
            ]
        ),
        session.step([warm], [Chunk(request=greedy, tokens=prompt(seed=62, length=30))]),
        session.step([greedy, warm], [Chunk(request=late, tokens=prompt(seed=63, length=17))]),
    ]
    lanes += [session.step([late, greedy, warm]) for _ in range(4)]
    return lanes, [session.state(request) for request in (greedy, warm, late)]


@functools.cache
def one_device():
    return serve(1, False, False)


@pytest.mark.parametrize(("tp", "shard_latents", "whole_experts"), ALL_CASES)
def test_a_divided_step_equals_one_device(tp, shard_latents, whole_experts):
    """Tokens, greedy and sampled, are the same; distributions and states agree."""
    lanes, states = serve(tp, shard_latents, whole_experts)
    expected_lanes, expected_states = one_device()
    for step, expected in zip(lanes, expected_lanes, strict=True):
        assert {row: lane.token for row, lane in step.items()} == {row: lane.token for row, lane in expected.items()}
        for row, lane in step.items():
            np.testing.assert_allclose(lane.logprobs, expected[row].logprobs, rtol=0, atol=ATOL)
    for state, expected in zip(states, expected_states, strict=True):
        assert_close(state, expected, ATOL)


def test_sampled_rows_do_not_just_take_the_best_token():
    lanes, _ = one_device()
    sampled = [lane for step in lanes for row, lane in step.items() if row in (0, 6)]
    assert any(lane.token != int(np.argmax(lane.logprobs)) for lane in sampled)


@functools.cache
def decode_collectives(shard_latents: bool) -> list[str]:
    """Name stacks of the collectives in the compiled decode program at tp 2; only LLVM's part is skimped."""
    devices = make_mesh(2)
    program = programs.StepProgram(
        config=hybrid4(),
        cache_shape=CACHE,
        tree=params.abstract(hybrid4()),
        dtype=jnp.dtype(jnp.float32),
        mesh=devices,
        parallel=parallel_of(devices, shard_latents=shard_latents),
        unstacked=True,
    )
    compiled = program.function(DECODE).lower(*program.operands(DECODE)).compile({"xla_backend_optimization_level": 0})
    return [i.scope for i in program_text.collectives(program_text.parse(compiled.as_text()))]


@pytest.mark.parametrize(("shard_latents", "per_moe_layer"), [(False, 2), (True, 4)])
def test_a_decode_step_runs_so_many_collectives_per_layer(shard_latents, per_moe_layer):
    """One after the mixer; then one for both partial sums of the MoE, or three. A dense layer has one of each kind."""
    scopes = decode_collectives(shard_latents)
    for layer in range(hybrid4().num_hidden_layers):
        count = sum(bool(re.search(rf"/layer{layer}/", scope)) for scope in scopes)
        assert count == (2 if hybrid4().ffn(layer) == "dense" else per_moe_layer), layer


def test_outside_the_layers_only_embedding_and_sampling_communicate():
    outside = [scope for scope in decode_collectives(False) if not re.search(r"/layer\d+/", scope)]
    assert sum("/embed" in scope for scope in outside) == 1
    assert all("/embed" in scope or "/sample" in scope for scope in outside)
