"""Programs that take pages and slots out of the pools and put them back, a fixed number at a time.

A store reads the pools between two steps; a load donates them, so they stay in place. Unused entries name the null page
or slot and hold zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.cache import Pools
from k3jax.programs import REPLICATED, StepProgram

PAGES_PER_MOVE = 16
SLOTS_PER_MOVE = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateMoves:
    """Compiled moves. A page is [MLA layers, 64, latent] and what the draft keeps of the same positions; a slot is
    state [KDA layers, H, V, K] and its conv tail."""

    read_pages: Any  # (paged, ids [PAGES_PER_MOVE]) -> tuple of pages
    write_pages: Any  # (paged, ids, tuple of pages) -> paged, donated
    read_slot: Any  # (kda, conv, id) -> (state, tail)
    write_slot: Any  # (kda, conv, id, (state, tail)) -> (kda, conv), donated
    page: Any  # abstract, with its device sharding
    slot: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def paged(pools: Pools) -> tuple[Any, Any]:
    """The pools that consist of pages."""
    return pools.mla, pools.draft


def with_paged(pools: Pools, pages: tuple[Any, Any]) -> Pools:
    """`pools` with other pages."""
    return pools._replace(mla=pages[0], draft=pages[1])


def compile_moves(program: StepProgram) -> StateMoves:
    """Compile all four for the pools of `program`."""
    mesh, specs, shapes = program.mesh, program.pool_specs(), program.pool_shapes()
    specs, shapes = specs._replace(records=()), shapes._replace(records=())
    pools = jax.tree.map(lambda s, spec: _placed(mesh, s.shape, s.dtype, spec), shapes, specs)
    # An entry lacks the second axis of its pool, the one that counts pages or slots.
    entry_specs = jax.tree.map(lambda _, spec: PartitionSpec(*spec[:1], *spec[2:]), shapes, specs)
    entries = jax.tree.map(
        lambda s, spec: _placed(mesh, (s.shape[0], *s.shape[2:]), s.dtype, spec), shapes, entry_specs
    )
    paged_specs, page_entry_specs = paged(specs), paged(entry_specs)
    page_ids, slot_id = (
        _placed(mesh, (PAGES_PER_MOVE,), jnp.int32, REPLICATED),
        _placed(mesh, (), jnp.int32, REPLICATED),
    )
    pages, page_specs = (paged(entries),) * PAGES_PER_MOVE, (page_entry_specs,) * PAGES_PER_MOVE
    slot, slot_specs = (entries.kda, entries.conv), (entry_specs.kda, entry_specs.conv)

    def build(body, in_specs, out_specs, donated, operands):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donated).lower(*operands).compile()

    return StateMoves(
        read_pages=build(_read_pages, (paged_specs, REPLICATED), page_specs, (), (paged(pools), page_ids)),
        write_pages=build(
            _write_pages, (paged_specs, REPLICATED, page_specs), paged_specs, (0,), (paged(pools), page_ids, pages)
        ),
        read_slot=build(
            _read_slot, (specs.kda, specs.conv, REPLICATED), slot_specs, (), (pools.kda, pools.conv, slot_id)
        ),
        write_slot=build(
            _write_slot,
            (specs.kda, specs.conv, REPLICATED, slot_specs),
            (specs.kda, specs.conv),
            (0, 1),
            (pools.kda, pools.conv, slot_id, slot),
        ),
        page=paged(entries),
        slot=slot,
    )


def _placed(mesh, shape, dtype, spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _entry(pool, index):
    return lax.dynamic_index_in_dim(pool, index, axis=1, keepdims=False)


def _put(pool, value, index):
    return lax.dynamic_update_index_in_dim(pool, value, index, axis=1)


def _read_pages(pools, ids):
    return tuple(jax.tree.map(lambda pool, i=i: _entry(pool, ids[i]), pools) for i in range(PAGES_PER_MOVE))


def _write_pages(pools, ids, pages):
    for i in range(PAGES_PER_MOVE):
        pools = jax.tree.map(lambda pool, page, i=i: _put(pool, page, ids[i]), pools, pages[i])
    return pools


def _read_slot(kda, conv, index):
    return _entry(kda, index), _entry(conv, index)


def _write_slot(kda, conv, index, slot):
    return _put(kda, slot[0], index), _put(conv, slot[1], index)
