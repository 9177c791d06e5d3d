"""KDA verify: up to 16 tokens a row from a state that is only read, with records for the commit.

With G_t the running sum of the log decays, S_0 the slot's state and normalised k, q (q scaled by 1 / sqrt(K)):

    u_t = b_t (v_t - S_0 (k_t e^{G_t}) - sum_{j<t} A_tj u_j),   A_tj = (k_t e^{G_t}) . (k_j e^{-G_j})
    o_t = S_0 (q_t e^{G_t}) + sum_{j<=t} B_tj u_j,              B_tj = (q_t e^{G_t}) . (k_j e^{-G_j})

So the state meets every token only in one product of 128 x 128 with 32 vectors, on tensor cores: state and vectors are
split into two bfloat16 each, and the three larger of the four products added in float32. That errs by 1e-6. Where keys
repeat, the sum over j amplifies an error of A but not one of the state's products, so A and B are float32 throughout.
Gates of at least -5 keep e^{G} and e^{-G} within 1e+-35 over 16 tokens. The state is read once and never written.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from k3jax import kda, replay
from k3jax.cache import Pools
from k3jax.config import K3Config
from k3jax.pallas import kda_decode, requirements
from k3jax.pallas.kda_decode import StackedParams, Token
from k3jax.pallas.kda_verify_block import MAX_TOKENS, VerifyTiles, verify_kernel
from k3jax.pallas.tensor_cores import Generation
from k3jax.replay import Records

__all__ = ["MAX_TOKENS", "VerifyTiles", "kda_verify_pallas", "kda_verify_reference", "supported", "tiles_for"]

_MULTIPROCESSORS = 132  # of an H200: so many heads have one each


def tiles_for(heads: int, generation: Generation = "hopper") -> VerifyTiles:
    """Tiles for `heads` heads of all rows together: two share a multiprocessor only where they have to.

    A head alone computes the scores of nine tokens side by side, because nothing else fills the waits between them.
    """
    if heads <= _MULTIPROCESSORS or generation == "blackwell":
        return VerifyTiles(warpgroups_per_head=4, lanes_per_row=8, tokens_per_step=9, generation=generation)
    return VerifyTiles(warpgroups_per_head=2, lanes_per_row=8, tokens_per_step=3)


def kda_verify_reference(
    layer: int,
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    pools: Pools,
    records: Records,
    config: K3Config,
) -> tuple[Float[Array, "N W"], Records]:
    """`replay.verify` on the stacked arguments, for any float dtype."""
    one = {name: x[layer] for name, x in zip(("conv", "a_log", "dt_bias", "out_norm"), params, strict=True)}
    packed, decay, beta = token
    projected = kda.Projected(packed[:, :3], packed[:, 3], kda.split_heads(decay, config), beta)
    return replay.verify(one, projected, pools, records, layer, cu_seqlens, slots, config)


def kda_verify_pallas(
    indices: Int[Array, "2"],
    cu_seqlens: Int[Array, "R+1"],
    slots: Int[Array, "R"],
    token: Token,
    params: StackedParams,
    state_pool: Float[Array, "L S H V K"],
    conv_pool: Array,
    records: Records,
    out: Float[Array, "N W"],
    config: K3Config,
    *,
    tiles: VerifyTiles | None = None,
    interpret=None,
    clocks: Array | None = None,
) -> tuple[Float[Array, "N W"], Records]:
    """Outputs of the rows' tokens, written into `out` in place, and their records.

    Tokens that belong to no row and records behind a row's tokens keep what they held. A row holds at most as many
    tokens as the records: this is not checked. A benchmark gives `clocks`, int32 [R, blocks of a row, 4, STAMPS], to
    be written in place when the warpgroups reach the stamps.
    """
    bound = config.gate_lower_bound
    assert bound is not None, "supported() refuses the softplus gate"
    rows, heads, tokens = slots.shape[0], state_pool.shape[2], records.pseudo.shape[2]
    tiles = tiles or tiles_for(rows * heads)
    is_stamped = clocks is not None
    kernel = verify_kernel(
        rows, heads, tokens, token.packed.dtype, tiles, config.rms_norm_eps, bound, interpret, is_stamped
    )
    refs = [jax.new_ref(x) for x in (*records, out, *([clocks] if is_stamped else []))]
    kernel(indices, cu_seqlens, slots, *token, *params, state_pool, conv_pool, *refs)
    *written, outputs = (jax.freeze(ref) for ref in refs[: len(records) + 1])
    return outputs, Records(*written)


def supported(config: K3Config, dtype, platform: str, compute_capability: float, tokens: int) -> str | None:
    """Why the kernel cannot run for rows of up to `tokens` tokens, or None."""
    if tokens > MAX_TOKENS:
        return f"rows have up to {tokens} tokens, the kernel covers {MAX_TOKENS}"
    if reason := requirements.refusal(dtype, platform, compute_capability, uses_tensor_cores=True):
        return reason
    return kda_decode.supported(config, dtype, platform, compute_capability)
