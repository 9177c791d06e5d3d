"""What an H200 was measured to do at most, and how many calls keep its L2 cache cold."""

from __future__ import annotations

import math

COPY_BYTES_PER_S = 4.10e12  # read + write
READ_BYTES_PER_S = 4.27e12
FLOP_PER_S = 790e12  # bfloat16 products
COLD_BYTES = 150e6  # touched by one round of calls, against 60 MB of L2


def cold_calls(bytes_a_call: float, most: int = 200) -> int:
    """Calls of one round, each over its own buffers."""
    return min(most, max(3, math.ceil(COLD_BYTES / bytes_a_call)))
