"""Where a prompt leaves state checkpoints, and what that does to its chunks."""

from __future__ import annotations

import dataclasses

from k3jax.export_rule import export_refusal
from serving.core.policy import SchedulerPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """A chunk that may have been cut for a checkpoint, and the position whose state it exports (0: none)."""

    end: int
    export: int = 0


def prompt_boundaries(policy: SchedulerPolicy, *, start: int, target: int, junction: int) -> list[int]:
    """Positions in (start, target) where the prompt leaves a checkpoint, ascending.

    The last stride boundary below the end serves a repeat of the prompt. `junction` is where the prompt leaves what
    others before it have shown (0: nowhere): whoever shows it next starts there. The end itself is not among them: a
    decode that starts on a boundary keeps its state anyway.
    """
    if not policy.prefix_cache or policy.checkpoint == "off":
        return []
    stride, every = policy.checkpoint_stride, policy.checkpoint_every
    wanted = {(target - 1) // stride * stride, junction // stride * stride}
    if every:
        wanted.update(range(start // every * every + every, target, every))
    return sorted(position for position in wanted if start < position < target)


def shape_chunk(policy: SchedulerPolicy, *, start: int, end: int, boundaries: list[int]) -> ChunkShape:
    """Fit a chunk to the first boundary that it reaches.

    The kernels export one state of a chunk. So a chunk runs through its only boundary, and ends at the first of
    several; it also ends at one that cannot be exported, where the next step copies the row's own state.
    """
    inside = [position for position in boundaries if start < position <= end]
    if not inside:
        return ChunkShape(end=end)
    first = inside[0]
    if policy.checkpoint == "split" or export_refusal(start=start, end=end, position=first) is not None:
        return ChunkShape(end=first)
    return ChunkShape(end=first if len(inside) > 1 else end, export=first)
