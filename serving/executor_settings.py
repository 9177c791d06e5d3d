"""What the flags that a launch fills in came to, under the flags' own names: for the log and /server_info."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax.numpy as jnp

from k3jax.pallas.dispatch import Choice
from k3jax.programs import StepProgram
from serving.config import NO_DRAFT, ServeConfig


def settings_in_effect(
    config: ServeConfig,
    program: StepProgram,
    kernels: Sequence[Choice],
    *,
    draft_folder: pathlib.Path | None,
    cache: pathlib.Path,
    memory_fraction: float | None,
) -> dict[str, object]:
    """Every setting that the device side chooses. None: nothing here depends on it."""
    drafting = program.drafting
    backends = {choice.op: choice.backend for choice in kernels}
    finish = backends.get("finish_rows")  # only there beside kernels that leave expert rows to sum
    return {
        "dtype": jnp.dtype(program.dtype).name,
        "shard_latents": "on" if program.parallel.shard_latents else "off",
        "draft": NO_DRAFT if drafting is None else str(draft_folder),
        "draft_tokens": None if drafting is None else drafting.tokens,
        "state_rollback": None if drafting is None else drafting.rollback,
        "rejection_sampling": None if drafting is None else drafting.rule,
        "adaptive_verification": None if drafting is None else config.adaptive_verification is not False,
        "kernels": "pallas" if "pallas" in backends.values() else "xla",
        "moe_finalize": None if finish is None else "deferred" if finish == "pallas" else "separate",
        "memory_fraction": memory_fraction,
        "compile_cache": str(cache),
    }
