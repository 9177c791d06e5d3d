"""The check of the order of service finds what it is there for."""

import pytest

from serving.core.types import PrefillChunk, RowAdmission, StepPlan
from tests.core.driver import GREEDY, limits, policy, prompt, request
from tests.core.service_order import ServiceOrder

OLD, YOUNG = prompt(60, 1), prompt(60, 2)


def _order():
    order = ServiceOrder(limits(max_step_tokens=16), policy(8, checkpoint="off"))
    order.add(request("old", 60), 0)
    order.add(request("young", 60), 1)
    return order


def _admission(row):
    return RowAdmission(row=row, slot=row + 1, sampling=GREEDY, seed=row)


def _chunk(row, start, length):
    tokens = (OLD, YOUNG)[row][start : start + length]
    return PrefillChunk(row=row, start=start, token_ids=tokens, is_last=start + length == 60)


def test_who_is_admitted_before_an_older_one_is_found():
    plan = StepPlan(step=0, admitted=(_admission(1),), chunks=(_chunk(1, 0, 16),))
    with pytest.raises(AssertionError, match=r"request 1 is admitted before \[0\]"):
        _order().check(plan, lambda seed: 60)


def test_who_is_passed_for_too_long_is_found():
    """Alone it takes 4 steps of 16 tokens; so it may be passed in 4 steps, not in the fifth."""
    order = _order()
    both = (_chunk(0, 0, 8), _chunk(1, 0, 8))
    order.check(StepPlan(step=0, admitted=(_admission(0), _admission(1)), chunks=both), lambda seed: 60)
    for step in (1, 2, 3):
        chunks = (_chunk(0, 8 * step, 8), _chunk(1, 8 * step, 8))
        order.check(StepPlan(step=step, chunks=chunks), lambda seed: 60)
    chunks = (_chunk(0, 32, 8), _chunk(1, 32, 8))
    with pytest.raises(AssertionError, match="of request 0 is passed"):
        order.check(StepPlan(step=4, chunks=chunks), lambda seed: 60)


def test_a_younger_one_may_use_what_the_older_one_cannot():
    order = _order()
    order.check(StepPlan(step=0, admitted=(_admission(0),), chunks=(_chunk(0, 0, 8),)), lambda seed: 60)
    order.check(
        StepPlan(step=1, admitted=(_admission(1),), chunks=(_chunk(0, 8, 16), _chunk(1, 0, 3))), lambda seed: 60
    )
