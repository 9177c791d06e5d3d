"""How device memory is split: KDA slots for every running request first, the rest MLA pages; limits that follow."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from k3jax import draft_state
from k3jax.cache import PAGE_SIZE, CacheShape
from k3jax.config import K3Config
from k3jax.draft_state import Drafting
from k3jax.mla_serving import BLOCK_PAGES
from k3jax.sharding.collectives import Parallel
from serving.config import ConfigError, ServeConfig
from serving.core.types import LengthSetBy

CPU_POOL_BYTES = 2**30  # pages on a CPU unless pinned: enough to try things, small enough for a laptop
MEMORY_FRACTION = 0.9  # of a GPU, for everything, unless --memory-fraction says
LARGE_GPU_BYTES = 160 * 10**9  # of the device, whatever share of it is used
WORKSPACE_SHARE = 0.08  # of a GPU's budget, for the programs' temporary memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Effective limits of a server."""

    cache_shape: CacheShape
    max_step_tokens: int
    max_model_len: int
    length_set_by: LengthSetBy = "setting"  # what `max_model_len` comes from
    page_size: int = PAGE_SIZE

    def describe(self) -> str:
        """One line for the log: pools in tokens and requests."""
        tokens = (self.cache_shape.num_pages - 1) * self.page_size
        return (
            f"pools: {self.cache_shape.num_pages - 1} pages = {tokens} tokens, {self.cache_shape.num_slots - 1} slots "
            f"({max(0, self.cache_shape.num_slots - 1 - self.cache_shape.num_rows)} for checkpoints); "
            f"{self.cache_shape.num_rows} requests at once, {self.max_model_len} tokens each at most, "
            f"{self.max_step_tokens} tokens a step"
        )


def plan_sizes(
    config: ServeConfig,
    model_config: K3Config,
    dtype: Any,
    parallel: Parallel,
    device: Any,
    drafting: Drafting | None = None,
    *,
    memory_fraction: float = MEMORY_FRACTION,
) -> Sizes:
    """Fill in what the settings leave open, with the weights on the device already.

    `memory_fraction` is the share of a GPU that jax was told to use, and reports as its limit.
    Raises `ConfigError` when one request of full length does not fit.
    """
    on_gpu = device.platform == "gpu"
    rows = config.max_num_seqs or (256 if on_gpu else 32)
    step_tokens = config.max_step_tokens or (_gpu_step_tokens(device, memory_fraction) if on_gpu else 512)
    if step_tokens < PAGE_SIZE:
        raise ConfigError(f"--max-step-tokens={step_tokens} is below the chunk grid. Use at least {PAGE_SIZE}.")
    page_bytes, slot_bytes = draft_state.pool_bytes(model_config, dtype, drafting)
    own_slot_bytes = -(-slot_bytes // parallel.degree)
    longest = min(config.max_model_len or model_config.max_position_embeddings, model_config.max_position_embeddings)
    if config.max_model_len and config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len={config.max_model_len} exceeds the model's limit. "
            f"Use at most {model_config.max_position_embeddings}."
        )
    running = config.num_slots or rows + 1
    of_rows = running * own_slot_bytes + draft_state.row_bytes(model_config, dtype, parallel, drafting, rows)
    left = _pool_bytes(config, device) - (of_rows if on_gpu else 0)
    ranks_here = 1 if on_gpu else parallel.degree  # those of a CPU share its memory
    _check_pools(
        config,
        device,
        page_bytes=page_bytes * ranks_here,
        slots=running,
        slot_bytes=-(-of_rows // running) * ranks_here,
        rows=rows,
    )
    keeps_states = config.prefix_cache and config.checkpoint != "off" and config.num_slots is None
    share = config.checkpoint_share if keeps_states else 0.0
    pages = config.num_pages or int((1 - share) * left // page_bytes)
    most = rows * _pages_per_row(longest) + 1
    pages = min(pages, most) if config.num_pages is None else pages
    # Pinned or capped pages need no more checkpoints than there are boundaries to keep them at.
    for_states = min(share * left, left - pages * page_bytes) if on_gpu and share else share * left
    slots = running + max(0, min(int(for_states // own_slot_bytes), pages // 2 if share else 0))
    fits = (pages - 1) * PAGE_SIZE
    if fits < PAGE_SIZE or (config.max_model_len and fits < longest):
        needed = _pages_per_row(longest) if config.max_model_len else 1
        room = int(left // page_bytes) - needed - 1
        fix = "Lower --max-model-len or --max-num-seqs, or raise --num-pages."
        if share and config.num_pages is None and room >= 0:
            fix = f"Lower --checkpoint-share={share} to at most {int(1e4 * room * page_bytes / left) / 1e4}."
        raise ConfigError(
            f"not enough memory for one request: {longest} tokens need {_pages_per_row(longest)} pages of "
            f"{page_bytes} bytes, {max(pages - 1, 0)} fit. {fix}"
        )
    set_by: LengthSetBy = "model" if longest == model_config.max_position_embeddings else "setting"
    if fits < longest:
        longest, set_by = fits, "pages"
    return Sizes(
        cache_shape=CacheShape(num_rows=rows, num_pages=pages, num_slots=slots, pages_per_row=_table_width(longest)),
        max_step_tokens=step_tokens,
        max_model_len=longest,
        length_set_by=set_by,
    )


def _check_pools(config: ServeConfig, device: Any, *, page_bytes: int, slots: int, slot_bytes: int, rows: int) -> None:
    """Refuse numbers of pages, slots and rows that the device has no memory for, before any of it is allocated."""
    most_bytes = _most_bytes(config, device)
    pages = config.num_pages or 2
    of_pages, of_slots = pages * page_bytes, slots * slot_bytes
    if most_bytes is None or of_pages + of_slots <= most_bytes:
        return
    if config.num_pages is not None and of_pages >= of_slots:
        name, value, most = "--num-pages", pages, (most_bytes - of_slots) // page_bytes
    elif config.num_slots is not None:
        name, value, most = "--num-slots", slots, (most_bytes - of_pages) // slot_bytes
    elif config.max_num_seqs is not None or config.num_pages is not None:
        name, value, most = "--max-num-seqs", rows, (most_bytes - of_pages) // slot_bytes - 1
    else:
        return
    raise ConfigError(
        f"{name}={value} needs too much memory: pages take {of_pages / 1e9:.1f} GB and states "
        f"{of_slots / 1e9:.1f} GB, {most_bytes / 1e9:.1f} GB are there. Use at most {max(most, 1)}."
    )


def _most_bytes(config: ServeConfig, device: Any) -> int | None:
    """Bytes that pools may have: what is left for them, all that is free for pinned pages, on a CPU all of its memory.

    None: the device does not say.
    """
    if device.platform != "gpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stats = device.memory_stats()
    if not stats or config.num_pages is None:
        return max(0, _pool_bytes(config, device)) if stats else None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def _pages_per_row(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _table_width(tokens: int) -> int:
    """Page table entries a row needs, in whole blocks of the attention loop."""
    return -(-_pages_per_row(tokens) // BLOCK_PAGES) * BLOCK_PAGES


def _gpu_step_tokens(device: Any, memory_fraction: float) -> int:
    stats = device.memory_stats()
    return 16384 if stats and stats["bytes_limit"] >= int(LARGE_GPU_BYTES * memory_fraction) else 8192


def _pool_bytes(config: ServeConfig, device: Any) -> int:
    """Bytes for pages and slots together."""
    stats = device.memory_stats() if device.platform == "gpu" else None
    if not stats:
        if config.memory_fraction is not None:
            raise ConfigError("--memory-fraction works on a GPU only. On a CPU pin the pool with --num-pages.")
        return CPU_POOL_BYTES
    return int(stats["bytes_limit"] * (1 - WORKSPACE_SHARE) - stats["bytes_in_use"])
