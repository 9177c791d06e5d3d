"""The same events give the same plans and transfers, so that a plan can be made again on another host."""

import dataclasses
import random
from typing import Literal

import pytest

from serving.core.types import StepCost
from serving.fake_executor import Fault
from serving.fake_store import FakeStore
from tests.core.drive import Drive
from tests.core.driver import limits, policy, prompt, same_prefix

BLOCK = 16
COSTS = tuple(
    StepCost(4, n, is_drafting, 1 + n / 20 + is_drafting / 20) for n in (0, 12) for is_drafting in (True, False)
)
_FAULTS: tuple[Literal["nan", "rejected", "collect"], ...] = ("nan", "nan", "rejected", "collect")


def _record(seed, draft_tokens):
    rng = random.Random(seed)
    device = limits(
        page_size=BLOCK, num_pages=13, num_slots=6, max_step_tokens=40, max_model_len=150, host_cache_bytes=60
    )
    device = dataclasses.replace(device, draft_tokens=draft_tokens, step_costs=COSTS if draft_tokens else ())
    store = FakeStore(delay=lambda transfer: rng.randint(0, 3), is_failing=lambda transfer: rng.random() < 0.1)
    drive = Drive(device, policy(BLOCK), overlap=True, store=store)
    for number in range(200):
        event = rng.random()
        if event < 0.3:
            parts = prompt(rng.choice([16, 32, 64]), rng.randint(0, 2)), prompt(rng.randint(0, 20), 10 + number)
            drive.add(same_prefix(f"r{number}", *parts, max_tokens=rng.randint(1, 40)))
        elif event < 0.34 and drive.requests:
            drive.abort(rng.choice(list(drive.requests)))
        elif event < 0.38:
            kind = rng.choice(_FAULTS)
            drive.executor.inject(Fault(step=drive.scheduler.num_steps, kind=kind, rows=(rng.randint(0, 3),)))
        drive.step()
    drive.settle()
    # A parked request's keys are drawn: no other run may find them.
    moved = [[(entry.kind, entry.device_id) for entry in transfer.entries] for transfer in drive.store.transfers]
    return drive.plans, moved


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_events_give_the_same_plans_and_transfers(seed, draft_tokens):
    plans, transfers = _record(seed, draft_tokens)
    again, transfers_again = _record(seed, draft_tokens)
    first = next((i for i, pair in enumerate(zip(plans, again, strict=False)) if pair[0] != pair[1]), None)
    assert first is None, f"step {first}: {plans[first]} and {again[first]}"
    assert len(plans) == len(again)
    assert transfers == transfers_again
    assert transfers
