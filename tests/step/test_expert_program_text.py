"""What the compiled mixed program does not do: expand the experts densely, wait for the host.

The many experts make anything dense larger than all that a step has to compute. Steps that do it show that the checks
can fail.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from k3jax import cache, moe, params, program_text, programs
from k3jax.layers import situ
from k3jax.pallas.dispatch import Ops
from k3jax.program_text import ArrayType
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import mini_config

SHAPE = StepShape(rows=27, prefill_tokens=320)
CACHE = cache.CacheShape(num_rows=27, num_pages=9, num_slots=9, pages_per_row=8)
CONFIG = mini_config(num_experts=160)
LATENT, INNER = CONFIG.routed_expert_hidden_size, CONFIG.moe_intermediate_size
ALL_WEIGHTS = CONFIG.num_experts * LATENT * INNER  # of one projection, in any form
ALL_ROWS = SHAPE.token_tile * CONFIG.num_experts * min(LATENT, INNER)  # every token through every expert
DENSE = min(ALL_WEIGHTS, ALL_ROWS)
REFERENCES = Ops()


@functools.cache
def compiled(ops: Ops = REFERENCES) -> program_text.ProgramText:
    """Only LLVM's part is skimped: the optimised program is the one that serves."""
    mesh = make_mesh()
    program = programs.StepProgram(
        config=CONFIG,
        cache_shape=CACHE,
        tree=params.abstract(CONFIG),
        dtype=jnp.dtype(jnp.float32),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        unstacked=True,
    )
    executable = program.lower(SHAPE).compile({"xla_backend_optimization_level": 0})
    return program_text.parse(executable.as_text())


def dense(text: program_text.ProgramText) -> list[program_text.Instruction]:
    return program_text.large_results(text, DENSE, exempt=())


def test_nothing_in_the_mixed_program_has_the_size_of_a_dense_expansion():
    assert [(i.name, i.results, i.scope) for i in dense(compiled())] == []


def test_the_mixed_program_never_waits_for_the_host():
    assert program_text.host_transfers(compiled()) == []


# --- the mistakes -----------------------------------------------------------------------------------------------------
def ragged_experts(z, routing, experts, config, first):
    """All experts' weights dequantised at once, and XLA's ragged products with them."""
    plan = moe.dispatch(routing.experts - first, experts.num_local, 8)
    w13, w2 = experts.dequantized(jnp.arange(experts.num_local), z.dtype)
    counts = jnp.diff(plan.starts)
    both = jax.lax.ragged_dot(z[plan.order // routing.experts.shape[-1]], w13.swapaxes(1, 2), counts)
    inner = situ(both[:, :INNER], both[:, INNER:], config.situ_beta, config.situ_linear_beta)
    return moe.combine(jax.lax.ragged_dot(inner, w2.swapaxes(1, 2), counts), routing, plan.place, plan.starts[-1])


def experts_by_the_host(z, routing, experts, config, first):
    """Rows counted where the host looks at them."""
    jax.debug.callback(lambda ids: None, routing.experts)
    return moe.routed_experts(z, routing, experts, config, first)


@pytest.fixture(scope="module")
def mistaken():
    return compiled(Ops(routed_experts=lambda *a: ragged_experts(*a) + experts_by_the_host(*a)))


def test_dequantised_weights_of_all_experts_are_found(mistaken):
    found = [array for i in dense(mistaken) for array in i.results]
    assert any(array.dtype == "f32" and array.dims[0] == CONFIG.num_experts for array in found)


def test_every_token_through_every_expert_is_found(mistaken):
    """What the CPU makes of a ragged product."""
    tokens = SHAPE.token_tile * CONFIG.num_experts_per_token
    sizes = {ArrayType("f32", (CONFIG.num_experts, tokens, width)) for width in (LATENT, INNER, 2 * INNER)}
    assert sizes & {array for i in dense(mistaken) for array in i.results}


def test_a_function_of_the_host_is_found(mistaken):
    assert program_text.host_transfers(mistaken) != []


def test_transfers_to_and_from_the_host_are_found():
    text = program_text.parse(
        """HloModule jit_f

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %token = token[] after-all()
  %sent = (f32[4], u32[], token[]) send(%a, %token), channel_id=1, is_host_transfer=true
  %done = token[] send-done(%sent), channel_id=1, is_host_transfer=true
  %read = (f32[4], token[]) infeed(%token)
  %kernel = f32[4]{0} custom-call(%a), custom_call_target="k"
  %asked = f32[4]{0} custom-call(%kernel), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %out = f32[4]{0} add(%asked, %a)
}
"""
    )
    assert [i.name for i in program_text.host_transfers(text)] == ["sent", "done", "read", "asked"]
