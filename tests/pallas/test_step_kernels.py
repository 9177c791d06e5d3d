"""Dispatch: which kernels a step takes and why, and that a whole step with them lowers for CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import kda_lowering
import pytest
from hopper_step import CONFIG, DRAFT, HOPPER
from jaxlib.mlir import ir

from k3jax import moe, params, programs
from k3jax.cache import CacheShape
from k3jax.draft_params import abstract_draft
from k3jax.draft_state import Drafting
from k3jax.pallas import dispatch, expert_load, kda_decode
from k3jax.sharding.mesh import make_mesh, parallel_of
from tests.k3jax.golden_data import mini_config


@pytest.fixture
def nothing_held_back(monkeypatch):
    monkeypatch.setattr(dispatch, "HELD_BACK", {})


def backends(choices) -> dict[str, str]:
    return {choice.op: choice.backend for choice in choices if choice.op in dispatch.KERNELS}


@pytest.mark.usefixtures("nothing_held_back")
@pytest.mark.parametrize("kernels", ["auto", "pallas"])
def test_kernels_run_wherever_they_can_and_say_so(kernels):
    ops, choices = dispatch.choose(HOPPER, kernels)
    assert backends(choices) == dict.fromkeys(dispatch.KERNELS, "pallas")
    assert {op: getattr(ops, op) for op in dispatch.KERNELS} == dispatch.KERNELS


@pytest.mark.parametrize("kernels", ["auto", "pallas"])
def test_what_is_held_back_does_not_run_and_says_why(kernels, monkeypatch):
    monkeypatch.setitem(dispatch.HELD_BACK, "kda_decode", "held back: for this test")
    ops, choices = dispatch.choose(HOPPER, kernels)
    (choice,) = (choice for choice in choices if choice.op == "kda_decode")
    assert (choice.backend, choice.reason) == ("xla", "held back: for this test")
    assert ops.kda_decode is not dispatch.KERNELS["kda_decode"]


@pytest.mark.usefixtures("nothing_held_back")
@pytest.mark.parametrize(
    ("changes", "refused", "reason"),
    [
        ({"drafts": None}, {"kda_verify", "kda_commit", "mla_verify", "draft_attend"}, "nothing is drafted"),
        ({"config": dataclasses.replace(CONFIG, gate_lower_bound=-4.0)}, {"kda_prefill"}, "lower bound is -4.0"),
        ({"rollback": "snapshot"}, {"kda_verify", "kda_commit"}, "snapshots"),
        ({"drafts": 16}, {"kda_verify", "kda_commit", "mla_verify"}, "17 tokens"),
        (
            {"config": dataclasses.replace(CONFIG, kv_lora_rank=192)},
            {"mla_decode", "mla_verify"},
            "192 latent channels",
        ),
        ({"expert_width": 64}, {"routed_experts", "finish_rows"}, "64, is no multiple"),
        ({"config": dataclasses.replace(CONFIG, num_experts=96)}, {"route"}, "96 experts"),
        ({"has_mxfp4_experts": False}, {"routed_experts", "finish_rows"}, "not in MXFP4"),
        ({"num_ranks": 8}, {"keep_threshold", "logprobs", "draft_attend"}, "8 ranks"),
        ({"draft": None}, {"draft_attend"}, "nothing is known"),
    ],
)
def test_an_op_without_a_kernel_runs_its_reference_and_says_why(changes, refused, reason):
    situation = dataclasses.replace(HOPPER, **changes)
    ops, choices = dispatch.choose(situation, "pallas")
    assert {op for op in dispatch.KERNELS if getattr(ops, op) is not dispatch.KERNELS[op]} == refused
    assert {choice.op for choice in choices if choice.backend == "pallas"} == dispatch.KERNELS.keys() - refused
    assert all(reason in choice.reason for choice in choices if choice.op in refused)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "need a GPU"),
        ({"compute_capability": 8.0}, "8.0"),
        ({"dtype": jnp.dtype(jnp.float32)}, "float32"),
        ({"config": mini_config(), "draft": None}, "heads are 16 wide"),
    ],
)
def test_asking_for_kernels_where_none_can_run_is_refused_with_the_reason(changes, reason):
    situation = dataclasses.replace(HOPPER, **changes)
    with pytest.raises(ValueError, match=reason):
        dispatch.choose(situation, "pallas")


def test_no_kernel_runs_where_xla_was_asked_for():
    ops, choices = dispatch.choose(HOPPER, "xla")
    assert set(backends(choices).values()) == {"xla"}
    assert all(choice.reason for choice in choices)
    assert ops.kda_verify is dispatch.Ops().kda_verify


def test_where_no_kernel_could_run_the_reason_is_that_and_no_advice_to_ask_for_it():
    _, choices = dispatch.choose(dataclasses.replace(HOPPER, platform="cpu"))
    assert all("need a GPU" in choice.reason for choice in choices if choice.op in dispatch.KERNELS)


def test_summing_apart_from_the_norm_can_be_asked_for():
    ops, choices = dispatch.choose(dataclasses.replace(HOPPER, moe_finalize="separate"), "pallas")
    assert ops.finish_rows is moe.finish_rows_apart and dispatch.wants_repacked_experts(ops)
    (choice,) = (choice for choice in choices if choice.op == "finish_rows")
    assert choice.backend == "xla" and "asked for" in choice.reason


def test_kernels_that_multiply_as_hopper_does_stay_away_from_blackwell():
    _, choices = dispatch.choose(dataclasses.replace(HOPPER, compute_capability=10.3), "pallas")
    (choice,) = (choice for choice in choices if choice.op == "mla_decode")
    assert choice.backend == "xla" and "wgmma" in choice.reason


@pytest.mark.parametrize("op", dispatch.BLACKWELL_KERNELS)
def test_kernels_with_a_form_for_blackwells_tensor_cores_take_it_there_and_only_there(op):
    for capability, kernels in ((9.0, dispatch.KERNELS), (10.3, dispatch.BLACKWELL_KERNELS)):
        ops, choices = dispatch.choose(dataclasses.replace(HOPPER, compute_capability=capability), "pallas")
        assert getattr(ops, op) is kernels[op]
        assert [choice.backend for choice in choices if choice.op == op] == ["pallas"]
    ops, _ = dispatch.choose(dataclasses.replace(HOPPER, compute_capability=12.0), "pallas")
    assert getattr(ops, op) is getattr(dispatch.Ops(), op)


def operands_used_twice(lowered: jax.stages.Lowered) -> list[str]:
    """Types of what a kernel writes in place although something else reads it too, so that XLA would copy it."""
    found = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if "output_operand_aliases" in operation.attributes:
            aliases = str(operation.attributes["output_operand_aliases"])
            operands = [operation.operands[int(i)] for i in re.findall(r"operand_index = (\d+)", aliases)]
            found.extend(str(operand.type) for operand in operands if len(list(operand.uses)) > 1)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def test_an_operand_that_is_written_in_place_and_read_later_is_found():
    run = functools.partial(kda_decode.kda_decode_pallas, config=kda_lowering.CONFIG)
    pools = kda_lowering.STATES, kda_lowering.TAILS
    lanes = kda_lowering.i32(2), kda_lowering.i32(4), kda_lowering.token(4), kda_lowering.PARAMS

    def lowered(step):
        return jax.jit(step, donate_argnums=(4, 5)).trace(*lanes, *pools).lower(lowering_platforms=("cuda",))

    assert operands_used_twice(lowered(run)) == []
    twice = operands_used_twice(lowered(lambda *operands: (run(*operands), run(*operands))))
    assert len(twice) == 4 and {operand.rsplit("x", 1)[1] for operand in twice} == {"f32>", "bf16>"}


@pytest.mark.usefixtures("nothing_held_back")
@pytest.mark.parametrize("drafts", [0, 4])
def test_a_whole_step_with_kernels_lowers_for_cuda(drafts):
    situation = dataclasses.replace(HOPPER, drafts=drafts or None)
    ops, _ = dispatch.choose(situation, "pallas")
    mesh = make_mesh()
    program = programs.StepProgram(
        config=CONFIG,
        cache_shape=CacheShape(num_rows=4, num_pages=9, num_slots=9, pages_per_row=4),
        tree=expert_load.repacked_tree(params.abstract(CONFIG)) | ({"draft": abstract_draft(DRAFT)} if drafts else {}),
        dtype=jnp.dtype(jnp.bfloat16),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        drafting=Drafting(config=DRAFT, tokens=drafts) if drafts else None,
    )
    for prefill_tokens in (0, 64):
        shape = program.shape_of(rows=4, prefill_tokens=prefill_tokens)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.operands(shape))
        lowered = program.function(shape).trace(*arguments).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        # Decode or verify, and convolution and prefill of the chunks; the commit of all layers.
        in_mixers = len(CONFIG.kda_layers) * (3 if prefill_tokens else 1) + (1 if drafts else 0)
        in_mixers += 2 * len(CONFIG.mla_layers)  # splits of the context, and bringing them together
        between = 2 * CONFIG.num_hidden_layers - 1  # in front of every feed-forward, and of every mixer but the first
        in_router = 2 * CONFIG.num_moe_layers
        in_experts = 4 * CONFIG.num_moe_layers  # rows placed, two products, the sum
        around = 1 + 2  # slot copies; thresholds and best tokens
        around += DRAFT.num_hidden_layers if drafts else 0
        assert text.count("custom_call @mosaic_gpu") == around + in_mixers + between + in_router + in_experts
        assert operands_used_twice(lowered) == []
        given = arguments[1]  # the pools
        assert text.count("tf.aliasing_output") >= len(jax.tree.leaves(given))
