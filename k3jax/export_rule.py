"""The one rule that says where inside a prefill chunk a KDA state can be exported.

The scheduler, the slot pool and the kernel wrapper all ask here, so that a state is never published that no kernel
wrote. Plain Python on purpose: the scheduler imports it.
"""

from __future__ import annotations

EXPORT_ALIGNMENT = 16  # tokens from the chunk's start: the finest step of the prefill kernels


def export_refusal(*, start: int, end: int, position: int, alignment: int = EXPORT_ALIGNMENT) -> str | None:
    """Why a chunk of positions [start, end) cannot export the state after `position` tokens; None when it can.

    The end itself can be exported: it is the chunk's final state.
    """
    if not start < position <= end:
        return f"position {position} is outside ({start}, {end}], the states that the chunk passes"
    if (position - start) % alignment:
        return (
            f"position {position} is {position - start} tokens behind the chunk's start, not a multiple of {alignment}"
        )
    return None
