"""Rotary positions of a draft as arrays: frequencies with YaRN, tables of cosines and sines, rotation of heads.

    angle_i(p) = p f_i,  f_i = theta^(-2i / width);  YaRN: f_i (e_i + (1 - e_i) / factor)

with e_i falling from 1 to 0 between the dimensions that turn `beta_fast` and `beta_slow` times within the original
length. A pair is (i, i + width / 2) or (2i, 2i + 1), as the configuration says. Tables are wide.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax.draft_config import DraftConfig
from k3jax.draft_rope import Rope, RopePairs, Yarn
from k3jax.layers import wide, wide_dtype


class Rotation(NamedTuple):
    """Cosines and sines of every pair, wide, with the amplitude in them."""

    cos: Float[Array, "*B W"]
    sin: Float[Array, "*B W"]

    def over_heads(self) -> Rotation:
        """With an axis of one in front of the pairs, for [*B, heads, width]."""
        return Rotation(self.cos[..., None, :], self.sin[..., None, :])


def rotated_width(config: DraftConfig) -> int:
    """How many channels of a head, or of the shared key of MLA, carry positions."""
    return config.qk_rope_head_dim if config.attention == "mla" else config.head_dim


def rotation(config: DraftConfig, positions: Int[Array, "*B"], dtype) -> Rotation:
    """Tables at `positions` for activations of `dtype`."""
    frequencies = rope_frequencies(config.rope, rotated_width(config))
    total = wide_dtype(dtype)
    angles = positions[..., None].astype(total) * jnp.asarray(frequencies, total)
    return Rotation(jnp.cos(angles) * config.rope.amplitude, jnp.sin(angles) * config.rope.amplitude)


def rotate(x: Float[Array, "*B 2W"], by: Rotation, pairs: RopePairs) -> Float[Array, "*B 2W"]:
    """Turn every pair of channels by its angle; the maths is wide, with one cast at the end."""
    x_wide = wide(x)
    if pairs == "half":
        first, second = jnp.split(x_wide, 2, axis=-1)
        turned = _turn(first, second, by)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
    turned = _turn(x_wide[..., 0::2], x_wide[..., 1::2], by)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _turn(first: Array, second: Array, by: Rotation) -> tuple[Array, Array]:
    return first * by.cos - second * by.sin, second * by.cos + first * by.sin


def rope_frequencies(rope: Rope, width: int) -> np.ndarray:
    """Angle per position of the `width` / 2 pairs, float64."""
    frequencies = rope.theta ** (-np.arange(0, width, 2) / width)
    if rope.yarn is None:
        return frequencies
    kept = _kept_share(rope.yarn, rope.theta, width)
    return frequencies * (kept + (1 - kept) / rope.yarn.factor)


def _kept_share(yarn: Yarn, theta: float, width: int) -> np.ndarray:
    """How much of each frequency YaRN leaves as it is: all of the fast ones, nothing of the slow ones."""

    def dimension(turns: float) -> float:  # that turns so often within the original length
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    span = high - low or 0.001  # the published code's way out of a division by zero
    return 1 - np.clip((np.arange(width // 2) - low) / span, 0, 1)
