"""A snapshot of the engine, for /metrics, /ready and the status line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges as of the last step; totals since the engine started.

    Of the prompt tokens looked up, a part was found. A part was not because its pages have been evicted since it was
    seen, a part because the state checkpoint alone was missing, and the rest because neither was there: it is new, or
    was seen too long ago to be remembered. (The tokens after the last block boundary can never be found and are in none
    of the parts.)
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0  # of those waiting: their prefix is on its way from the host
    pages_used: int = 0  # by requests; those that are only kept are not among them
    pages_total: int = 0  # the null page excluded
    slots_used: int = 0  # by requests
    slots_total: int = 0  # the null slot excluded
    pages_cached: int = 0  # can be found by a later request, whether or not one uses them now
    checkpoints_held: int = 0
    host_bytes_used: int = 0
    host_bytes_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0  # of requests whose prompt is done; recomputation does not count again
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    parks_total: int = 0  # preemptions whose state was put into the host tier
    device_failures_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0  # host hits included
    prefix_host_hit_tokens_total: int = 0  # those that the device alone did not have
    prefix_missed_page_tokens_total: int = 0
    prefix_missed_checkpoint_tokens_total: int = 0
    prefix_missed_both_tokens_total: int = 0
    pages_evicted_total: int = 0
    checkpoints_evicted_total: int = 0
    host_stores_total: int = 0  # transfers that ended well
    host_loads_total: int = 0
    host_failures_total: int = 0  # transfers that did not
    verify_rows_total: int = 0  # results of running requests in steps with a draft model, whether or not they verified
    draft_tokens_total: int = 0  # drafts that were verified
    accepted_draft_tokens_total: int = 0  # of these, those that were returned
    draft_tokens_by_position: tuple[int, ...] = ()  # the same by place in the block, first to last; (): no draft model
    accepted_draft_tokens_by_position: tuple[int, ...] = ()
    last_num_drafts: int = 0  # drafts that the newest plan lets be verified
    step_seconds: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"plan": 0.0, "device": 0.0, "apply": 0.0}
    )
