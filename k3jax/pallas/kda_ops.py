"""The KDA kernels behind the signatures of the serving step's ops, so that dispatch can put them in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import kda
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas import kda_commit, kda_verify
from k3jax.pallas.kda_channels import HEAD_DIM
from k3jax.pallas.kda_decode import StackedParams, Token, decode
from k3jax.pallas.kda_prefill_op import prefill
from k3jax.pallas.tensor_cores import Generation
from k3jax.replay import Committed, Records

__all__ = ["commit", "decode", "prefill", "verify"]


def verify(
    params: dict,
    projected: kda.Projected,
    pools: Pools,
    records: Records,
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    out: Float[Array, "N W"],
    config: K3Config,
    *,
    generation: Generation = "hopper",
) -> tuple[Float[Array, "N W"], Records]:
    """`replay_serving.verify` on the kernel. Rows with slot 0 and tokens get zeros instead of keeping `out`."""
    rows, tokens = slots.shape[0], records.pseudo.shape[2]
    # Rows are packed from the front: behind so many tokens only chunks can follow.
    lanes = kda.Projected(*(x[: rows * tokens] for x in projected))
    token = Token(
        jnp.concatenate([lanes.qkv, lanes.gate[:, None]], axis=1),
        lanes.decay.reshape(rows * tokens, -1),
        lanes.beta,
    )
    assert token.decay.shape[1] % HEAD_DIM == 0, token.decay.shape
    stacked = StackedParams(*(params[name][None] for name in ("conv", "a_log", "dt_bias", "out_norm")))
    indices = jnp.array([layer, 0], jnp.int32)
    tiles = kda_verify.tiles_for(rows * pools.kda.shape[2], generation)
    return kda_verify.kda_verify_pallas(
        indices, cu_seqlens, slots, token, stacked, pools.kda, pools.conv, records, out, config, tiles=tiles
    )


def commit(params: dict, records: Records, pools: Pools, chosen: Committed, config: K3Config) -> Pools:
    """`replay_serving.commit` on the kernel: all layers in one launch."""
    a_log, dt_bias = (jnp.stack(list(params[name])) for name in ("a_log", "dt_bias"))
    state_pool, conv_pool = kda_commit.kda_commit_pallas(a_log, dt_bias, records, pools.kda, pools.conv, chosen, config)
    return pools._replace(kda=state_pool, conv=conv_pool)
