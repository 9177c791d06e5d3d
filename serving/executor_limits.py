"""What the scheduler has to know about a program's pools."""

from __future__ import annotations

from k3jax import cache, draft_state
from k3jax.programs import StepProgram
from serving.core.types import ExecutorLimits, LengthSetBy


def limits_of(
    program: StepProgram,
    *,
    max_step_tokens: int,
    max_model_len: int | None = None,
    length_set_by: LengthSetBy = "setting",
    host_cache_bytes: int = 0,
    identity: str = "",
) -> ExecutorLimits:
    """The limits of an executor of `program`; a sequence may fill its page table unless `max_model_len` says less."""
    shape = program.cache_shape
    page_bytes, slot_bytes = draft_state.pool_bytes(program.config, program.dtype, program.drafting)
    return ExecutorLimits(
        num_rows=shape.num_rows,
        num_pages=shape.num_pages,
        num_slots=shape.num_slots,
        page_size=cache.PAGE_SIZE,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len or shape.pages_per_row * cache.PAGE_SIZE,
        length_set_by=length_set_by,
        vocab_size=program.config.vocab_size,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        host_cache_bytes=host_cache_bytes,
        draft_tokens=program.drafting.tokens if program.drafting else 0,
        identity=identity,
    )
