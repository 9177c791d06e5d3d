"""How the blocks of one launch share a step's work: nothing twice, nothing left out, scans begun when they should."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas.kda_prefill_memory import PAIRS
from k3jax.pallas.kda_prefill_shares import PARTS, Shares, pair_share, share_out

BLOCKS = 132
STEPS_PER_TURN = 14


def shares_of(tiles, heads: int = 12, blocks: int = BLOCKS) -> Shares:
    units, turns, scanners, chains, *order = np.asarray(share_out(jnp.array(tiles), heads, blocks, STEPS_PER_TURN))
    return Shares(units, turns, scanners, chains, np.array(order))


def units_of_pairs(shares: Shares, blocks: int) -> dict[tuple[int, int], list[int]]:
    found = {}
    for block in range(blocks):
        for pair in range(PAIRS):
            share = pair_share(shares, jnp.int32(block), jnp.int32(pair), blocks)
            found[block, pair] = [int(share.unit(turn)) for turn in range(int(share.turns))]
    return found


@pytest.mark.parametrize(
    ("tiles", "heads", "blocks"),
    [
        ([129], 12, BLOCKS),
        ([129, 129], 12, BLOCKS),
        ([17] * 16, 12, BLOCKS),
        ([1] * 16 + [0] * 3, 12, BLOCKS),
        ([3, 0, 40, 0, 7], 2, BLOCKS),
        ([5, 2], 1, 2),
        ([0, 0], 12, BLOCKS),
        ([129] * 4, 96, BLOCKS),
    ],
)
def test_every_unit_is_prepared_once_and_every_scanner_has_a_chain(tiles, heads, blocks):
    shares = shares_of(tiles, heads, blocks)
    pairs = units_of_pairs(shares, blocks)
    units = sorted(unit for share in pairs.values() for unit in share)
    assert units == list(range(sum(tiles) * heads))
    assert shares.chains == np.count_nonzero(tiles) * heads * PARTS
    assert shares.scanners <= min(shares.chains, blocks - 1)
    turns_of_scanners = [len(pairs[block, pair]) for block, pair in pairs if block >= blocks - shares.scanners]
    assert max(turns_of_scanners, default=0) <= shares.turns_of_all
    for block in range(blocks):  # as the second pair waits for the first one's first unit
        first, second = pairs[block, 0], pairs[block, 1]
        assert not second or (first and first[0] < second[0])


def test_longest_sequences_come_first_and_empty_ones_last():
    assert shares_of([3, 0, 40, 3, 0, 7]).order.tolist() == [2, 5, 0, 3, 1, 4]


def test_scans_of_one_sequence_begin_at_once():
    for tiles in (16, 128, 512):
        shares = shares_of([tiles])
        assert (shares.turns_of_all, shares.scanners) == (0, 24)


@pytest.mark.parametrize(("tiles", "turns"), [([128] * 2, 6), ([128] * 4, 21), ([16] * 16, 11)])
def test_scans_of_several_begin_when_they_take_as_long_as_what_is_left_to_prepare(tiles, turns):
    shares = shares_of(tiles)
    assert shares.turns_of_all == turns
    left = shares.units - turns * BLOCKS * PAIRS
    assert left * STEPS_PER_TURN <= (BLOCKS - shares.scanners) * PAIRS * (PARTS * shares.units / shares.scanners + 14)


def test_few_tiles_of_many_sequences_are_prepared_by_all_blocks():
    """Those that do not scan would take three turns."""
    shares = shares_of([1] * 16)
    assert (shares.turns_of_all, shares.scanners) == (1, 96)
