"""Training maths: state, optimiser, loss, the jitted run of several steps. `k3jax.train` has the clock and the files.

The master weights are float32, one leaf per layer (gradients through slices of a stack are slow). Each step casts them
to the compute dtype exactly as the export does, the routed experts through the MXFP4 grid first, so that what was
trained is what is served. The router's selection bias has no gradient; after every step it moves against the load
error's sign.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from k3jax import mxfp4
from k3jax.config import K3Config
from k3jax.layers import wide_dtype
from k3jax.params import ParamSpec, Tree, abstract, flatten, init, map_tree
from k3jax.train_forward import check_trainable, forward
from k3jax.train_run import AdamSettings

QUANTIZED = ("w13", "w2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization(AdamSettings):
    """What one optimiser step does. The learning rate comes from outside, step by step."""

    batch_rows: int = 32
    weight_decay: float = 0.1
    router_bias_rate: float = 1e-3
    quantize_experts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows={self.batch_rows} must be at least 1. Ask for a positive number of rows.")
        if self.router_bias_rate < 0:
            raise ValueError(f"router_bias_rate={self.router_bias_rate} must not be negative. Use 0 to switch it off.")


class Rows(NamedTuple):
    """Packed rows. `counts[r, t]` marks positions whose next token is trained on; segment 0 is padding."""

    tokens: Int[Array | np.ndarray, "R T"]
    segments: Int[Array | np.ndarray, "R T"]
    counts: Bool[Array | np.ndarray, "R T"]


class TrainState(NamedTuple):
    """Everything a step changes; `params` is the parameter tree with a tuple of layers for every stack."""

    params: Tree
    optimizer: Any
    step: Int[Array, ""]


class Metrics(NamedTuple):
    """Of one step: mean loss and next-token accuracy over the trained tokens, gradient norm before clipping, the most
    loaded expert relative to the mean over all layers, and the number of tokens that are not padding."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    max_load: Float[Array, ""]
    tokens: Float[Array, ""]


def unstack(tree: Tree) -> Tree:
    """A tuple of layers for every stack (what lies in a group with a layer axis)."""
    return map_tree(lambda path, leaf: tuple(leaf) if len(path) > 1 and path[0] != "out_res" else leaf, tree)


def initial_params(config: K3Config, seed: int) -> Tree:
    """Random float32 stacks: linear weights with standard deviation fan_in^-1/2, so that blocks start at unit scale.

    The embedding starts at one half, as large as the updates that the depth mixes weigh it against; those mixes start
    nearly even, and the forget gates near their constants, which spread the memory over short and long ranges.
    """
    tree = abstract(config, "bf16")
    specs = dict(flatten(tree))

    def rescale(path: tuple[str, ...], value: Array) -> Array:
        if specs[path].init != "normal":
            return value
        if path[-1].endswith("proj"):
            return value * config.initializer_range
        scale = value.shape[-1] ** -0.5
        return value * {"embed": 0.5, "decay_b": 0.1 * scale}.get(path[-1], scale)

    return map_tree(rescale, init(tree, jax.random.key(seed), jnp.float32, 1.0))


def initial_state(config: K3Config, optimization: Optimization, seed: int) -> TrainState:
    """Fresh state on the default device. Raises `ConfigError` where `train_forward` cannot train the model."""
    check_trainable(config)
    params = unstack(jax.jit(initial_params, static_argnums=(0, 1))(config, seed))
    return TrainState(params, optimizer(config, optimization).init(params), jnp.zeros((), jnp.int32))


def optimizer(config: K3Config, optimization: Optimization) -> optax.GradientTransformation:
    """Clipped Adam with decoupled decay of matrices: not of norms, gates' constants, convolutions or the embedding."""
    specs = abstract(config, "bf16")

    def decays(path: tuple[str, ...], spec: ParamSpec) -> Any:
        stacked = spec.axes[0] == "layers"
        axes = len(spec.shape) - (1 if stacked else 0)
        matrix = spec.kind == "weight" and axes >= 2 and path[-1] != "embed"
        return tuple([matrix] * spec.shape[0]) if stacked else matrix

    adam = optax.scale_by_adam(b1=optimization.beta1, b2=optimization.beta2, eps=optimization.epsilon)
    return optax.chain(
        # As one vector: hundreds of small leaves would cost a kernel and much compile time each.
        optax.flatten(optax.chain(optax.clip_by_global_norm(optimization.clip_norm), adam)),
        optax.add_decayed_weights(optimization.weight_decay, mask=map_tree(decays, specs)),
    )


def compute_params(params: Tree, config: K3Config, optimization: Optimization) -> Tree:
    """The weights that the forward pass sees: cast as on export, experts on the MXFP4 grid, the embedding left wide."""
    dtype = jnp.dtype(optimization.compute_dtype)
    specs = dict(flatten(abstract(config, "bf16")))

    def cast(path: tuple[str, ...], leaf: Any) -> Any:
        def one(x):
            if path[-1] in QUANTIZED and optimization.quantize_experts:
                x = mxfp4.fake_quantize(x)
            return x.astype(wide_dtype(dtype) if path[-1] == "embed" else specs[path].dtype(dtype))

        return tuple(map(one, leaf)) if isinstance(leaf, tuple) else one(leaf)

    return map_tree(cast, params)


def loss(
    params: Tree, rows: Rows, config: K3Config, optimization: Optimization
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, "M E"]]]:
    """Mean cross entropy over the counted tokens; also next-token accuracy and expert loads."""
    tokens, segments = jnp.asarray(rows.tokens, jnp.int32), jnp.asarray(rows.segments, jnp.int32)
    out = forward(compute_params(params, config, optimization), config, tokens, segments, remat=optimization.remat)
    targets = jnp.roll(tokens, -1, axis=1)
    weights = jnp.asarray(rows.counts, out.logits.dtype)
    total = jnp.maximum(jnp.sum(weights), 1)
    entropy = optax.softmax_cross_entropy_with_integer_labels(out.logits, targets)
    right = jnp.argmax(out.logits, axis=-1) == targets
    return jnp.sum(entropy * weights) / total, (jnp.sum(right * weights) / total, out.loads)


def train_step(
    state: TrainState, rows: Rows, learning_rate: Float[Array, ""], config: K3Config, optimization: Optimization
) -> tuple[TrainState, Metrics]:
    """One optimiser step on one batch."""
    gradient_of = jax.value_and_grad(functools.partial(loss, config=config, optimization=optimization), has_aux=True)
    (value, (accuracy, loads)), gradients = gradient_of(state.params, rows)
    updates, optimizer_state = optimizer(config, optimization).update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
    mean = jnp.mean(loads, axis=-1, keepdims=True)
    if loads.shape[0]:
        change = optimization.router_bias_rate * jnp.sign(mean - loads)
        biases = tuple(b + c for b, c in zip(params["moe"]["router_bias"], change, strict=True))
        params = params | {"moe": params["moe"] | {"router_bias": biases}}
    metrics = Metrics(
        value,
        accuracy,
        jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))),
        jnp.max(loads / jnp.maximum(mean, 1), initial=0.0),
        jnp.sum(rows.segments != 0).astype(jnp.float32),
    )
    return TrainState(params, optimizer_state, state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("config", "optimization"), donate_argnames="state")
def run_steps(
    state: TrainState,
    data: Rows,
    indices: Int[Array, "N B"],
    learning_rates: Float[Array, "N"],
    *,
    config: K3Config,
    optimization: Optimization,
) -> tuple[TrainState, Metrics]:
    """As many steps as there are learning rates, in one dispatch; `indices` select the rows of each batch.

    `state` is donated.
    """

    def step(state, batch):
        chosen, learning_rate = batch
        rows = Rows(*(x[chosen] for x in data))
        return train_step(state, rows, learning_rate, config, optimization)

    return jax.lax.scan(step, state, (indices, learning_rates))
