"""One optimiser step of a draft: state, AdamW, the jitted step. `k3jax.draft_train` has the data, the clock, the files.

The master weights are float32, one leaf per layer. Each step rounds them as the export does, to bfloat16, and computes
in the compute dtype, so that what was trained is what is served. The target's embedding and head are operands that
nothing updates.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from k3jax.draft_config import DraftConfig
from k3jax.draft_params import abstract_draft
from k3jax.draft_train_loss import DraftBatch, LossTerms, LossWeights, batch_loss
from k3jax.params import Tree, flatten, init, is_stacked, map_tree, unstack
from k3jax.train_run import AdamSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptimization(AdamSettings):
    """What one step does. The learning rate comes from outside, step by step."""

    batch_rows: int = 8
    anchors_per_row: int = 48
    weight_decay: float = 0.0
    loss: LossWeights = dataclasses.field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_rows", "anchors_per_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")


class TargetTables(NamedTuple):
    """The target's embedding and head, which a draft begins and ends in. Frozen, and not part of a draft's files."""

    embed: Float[Array, "X D"]
    lm_head: Float[Array, "X D"]


class DraftTrainState(NamedTuple):
    """Everything a step changes; `params` is the draft's tree with a tuple of layers for every stack."""

    params: Tree
    optimizer: Any
    step: Int[Array, ""]


class StepMetrics(NamedTuple):
    """Of one step; the gradient's norm is that before clipping."""

    terms: LossTerms
    gradient_norm: Float[Array, ""]


def initial_draft(draft: DraftConfig, seed: int) -> Tree:
    """Random float32 stacks: linear weights with standard deviation fan_in^-1/2.

    What adds to the residual stream starts smaller, by the root of the number of additions, and the Markov bias and
    the confidence near zero.
    """
    tree = abstract_draft(draft)
    specs = dict(flatten(tree))
    additions = (2 * draft.num_hidden_layers) ** -0.5
    factors = {"out": additions, "down": additions, "next": 0.1, "weight": 0.1}

    def rescale(path: tuple[str, ...], value: Array) -> Array:
        if specs[path].init != "normal":
            return value
        return value * (value.shape[-1] ** -0.5 * factors.get(path[-1], 1.0))

    return map_tree(rescale, init(tree, jax.random.key(seed), jnp.float32, 1.0))


def initial_state(draft: DraftConfig, optimization: DraftOptimization, seed: int) -> DraftTrainState:
    """Fresh state on the default device."""
    stacks = jax.jit(initial_draft, static_argnums=(0, 1))(draft, seed)
    params = unstack(stacks, abstract_draft(draft))
    return DraftTrainState(params, optimizer(draft, optimization).init(params), jnp.zeros((), jnp.int32))


def optimizer(draft: DraftConfig, optimization: DraftOptimization) -> optax.GradientTransformation:
    """AdamW behind clipping, before the learning rate. Norms and biases do not decay."""

    def decays(_, spec) -> Any:
        matrix = spec.init == "normal"
        return (matrix,) * spec.shape[0] if is_stacked(spec) else matrix

    return optax.chain(
        optax.clip_by_global_norm(optimization.clip_norm),
        optax.scale_by_adam(b1=optimization.beta1, b2=optimization.beta2, eps=optimization.epsilon),
        optax.add_decayed_weights(optimization.weight_decay, mask=map_tree(decays, abstract_draft(draft))),
    )


def compute_params(params: Tree, optimization: DraftOptimization) -> Tree:
    """The weights that the forward pass sees: rounded as on export, in the compute dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(optimization.compute_dtype), params)


def loss(
    params: Tree, batch: DraftBatch, tables: TargetTables, draft: DraftConfig, optimization: DraftOptimization
) -> tuple[Float[Array, ""], LossTerms]:
    """The loss of master weights, and its parts."""
    weights = compute_params(params, optimization)
    terms = batch_loss(weights, draft, *tables, batch, optimization.loss, remat=optimization.remat)
    return terms.loss, terms


@functools.partial(jax.jit, static_argnames=("draft", "optimization"), donate_argnames="state")
def train_step(
    state: DraftTrainState,
    batch: DraftBatch,
    tables: TargetTables,
    learning_rate: Float[Array, ""],
    *,
    draft: DraftConfig,
    optimization: DraftOptimization,
) -> tuple[DraftTrainState, StepMetrics]:
    """One step on one batch. `state` is donated."""
    gradient_of = jax.value_and_grad(loss, has_aux=True)
    (_, terms), gradients = gradient_of(state.params, batch, tables, draft, optimization)
    updates, optimizer_state = optimizer(draft, optimization).update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in jax.tree.leaves(gradients)))
    return DraftTrainState(params, optimizer_state, state.step + 1), StepMetrics(terms, norm)
