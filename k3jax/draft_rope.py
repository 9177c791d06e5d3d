"""Rotary positions of drafts (the target has none): how values are paired, and YaRN in its two conventions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.config import ConfigError
from k3jax.draft_fields import need

RopePairs = Literal["half", "interleaved"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN extension of rotary frequencies."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ConfigError(f"YaRN needs a factor and an original length of at least 1, not {self}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ConfigError(f"YaRN needs beta_fast={self.beta_fast} above beta_slow={self.beta_slow} above 0")

    @property
    def growth(self) -> float:
        """How much longer contexts sharpen attention: 0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles are position / theta^(2i / width), by frequency scaled as YaRN says."""

    theta: float
    pairs: RopePairs
    yarn: Yarn | None = None
    amplitude: float = 1.0  # cos and sin are multiplied by it
    score_factor: float = 1.0  # on top of head_dim^-0.5


def read_rope(layer: Mapping[str, Any], pairs: RopePairs) -> Rope:
    """`rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it.

    YaRN multiplies either cos and sin (Hugging Face's convention), or, where `mscale_all_dim` is given, the scores
    (DeepSeek's): cos and sin then get only the ratio of the two scales.
    """
    parameters = layer.get("rope_parameters", layer.get("rope_scaling", {}))
    thetas = {place["rope_theta"] for place in (parameters, layer) if "rope_theta" in place}
    if len(thetas) != 1 or min(thetas) <= 1:
        raise ConfigError(f"rope_theta must be given once, above 1; found {sorted(thetas) or 'none'}")
    theta = float(thetas.pop())
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta, pairs=pairs)
    if kind != "yarn":
        raise ConfigError(f"rope_type={kind!r} is not supported; use default or yarn")
    need(parameters, "factor", "original_max_position_embeddings")
    yarn = Yarn(
        factor=float(parameters["factor"]),
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
        beta_fast=float(parameters.get("beta_fast", 32.0)),
        beta_slow=float(parameters.get("beta_slow", 1.0)),
    )

    def scale(name: str) -> float:
        mscale = parameters.get(name, 1.0)
        if mscale <= 0:
            raise ConfigError(f"{name}={mscale} must be positive")
        return 1.0 + mscale * (yarn.growth - 1.0)

    if "mscale_all_dim" in parameters:
        amplitude, score = scale("mscale") / scale("mscale_all_dim"), scale("mscale_all_dim") ** 2
    else:
        amplitude, score = float(parameters.get("attention_factor", yarn.growth)), 1.0
    return Rope(theta=theta, pairs=pairs, yarn=yarn, amplitude=amplitude, score_factor=score)
