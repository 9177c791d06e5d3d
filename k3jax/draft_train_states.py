"""What a draft learns from: the frozen target's hidden states over whole sequences, tapped as the serving step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3jax import model, moe
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig, check_against
from k3jax.params import Tree


class TeacherStates(NamedTuple):
    """Per token of whole sequences; the logits behind a token are the target's head on its `hidden`."""

    taps: Float[Array | np.ndarray, "*B ND"]  # one behind the other, in the order of the draft's taps
    hidden: Float[Array | np.ndarray, "*B D"]  # behind the output norm


def teacher_states(
    params: Tree,
    config: K3Config,
    draft: DraftConfig,
    token_ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    run_experts: Callable = moe.routed_experts,
) -> TeacherStates:
    """Run the target over packed documents, in the dtype of its parameters. Segments do not see each other.

    Nothing is differentiated: the target is frozen. Raises `ConfigError` for a draft that was not made for the target.
    """
    check_against(draft, config)
    before = {0: model.embed(params, token_ids)}  # the accumulator in front of each layer

    def observe(name: str, value: Any) -> None:
        parts = name.split(".")
        if parts[0] == "layers" and parts[-1] == "prefix_sum":
            before[int(parts[1]) + 1] = value

    model.forward(params, config, token_ids, segment_ids, run_experts=run_experts, observe=observe)

    def bank(layer: int) -> list[Array]:
        return [before[i] for i in range(layer) if config.is_snapshot(i)]

    def tap(layer: int) -> Array:
        x = before[layer + 1]
        return x if draft.stream == "prefix" else model.depth_mix(params, config, layer + 1, bank(layer + 1), x)

    depth = config.num_hidden_layers
    hidden = model.output_norm(params, config, bank(depth), before[depth])
    return TeacherStates(jnp.concatenate([tap(layer) for layer in draft.taps], axis=-1), hidden)
