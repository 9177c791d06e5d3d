"""What a GPU's decode step does without: loops and conditions."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from hopper_step import CONFIG, DRAFT, HOPPER

from k3jax import params, programs
from k3jax.cache import CacheShape
from k3jax.draft_params import abstract_draft
from k3jax.draft_state import Drafting
from k3jax.pallas import dispatch, expert_load
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.step_inputs import StepShape

DRAFTS = 3
CACHE = CacheShape(num_rows=4, num_pages=9, num_slots=9, pages_per_row=4)


def program(*, has_drafts: bool, kernels: dispatch.Kernels = "auto") -> programs.StepProgram:
    situation = dataclasses.replace(HOPPER, drafts=DRAFTS if has_drafts else None, draft=DRAFT if has_drafts else None)
    ops, _ = dispatch.choose(situation, kernels)
    if kernels == "xla":
        ops = dispatch.Ops()
    tree = params.abstract(CONFIG)
    if dispatch.wants_repacked_experts(ops):
        tree = expert_load.repacked_tree(tree)
    mesh = make_mesh()
    return programs.StepProgram(
        config=CONFIG,
        cache_shape=CACHE,
        tree=tree | ({"draft": abstract_draft(DRAFT)} if has_drafts else {}),
        dtype=jnp.dtype(jnp.bfloat16),
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        drafting=Drafting(config=DRAFT, tokens=DRAFTS) if has_drafts else None,
    )


def branches_of(step: programs.StepProgram, shape: StepShape) -> int:
    """Loops and conditions of the step as it is lowered for CUDA."""
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), step.operands(shape))
    lowered = step.function(shape).trace(*arguments).lower(lowering_platforms=("cuda",))
    return len(re.findall(r"\bstablehlo\.(?:while|case|if)\b", lowered.as_text()))


@pytest.mark.parametrize(
    ("has_drafts", "drafts"),
    [
        pytest.param(False, 0, id="without a draft model"),
        pytest.param(True, 0, id="with one at rest"),
        pytest.param(True, DRAFTS, id="with drafts"),
    ],
)
def test_a_decode_step_has_no_loop_and_no_condition(has_drafts, drafts):
    step = program(has_drafts=has_drafts)
    shape = StepShape(rows=4, prefill_tokens=0, drafts=drafts, min_tile=128)
    assert branches_of(step, shape) == 0


def test_by_xla_alone_it_has_many():
    """So that what is counted above is what is meant."""
    step = program(has_drafts=True, kernels="xla")
    assert branches_of(step, StepShape(rows=4, prefill_tokens=0, drafts=DRAFTS, min_tile=128)) > 10
