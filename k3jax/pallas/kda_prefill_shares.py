"""How the blocks of one launch of a KDA prefill share its work, from the lengths of a step's sequences.

First all blocks prepare, as many turns each; then the last ones scan, every chain of the step at once or a few times
over, and the others prepare what is left. A turn more before the scans is a turn less beside them: the best number is
where the scans and the rest of the preparation end together. Few sequences leave so many blocks to prepare beside their
scans that these begin at once.

Built once per step and shared by every KDA layer, as the plan is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from k3jax.pallas.kda_prefill_memory import CHUNK, PAIRS, WIDTH
from k3jax.pallas.kda_prefill_prepare import Share

PARTS = WIDTH // CHUNK  # halves of V; with a head and a sequence one makes a chain


class Shares(NamedTuple):
    """Of a launch. A unit is a tile of a head, and what a pair of warpgroups prepares in a turn."""

    units: Int[Array, ""]  # with rows
    turns_of_all: Int[Array, ""]  # that all blocks prepare
    scanners: Int[Array, ""]  # blocks, the last ones; after those turns the others alone prepare
    chains: Int[Array, ""]
    order: Any  # Int[N], sequences, the longest first; an array or, in a kernel, its memory


@functools.partial(jax.jit, static_argnames=("heads", "blocks", "steps_per_turn"))
def share_out(tiles: Int[Array, "N"], heads: int, blocks: int, steps_per_turn: int) -> Int[Array, "4+N"]:
    """The fields of `Shares`, for sequences of so many tiles and at least two blocks.

    `steps_per_turn` is how many tiles a chain is carried over while a pair of warpgroups prepares a unit.
    """
    index = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    is_before = (tiles[:, None] > tiles) | ((tiles[:, None] == tiles) & (index[:, None] < index))
    rank = jnp.sum(is_before, axis=0)
    order = jnp.sum(jnp.where(rank == index[:, None], index, 0), axis=1)
    units, chains = jnp.sum(tiles) * heads, jnp.sum(tiles > 0) * (heads * PARTS)
    # Not all blocks: each reads 64 KB a tile, and beyond three quarters of them they wait for each other.
    rounds = jnp.maximum(_ceil(chains, blocks * 3 // 4), 1)
    scanners = _ceil(chains, rounds)
    pairs, all_pairs = (blocks - scanners) * PAIRS, blocks * PAIRS
    # Of the block that scans longest.
    scan_steps = jnp.maximum(jnp.max(tiles), _ceil(PARTS * units, jnp.maximum(scanners, 1)))

    def steps(turns):
        """Until both are done, if all blocks prepare in so many turns."""
        to_scan = scan_steps + jnp.where(turns == 0, steps_per_turn, 0)  # scans wait for the first tiles
        rest = jnp.maximum(units - turns * all_pairs, 0)
        return turns * steps_per_turn + jnp.maximum(to_scan, _ceil(rest, pairs) * steps_per_turn)

    fewer = jnp.maximum(units - scan_steps * pairs // steps_per_turn, 0) // all_pairs
    turns = jnp.where(steps(fewer + 1) < steps(fewer), fewer + 1, fewer)
    return jnp.concatenate([jnp.stack([units, turns, scanners, chains]), order]).astype(jnp.int32)


def read_shares(ref) -> Shares:
    """What `share_out` made, in a kernel."""
    first = len(Shares._fields) - 1
    units, turns, scanners, chains = (ref[index] for index in range(first))
    return Shares(units, turns, scanners, chains, ref.at[pl.ds(first, ref.shape[0] - first)])


def pair_share(shares: Shares, block, pair, blocks: int) -> Share:
    """What a pair of a block prepares, the earlier units in the earlier turns.

    Blocks that will scan take the first units, as many turns as all prepare, and the others meanwhile the next ones.
    Blocks before pairs: few units spread over all of the GPU. If not every block has a second one, it is better that
    those with the first units have not, where scans wait for these.
    """
    preparers, scanners = blocks - shares.scanners, shares.scanners
    end_of_scanners = jnp.minimum(shares.turns_of_all * scanners * PAIRS, shares.units)
    is_scanner = block >= preparers
    begin, end = jnp.where(is_scanner, 0, end_of_scanners), jnp.where(is_scanner, end_of_scanners, shares.units)
    count, place = jnp.where(is_scanner, scanners, preparers), jnp.where(is_scanner, block - preparers, block)
    stride = count * PAIRS
    first = begin + jnp.where(pair == 0, place, stride - 1 - place)
    return Share(lax.div(jnp.maximum(end - first + stride - 1, 0), stride), first, stride)


def _ceil(x: Array, y) -> Array:
    """x / y, rounded up."""
    return (x + (y - 1)) // y
