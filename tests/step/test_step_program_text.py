"""What the compiled mixed program does not do: copy pools, move rows inside mixers.

A step with three mistakes in it shows that the checks can fail.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from k3jax import cache, kda_serving, mla_serving, params, program_text, programs
from k3jax.pallas.dispatch import Ops
from k3jax.program_text import ArrayType
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.step import MixedBatch
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import mini_config

# Sizes that no width of the model shares, and pools of which one layer is larger than everything else together.
SHAPE = StepShape(rows=27, prefill_tokens=320)
TOKEN_SIZES = (SHAPE.rows, SHAPE.prefill_tokens, SHAPE.num_tokens, SHAPE.rows + SHAPE.prefill_tokens)
CACHE = cache.CacheShape(num_rows=27, num_pages=4099, num_slots=4099, pages_per_row=8)
MIXERS = r"/layer\d+/mixer(/|$)"
CORRECT = Ops()
NAMES = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}


def build(ops: Ops, num_layers: int, mixed_batch: MixedBatch) -> programs.StepProgram:
    """KDA and MLA in turn, so that pools are handed from layer to layer."""
    layers = range(num_layers)
    config = mini_config(num_hidden_layers=num_layers, kda_layers=tuple(layers[::2]), mla_layers=tuple(layers[1::2]))
    mesh = make_mesh()
    return programs.StepProgram(
        config=config,
        cache_shape=CACHE,
        tree=params.abstract(config),
        dtype=jnp.dtype(jnp.float32),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        mixed_batch=mixed_batch,
        unstacked=True,
    )


def pool_types(program: programs.StepProgram) -> list[ArrayType]:
    pools = cache.pool_shapes(program.config, program.cache_shape, program.dtype)
    return [ArrayType(NAMES[pool.dtype.name], pool.shape) for pool in jax.tree.leaves(pools)]


@functools.cache
def compiled(
    ops: Ops = CORRECT, num_layers: int = 4, mixed_batch: MixedBatch = "zero-copy"
) -> tuple[programs.StepProgram, jax.stages.Compiled, program_text.ProgramText]:
    """Only LLVM's part is skimped: the optimised program is the one that serves."""
    program = build(ops, num_layers, mixed_batch)
    executable = program.lower(SHAPE).compile({"xla_backend_optimization_level": 0})
    return program, executable, program_text.parse(executable.as_text())


def test_no_instruction_of_the_mixed_program_copies_a_pool():
    program, _, text = compiled()
    assert program_text.pool_copies(text, pool_types(program)) == []


def test_pools_are_returned_in_the_buffers_they_came_in():
    program, _, text = compiled()
    assert [text.aliased_types().get(output) for output in range(3)] == pool_types(program)


def test_temporary_memory_is_below_one_layer_of_any_pool():
    program, executable, _ = compiled()
    pools = cache.pool_shapes(program.config, program.cache_shape, program.dtype)
    smallest = min(pool.size * pool.dtype.itemsize // pool.shape[0] for pool in jax.tree.leaves(pools))
    assert executable.memory_analysis().temp_size_in_bytes < smallest


def test_mixers_move_no_rows():
    program, _, text = compiled()
    assert program_text.row_movements(text, MIXERS, TOKEN_SIZES, pool_types(program)) == []


def test_every_mixer_was_looked_at():
    _, _, text = compiled()
    scopes = {i.scope.split("/mixer")[0].rsplit("/", 1)[-1] for _, i in text.instructions() if "/mixer" in i.scope}
    assert scopes == {"layer0", "layer1", "layer2", "layer3"}


# --- the mistakes -----------------------------------------------------------------------------------------------------
def decode_with_gathered_rows(weights, lanes, pools, layer, slots, live, config):
    """Sorts the lanes by slot in front of the mixer, and reads a pool after writing it."""
    order = jnp.argsort(slots)
    lanes = jax.tree.map(lambda x: x[order], lanes)
    out, new = kda_serving.decode(weights, lanes, pools, layer, slots, live, config)
    stale = jnp.sum(pools.conv[layer, slots], axis=(1, 2, 3))
    return out + stale[:, None], new


def prefill_with_joined_rows(weights, projected, pool, layer, page_table, chunks, out, config):
    """Writes its output by putting the decode rows and the prefill rows together."""
    filled = mla_serving.prefill(weights, projected, pool, layer, page_table, chunks, out, config)
    return jnp.concatenate([out[: SHAPE.rows], filled[SHAPE.rows :]])


@pytest.fixture(scope="module")
def mistaken():
    """A program with the mistakes above."""
    return compiled(Ops(kda_decode=decode_with_gathered_rows, mla_prefill=prefill_with_joined_rows), num_layers=2)


def test_a_gather_in_front_of_a_mixer_is_found(mistaken):
    program, _, text = mistaken
    found = program_text.row_movements(text, MIXERS, TOKEN_SIZES, pool_types(program))
    assert any("/layer0/mixer" in i.scope and i.opcode == "gather" for i in found)


def test_a_concatenation_behind_a_mixer_is_found(mistaken):
    program, _, text = mistaken
    found = program_text.row_movements(text, MIXERS, TOKEN_SIZES, pool_types(program))
    assert any("/layer1/mixer" in i.scope and i.primitive == "concatenate" for i in found)


def test_a_pool_that_is_read_after_its_update_shows_as_a_copy(mistaken):
    program, _, text = mistaken
    copied = program_text.pool_copies(text, pool_types(program))
    assert {array for i in copied for array in i.results} == {pool_types(program)[2]}


# --- the reader -------------------------------------------------------------------------------------------------------
PROGRAM = (
    "HloModule jit_f, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }, "
    "entry_computation_layout={(f32[1,4], f32[8,4])->f32[8,4]}"
    """

%body (p.0: f32[8,4], p.1: f32[1,4]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  %p.1 = f32[1,4]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %update = f32[8,4]{1,0} dynamic-update-slice(%p.0, %p.1, %zero, /*index=3*/%zero)
}

%fresh (p.2: f32[1,4]) -> f32[8,4] {
  %p.2 = f32[1,4]{1,0} parameter(0)
  ROOT %wide = f32[8,4]{1,0} broadcast(%p.2), dimensions={0,1}
}

ENTRY %main (a: f32[1,4], b: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[1,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %good = f32[8,4]{1,0} fusion(%b, %a), kind=kLoop, calls=%body, metadata={op_name="jit(f)/x/scatter"}
  %bad = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%fresh
  %sum = (f32[8,4]{1,0}, f32[1,4]{1,0}) all-reduce(%bad, %a), replica_groups={{0,1}}, to_apply=%body
  %kernel = f32[8,4]{1,0} custom-call(%b), custom_call_target="k", output_to_operand_aliasing={{}: (0, {})}
  %blind = f32[8,4]{1,0} custom-call(%b), custom_call_target="k"
  ROOT %out = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%good, %bad)
}
"""
)


def test_updates_and_aliasing_kernels_are_in_place_and_all_else_is_a_copy():
    text = program_text.parse(PROGRAM)
    names = [i.name for i in program_text.pool_copies(text, [ArrayType("f32", (8, 4))])]
    assert names == ["bad", "sum", "blind"]


def test_aliases_scopes_and_collectives_are_read():
    text = program_text.parse(PROGRAM)
    assert text.aliases == {0: 1, 2: 0}
    assert text.aliased_types() == {0: ArrayType("f32", (8, 4)), 2: ArrayType("f32", (1, 4))}
    assert text.computations["main"]["good"].scope == "jit(f)/x/scatter"
    assert text.computations["main"]["good"].primitive == "scatter"
    assert text.computations["body"]["update"].operands == ("p.0", "p.1", "zero", "zero")
    assert [i.name for i in program_text.collectives(text)] == ["sum"]


def test_text_without_a_computation_is_refused():
    with pytest.raises(ValueError, match="as_text"):
        program_text.parse("HloModule nothing\n")
