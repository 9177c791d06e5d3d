"""What a step does not do as it is lowered for CUDA: expand the experts densely, wait for the host."""

import dataclasses
import math
import re

import hopper_step
import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from k3jax import moe, params, programs
from k3jax.cache import CacheShape
from k3jax.pallas import dispatch, expert_load
from k3jax.sharding.mesh import make_mesh, parallel_of

ROWS, PREFILL = 4, 512
CONFIG = dataclasses.replace(hopper_step.CONFIG, num_hidden_layers=2, kda_layers=(0,), mla_layers=(1,))
HOPPER = dataclasses.replace(hopper_step.HOPPER, config=CONFIG, drafts=None, draft=None)
CACHE = CacheShape(num_rows=ROWS, num_pages=9, num_slots=9, pages_per_row=8)
LATENT, INNER = CONFIG.routed_expert_hidden_size, CONFIG.moe_intermediate_size
# Elements of all experts' weights of one projection, or, if fewer, of a tile of tokens through every expert.
DENSE = CONFIG.num_experts * min(PREFILL // 4 * min(LATENT, INNER), LATENT * INNER)
VIEWS = {"stablehlo.reshape", "stablehlo.while", "func.call", "sdy.manual_computation"}  # weights and pools handed on


def lowered(ops: dispatch.Ops) -> jax.stages.Lowered:
    """The mixed step of a GPU."""
    tree, mesh = params.abstract(CONFIG), make_mesh()
    step = programs.StepProgram(
        config=CONFIG,
        cache_shape=CACHE,
        tree=expert_load.repacked_tree(tree) if dispatch.wants_repacked_experts(ops) else tree,
        dtype=jnp.dtype(jnp.bfloat16),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
    )
    shape = step.shape_of(rows=ROWS, prefill_tokens=PREFILL)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), step.operands(shape))
    return step.function(shape).trace(*arguments).lower(lowering_platforms=("cuda",))


def large_results(program: jax.stages.Lowered) -> set[str]:
    """Operations that make a tensor as large as a dense expansion, with its type."""
    found = set()

    def visit(operation: ir.Operation) -> ir.WalkResult:
        for result in () if operation.name in VIEWS else operation.results:
            if isinstance(result.type, ir.RankedTensorType) and math.prod(result.type.shape) >= DENSE:
                found.add(f"{operation.name} {result.type}")
        return ir.WalkResult.ADVANCE

    program.compiler_ir("stablehlo").operation.walk(visit)
    return found


def host_calls(program: jax.stages.Lowered) -> list[str]:
    """Transfers to and from the host, and calls of its functions, which JAX refuses to lower for a device not here."""
    text = program.as_text()
    transfers = re.findall(r"stablehlo\.(?:infeed|outfeed|send|recv)\b", text)
    return [*transfers, *re.findall(r"custom_call @(\w*callback\w*)", text)]


@pytest.mark.parametrize("finalize", ["deferred", pytest.param("separate", marks=pytest.mark.slow)])
def test_on_kernels_nothing_has_the_size_of_a_dense_expansion_nor_asks_the_host(finalize):
    situation = dataclasses.replace(HOPPER, moe_finalize=finalize)
    program = lowered(dispatch.choose(situation, "pallas")[0])
    assert "mosaic_gpu" in program.as_text()
    assert large_results(program) == set()
    assert host_calls(program) == []


def test_on_references_only_packed_bytes_of_a_layer_are_so_large():
    """The slice of a layer out of a stack, of which XLA reads what the loop over tiles asks for."""
    program = lowered(dispatch.Ops())
    assert all(found.startswith("stablehlo.slice ") and found.endswith("xui8>") for found in large_results(program))
    assert host_calls(program) == []


# --- a step that does it --------------------------------------------------------------------------------------------
def dense_experts(z, routing, experts, config, first):
    """All experts' weights dequantised, and every token through every expert."""
    w13, w2 = experts.dequantized(jnp.arange(experts.num_local), z.dtype)
    rows = jnp.einsum("tl,efl,elf->etl", z, w13[:, :INNER], w2)
    chosen = jax.nn.one_hot(routing.experts, config.num_experts, dtype=z.dtype).sum(1)
    return jnp.einsum("etl,te->tl", rows, chosen) + moe.routed_experts(z, routing, experts, config, first)


def test_a_dense_expansion_is_found():
    program = lowered(dispatch.Ops(routed_experts=dense_experts))
    found = {text.rsplit("<", 1)[1] for text in large_results(program)}
    assert f"{CONFIG.num_experts}x{LATENT}x{INNER}xbf16>" in found
    assert any(re.fullmatch(rf"(\d+x)?{CONFIG.num_experts}x\d+x{LATENT}xbf16>", text) for text in found), found
