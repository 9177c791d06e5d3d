"""The model as thin Flax NNX modules for research: they own the stacked parameters, the maths is in the pure functions.

Serving works on the plain tree of arrays (`K3.params()`) and never imports this file, nor Flax: that is seconds of
start-up.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax import kda, mla, moe
from k3jax.config import K3Config
from k3jax.layers import linear, situ_mlp
from k3jax.model import forward
from k3jax.params import Tree, abstract, init
from k3jax.sharding.collectives import SINGLE


class ParamStack(nnx.Module):
    """Owns the stacked parameters of one kind of block."""

    def __init__(self, config: K3Config, arrays: Tree):
        self.config = config
        for name, value in arrays.items():
            setattr(self, name, nnx.Param(value))

    def params(self) -> Tree:
        """The stacked arrays by name."""
        return {name: value.get_value() for name, value in vars(self).items() if isinstance(value, nnx.Param)}

    def layer(self, index: int) -> Tree:
        """One layer's arrays."""
        return {name: value[index] for name, value in self.params().items()}


class KDA(ParamStack):
    """All KDA layers of a model; `kda(x, layer)` runs layer number `layer` of the stack on [B, T, D]."""

    def __call__(self, x: Float[Array, "B T D"], layer: int, segment_ids=None) -> Float[Array, "B T D"]:
        params = self.layer(layer)
        return linear(kda.mixer(params, x, self.config, segment_ids), params["out"])


class MLA(ParamStack):
    """All MLA layers of a model; `mla(x, layer)` runs layer number `layer` of the stack on [B, T, D]."""

    def __call__(self, x: Float[Array, "B T D"], layer: int, segment_ids=None) -> Float[Array, "B T D"]:
        params = self.layer(layer)
        projected = mla.project(params, x, self.config)
        return linear(mla.attend(projected, params["kv_b"], self.config, segment_ids), params["out"])


class LatentMoE(ParamStack):
    """All LatentMoE layers of a model; `moe(x, layer)` runs layer number `layer` of the stack on [B, T, D]."""

    def __call__(self, x: Float[Array, "B T D"], layer: int) -> Float[Array, "B T D"]:
        flat = x.reshape(-1, x.shape[-1])
        out = moe.feed_forward(self.layer(layer), flat, self.config, SINGLE, None, moe.routed_experts_batched)
        return out.reshape(x.shape)


class Dense(ParamStack):
    """The leading dense layers' feed-forward."""

    def __call__(self, x: Float[Array, "B T D"], layer: int) -> Float[Array, "B T D"]:
        params = self.layer(layer)
        return situ_mlp(x, params["gate_up"], params["down"], self.config.situ_beta, self.config.situ_linear_beta)


_GROUPS: dict[str, type[ParamStack]] = {
    "block": ParamStack,
    "out_res": ParamStack,
    "kda": KDA,
    "mla": MLA,
    "dense": Dense,
    "moe": LatentMoE,
}


class K3(nnx.Module):
    """The model as a Flax module: `K3(config, rngs=nnx.Rngs(0))(token_ids)` gives logits; `params()` the pure tree."""

    def __init__(
        self, config: K3Config, *, params: Tree | None = None, rngs: nnx.Rngs | None = None, dtype=jnp.float32
    ):
        if params is None:
            if rngs is None:
                raise ValueError("pass params=, or rngs= to draw random ones")
            params = init(abstract(config, "bf16"), rngs.params(), dtype, config.initializer_range)
        self.config = config
        for name, value in params.items():
            setattr(self, name, _GROUPS[name](config, value) if isinstance(value, dict) else nnx.Param(value))

    def params(self) -> Tree:
        """The nested dict of arrays that every pure function takes."""
        groups = {k: v for k, v in vars(self).items() if isinstance(v, nnx.Param | ParamStack)}
        return {k: v.params() if isinstance(v, ParamStack) else v.get_value() for k, v in groups.items()}

    def __call__(
        self, token_ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T X"]:
        return forward(self.params(), self.config, token_ids, segment_ids)
