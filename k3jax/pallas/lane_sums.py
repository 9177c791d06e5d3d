"""Sums of many values over neighbouring lanes, of which every lane ends up with its own.

Lanes that halve the number of values with each shuffle sum n of them by about n shuffles; where all lanes are to hold
every sum it takes n log2 L.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


def gather_sums(values: Sequence, lane, lanes: int) -> list:
    """Sums of `values` over `lanes` neighbouring lanes: number m of lane i is the sum of values[m lanes + i].

    Values are float32 registers of MLIR. A lane without a value of its own, for which `values` has None or nothing,
    ends up with the sum of another one.
    """
    values, distance = list(values), 1
    while distance < lanes:
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _int(distance)), _int(0))
        halved = []
        for pair in (values[i : i + 2] for i in range(0, len(values), 2)):
            present = [value for value in pair if value is not None]
            if not present:
                halved.append(None)
                continue
            kept = sent = present[0]
            if len(present) == 2:
                even, odd = present
                kept, sent = arith.select(is_odd, odd, even), arith.select(is_odd, even, odd)
            halved.append(arith.addf(kept, utils.shfl_bfly(sent, distance)))
        values, distance = halved, 2 * distance
    return values


def _int(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
