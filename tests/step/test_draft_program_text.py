"""What the compiled program of a step with drafts does not do: copy pools, move rows inside mixers."""

import functools

import jax
import jax.numpy as jnp
import pytest

from k3jax import cache, params, program_text, programs
from k3jax.draft_params import abstract_draft
from k3jax.draft_state import Drafting
from k3jax.pallas import dispatch
from k3jax.program_text import ArrayType
from k3jax.sharding.mesh import make_mesh, parallel_of
from tests.k3jax.golden_data import mini_config
from tests.step.draft_driver import mini_draft
from tests.step.test_step_program_text import CACHE, MIXERS, NAMES

DRAFTS = 4
LAYERS = 4
TYPES = NAMES | {"int32": "s32", "uint32": "u32"}


@functools.cache
def compiled(rollback) -> tuple[programs.StepProgram, jax.stages.Compiled, program_text.ProgramText]:
    """KDA and MLA in turn. Only LLVM's part is skimped: the optimised program is the one that serves."""
    layers = range(LAYERS)
    config = mini_config(num_hidden_layers=LAYERS, kda_layers=tuple(layers[::2]), mla_layers=tuple(layers[1::2]))
    draft = mini_draft()
    mesh = make_mesh()
    ops = dispatch.with_rollback(dispatch.Ops(), rollback)
    program = programs.StepProgram(
        config=config,
        cache_shape=CACHE,
        tree=params.abstract(config) | {"draft": abstract_draft(draft)},
        dtype=jnp.dtype(jnp.float32),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        drafting=Drafting(config=draft, tokens=DRAFTS, rollback=rollback),
        unstacked=True,
    )
    shape = program.shape_of(rows=27, prefill_tokens=320)
    executable = program.lower(shape).compile({"xla_backend_optimization_level": 0})
    return program, executable, program_text.parse(str(executable.as_text()))


def array_types(tree) -> list[ArrayType]:
    return [ArrayType(TYPES[leaf.dtype.name], leaf.shape) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_no_instruction_of_the_mixed_program_copies_a_pool(rollback):
    program, _, text = compiled(rollback)
    assert program_text.pool_copies(text, array_types(program.pool_shapes())) == []


def test_pools_and_waiting_drafts_are_returned_in_the_buffers_they_came_in():
    program, _, text = compiled("replay")
    expected = array_types((program.pool_shapes(), program.row_shapes()))
    assert [text.aliased_types().get(output) for output in range(len(expected))] == expected


def test_temporary_memory_is_below_one_layer_of_any_pool():
    program, executable, _ = compiled("replay")
    pools = jax.tree.leaves(program.pool_shapes()._replace(records=()))
    smallest = min(pool.size * pool.dtype.itemsize // pool.shape[0] for pool in pools)
    used = executable.memory_analysis()
    assert used is not None and used.temp_size_in_bytes < smallest


def test_mixers_move_no_rows():
    program, _, text = compiled("replay")
    shape = program.shape_of(rows=27, prefill_tokens=320)
    sizes = (shape.lane_tokens, shape.prefill_tokens, shape.num_tokens, shape.lane_tokens + shape.prefill_tokens)
    assert program_text.row_movements(text, MIXERS, sizes, array_types(program.pool_shapes())) == []


def test_every_mixer_was_looked_at():
    _, _, text = compiled("replay")
    scopes = {i.scope.split("/mixer")[0].rsplit("/", 1)[-1] for _, i in text.instructions() if "/mixer" in i.scope}
    assert scopes == {f"layer{layer}" for layer in range(LAYERS)}


def test_drafts_are_few_arrays_beside_the_pools():
    """What speculation adds to a row is independent of the context: records and waiting drafts."""
    program, _, _ = compiled("replay")
    plain = cache.pool_shapes(program.config, program.cache_shape, program.dtype)
    added = jax.tree.leaves(program.pool_shapes().records)
    assert all(array.shape[1] == CACHE.num_rows and array.shape[2] == 1 + DRAFTS for array in added)
    assert sum(a.size * a.dtype.itemsize for a in added) < plain.kda.size * plain.kda.dtype.itemsize / 10
