"""Conditions and short loops of a step: kept, or avoided by doing a little in vain.

On a CPU a condition costs nothing. On a GPU a step is one graph, and each condition and each loop is a graph within it,
with kernels that prepare it; one alone makes the driver go through all nodes at every launch, where it sends off a
graph of kernels in one go. So there a step computes what nobody wants as long as it is small, and writes out the turns
of loops that have few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# About 10 us of reading: less than what a condition costs around it.
SMALL_BYTES = 48 << 20


def by_condition(
    is_wanted: jax.Array, compute: Callable[[], Any], otherwise: Callable[[], Any], *, num_bytes: int
) -> Any:
    """What `compute` gives if it is wanted, or what `otherwise` does. `num_bytes` is what computing has to touch."""
    return lax.cond(is_wanted, compute, otherwise)


def unless_small(
    is_wanted: jax.Array, compute: Callable[[], Any], otherwise: Callable[[], Any], *, num_bytes: int
) -> Any:
    """The same, but computed in any case if that touches little memory: for results that are right, or never looked
    at, also where nobody wants them."""
    return compute() if num_bytes <= SMALL_BYTES else lax.cond(is_wanted, compute, otherwise)


def loop(count: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """`body(index, carry)` for a fixed number of turns."""
    return lax.fori_loop(0, count, body, start)


def unrolled(count: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """The same, turn by turn in the program."""
    carry = start
    for index in range(count):
        carry = body(jnp.int32(index), carry)
    return carry
