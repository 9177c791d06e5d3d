"""Rotary positions of drafts (the target has none): how values are paired, and YaRN in its two conventions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from k3jax.draft_fields import ROPE_TYPE, YARN, need, refusal, require, shown

RopePairs = Literal["half", "interleaved"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN extension of rotary frequencies."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings"):
            if getattr(self, name) < 1:
                raise refusal(f"{name}={getattr(self, name)} of YaRN must be at least 1")
        if not self.beta_fast > self.beta_slow > 0:
            raise refusal(f"YaRN needs beta_fast={self.beta_fast} above beta_slow={self.beta_slow} above 0")

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


_ALWAYS = (*ROPE_TYPE, "rope_theta", "partial_rotary_factor")


def read_rope(layer: Mapping[str, Any], pairs: RopePairs) -> Rope:
    """`rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it.

    YaRN multiplies either cos and sin (Hugging Face's convention), or, where `mscale_all_dim` is given, the scores
    (DeepSeek's): cos and sin then get only the ratio of the two scales.
    """
    require(layer, {"rope_interleave": pairs == "interleaved"})
    place, parameters = _parameters(layer)
    thetas = {fields["rope_theta"] for fields in (parameters, layer) if "rope_theta" in fields}
    if len(thetas) != 1 or min(thetas) <= 1:
        raise refusal(f"rope_theta must be given once, above 1; found {sorted(thetas) or 'none'}")
    theta = float(thetas.pop())
    kinds = {parameters[name] for name in ROPE_TYPE if name in parameters} or {"default"}
    if not kinds <= {"default", "yarn"} or len(kinds) > 1:
        named = " and ".join(f"{name}={parameters[name]!r}" for name in ROPE_TYPE if name in parameters)
        raise refusal(f"{place}: {named} is not supported", "Use a draft whose rope_type is default or yarn.")
    kind = kinds.pop()
    for name, value in parameters.items():
        if name not in _ALWAYS and name not in YARN:
            raise refusal(
                f"{place}.{name}={shown(value)} is not known, so positions might be computed wrongly",
                "Remove the field if it has no effect, or use another draft.",
            )
        if name in YARN and kind == "default":
            raise refusal(
                f"{place}.{name}={shown(value)} has no meaning beside rope_type='default'",
                "Set rope_type to yarn or remove the field, whichever the draft was trained with.",
            )
    require(parameters, {"partial_rotary_factor": 1, "truncate": True})
    if kind == "default":
        return Rope(theta=theta, pairs=pairs)
    need(parameters, "factor", "original_max_position_embeddings")
    yarn = Yarn(
        factor=float(parameters["factor"]),
        original_max_position_embeddings=parameters["original_max_position_embeddings"],
        beta_fast=float(parameters.get("beta_fast", 32.0)),
        beta_slow=float(parameters.get("beta_slow", 1.0)),
    )
    amplitude, score_factor = _yarn_factors(parameters, yarn)
    return Rope(theta=theta, pairs=pairs, yarn=yarn, amplitude=amplitude, score_factor=score_factor)


def _parameters(layer: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The object that describes rotary positions and its name. Raises `ConfigError` when there are two that differ."""
    found = {name: layer[name] for name in ("rope_parameters", "rope_scaling") if name in layer}
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise refusal(
            " contradicts ".join(f"{name}={shown(value)}" for name, value in found.items()),
            "Keep the one that the draft was trained with.",
        )
    return next(iter(found.items()), ("rope_parameters", {}))


def _yarn_factors(parameters: Mapping[str, Any], yarn: Yarn) -> tuple[float, float]:
    """Factor of cos and sin, and factor of the scores."""

    def scale(name: str) -> float:
        mscale = parameters.get(name, 1.0)
        if mscale <= 0:
            raise refusal(f"{name}={mscale} must be positive")
        return 1.0 + mscale * (yarn.growth - 1.0)

    stated = parameters.get("attention_factor")
    if stated is not None and stated <= 0:
        raise refusal(f"attention_factor={stated} must be positive")
    if "mscale_all_dim" in parameters:
        amplitude = scale("mscale") / scale("mscale_all_dim")
        if stated is not None and not math.isclose(stated, amplitude, rel_tol=1e-6):
            raise refusal(
                f"attention_factor={stated} contradicts mscale and mscale_all_dim, whose factor is {amplitude}"
            )
        return amplitude, scale("mscale_all_dim") ** 2
    if stated is None and parameters.get("mscale", 1) != 1:
        # Hugging Face's code then ignores it, DeepSeek's multiplies with it.
        raise refusal(
            f"mscale={parameters['mscale']} without mscale_all_dim is read differently by different engines",
            "Give attention_factor, or mscale_all_dim beside it, as the draft was trained.",
        )
    return float(yarn.growth if stated is None else stated), 1.0
