"""Whole steps on the KDA prefill kernels, in the Mosaic GPU interpreter, against the same steps on the reference.

Two layers in bfloat16, the first of them KDA with heads as wide as the kernels take: what it leaves is compared, since
behind it the two round differently. Slots and pages of nobody hold NaN.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax.pallas import kda_prefill_op
from k3jax.pallas.dispatch import Ops
from k3jax.step import MixedBatch
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import mini_config, random_params
from tests.step.driver import CACHE, Chunk, Machine, Request, Session

SHAPE = StepShape(rows=4, prefill_tokens=128)
SPARE = 9
LIMIT = 6e-3


@functools.cache
def machine(uses_kernels: bool, mixed_batch: MixedBatch) -> Machine:
    config = mini_config(num_hidden_layers=2, kda_layers=(0,), mla_layers=(1,), kda_num_heads=1, kda_head_dim=128)
    prefill = functools.partial(kda_prefill_op.prefill, interpret=interpreter(detect_races=False))
    ops = Ops(kda_prefill=prefill) if uses_kernels else Ops()
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return Machine(config, random_params(config), bfloat16, ops=ops, mixed_batch=mixed_batch, optimise=False)


def run(uses_kernels: bool, mixed_batch: MixedBatch) -> Session:
    """A prompt; then it decodes beside another one's first piece and a third, short one; then the second's rest."""
    session = Session(machine(uses_kernels, mixed_batch), SHAPE)

    def poison(mla, kda, conv):
        for pool in (mla, kda, conv):
            pool[:, 1:] = np.nan

    session.edit_pools(poison)
    one, two, three = (Request(row=i, slot=i + 1, pages=range(1 + 5 * i, 6 + 5 * i)) for i in range(3))
    tokens = np.random.default_rng(0).integers(1, 90, (3, 120)).tolist()
    session.step(chunks=[Chunk(request=one, tokens=tokens[0][:33])])
    pieces = [Chunk(request=two, tokens=tokens[1][:80], is_last=False, export=(64, SPARE))]
    session.step([one], [*pieces, Chunk(request=three, tokens=tokens[2][:2])], force={0: 5, 2: 6})
    session.step([one, three], [Chunk(request=two, tokens=tokens[1][80:])], force={0: 7, 2: 8})
    return session


def pools_of(session: Session) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(session.pools.kda), np.asarray(session.pools.conv)


@pytest.mark.slow
@pytest.mark.parametrize("mixed_batch", ["zero-copy", "gather"])
def test_mixed_steps_leave_what_they_leave_on_the_reference(mixed_batch):
    """D03, D07, D08 in the step: carried tails and states, dead lanes, an export, slots of nobody."""
    states, tails = pools_of(run(True, mixed_batch))
    expected_states, expected_tails = pools_of(run(False, mixed_batch))
    used = [1, 2, 3, SPARE]
    for slot in used:
        got, wanted = states[0, slot].astype(np.float64), expected_states[0, slot].astype(np.float64)
        assert np.linalg.norm(got - wanted) < LIMIT * np.linalg.norm(wanted), slot
        np.testing.assert_array_equal(tails[0, slot].view(np.uint16), expected_tails[0, slot].view(np.uint16))
    others = [slot for slot in range(1, CACHE.num_slots) if slot not in used]
    assert np.isnan(states[:, others]).all() and np.isnan(tails[:, others].astype(np.float32)).all()
    assert not states[:, 0].any() and not tails[:, 0].any()
