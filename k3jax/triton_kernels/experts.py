"""The routed experts as two Triton kernels on the checkpoint's layout, for Hopper and Blackwell.

    rows[p] = w2_e SiTU(w1_e z[t], w3_e z[t])    for every pair (t, rank) with its expert e here;  p = place[t, rank]

`activations="bfloat16"` multiplies bfloat16 by the exact weights, as the reference does. "float8" quantises z, and the
hidden layer as it leaves the first kernel, to MXFP8 (`k3jax.mxfp8`): on Blackwell the tensor cores then take codes and
scales as they are, at the cost of an error of 4.7 % of an expert's output in the norm (3.9 % by z, 2.6 % by the hidden
layer) instead of 0.25 %. Rows are left unsummed, so that what follows can sum them while it reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax import moe, mxfp8
from k3jax.config import K3Config
from k3jax.triton_kernels.launching import Launch, Run, run_on_gpu

Activations = Literal["bfloat16", "float8"]
_MIN_ROWS, _MAX_ROWS = 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonTiles:
    """Work of a thread block of either kernel: `features` of up to `rows` rows, `depth` of the contraction a step."""

    rows: int
    features: int = 128  # of the instruction; half gate and half up in the first kernel
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 4  # steps in flight

    def __post_init__(self) -> None:
        for name, choices in (
            ("rows", (16, 32, 64, 128)),
            ("features", (128, 256)),  # the block-scaled instruction has at least 128
            ("depth", (64, 128, 256)),
            ("num_warps", (4, 8)),
            ("num_stages", (1, 2, 3, 4, 5, 6, 7, 8)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {choices}")


class Visits(NamedTuple):
    """What the kernels read of the routing, int32."""

    tokens: Int[Array, "P"]  # of every row; rows are sorted by expert
    tiles: Int[Array, "3 M"]  # expert, first row, live rows; a dead tile has none
    place: Int[Array, "T k"]  # row of each token's expert of each rank; -1: it is not here, or the token is padding


def tiles_for(num_pairs: int, num_experts: int) -> TritonTiles:
    """Rows: about the mean number that an expert gets. Wide tiles need the registers of eight warps."""
    mean = max(1, -(-num_pairs // num_experts))
    rows = min(_MAX_ROWS, max(_MIN_ROWS, 1 << (mean - 1).bit_length()))
    if rows >= 64:
        return TritonTiles(rows=rows, num_warps=8, num_stages=3)
    return TritonTiles(rows=rows)


def max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Tiles that always suffice, and at least one: each expert's last may be short."""
    return max(1, min(num_pairs, num_experts) + num_pairs // tile)


@functools.partial(jax.jit, static_argnums=(1, 2))
def make_visits(experts: Int[Array, "T k"], num_experts: int, tile: int) -> Visits:
    """Sort rows by expert and cut tiles of `tile` rows. Ids outside [0, num_experts) get none.

    The number of tiles is static; an expert without rows has no tile, and those left over at the end are dead.
    """
    plan = moe.dispatch(experts, num_experts, tile)
    index = jnp.arange(max_tiles(experts.size, num_experts, tile), dtype=jnp.int32)
    expert = jnp.sum(plan.tile_ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    lengths = jnp.diff(plan.starts)
    tiles_before = plan.tile_ends - (lengths + tile - 1) // tile
    first = plan.starts[expert] + (index - tiles_before[expert]) * tile
    live = jnp.clip(plan.starts[expert + 1] - first, 0, tile)
    return Visits(
        tokens=plan.order // experts.shape[1],
        tiles=jnp.stack([expert, first, live]).astype(jnp.int32),
        place=jnp.where(plan.place < plan.starts[-1], plan.place, -1).reshape(experts.shape),
    )


def expert_rows(
    z: Float[Array, "T L"],
    visits: Visits,
    experts: moe.Experts,
    config: K3Config,
    *,
    tiles: TritonTiles,
    layer: int | Int[Array, ""] | None = None,
    activations: Activations = "bfloat16",
    run: Run = run_on_gpu,
) -> Float[Array, "P L"]:
    """The two kernels. float32 accumulation and SiTU; the hidden layer and the result are rounded to z's dtype.

    `experts` are MXFP4 of one layer or, with `layer` (theirs or the argument), of all layers stacked: then one kernel
    serves all layers and no weight is sliced. F may be a rank's slice. `visits` were made for `tiles.rows`.
    """
    (w13, w2, w13_scale, w2_scale), layer = _arrays(experts, layer)
    num_rows, num_tiles = visits.tokens.shape[0], visits.tiles.shape[1]
    num_local, _, inner, half_latent = w13.shape[-4:]
    latent, features = 2 * half_latent, tiles.features
    assert latent % max(tiles.depth, features) == 0, (latent, tiles)
    assert inner % max(tiles.depth, features // 2) == 0, (inner, tiles)
    index = jnp.zeros(1, jnp.int32) if layer is None else jnp.asarray(layer, jnp.int32)[None]
    value, value_scale = mxfp8.encode(z) if activations == "float8" else (z, None)
    scale_shape = jax.ShapeDtypeStruct((num_rows, inner // mxfp8.GROUP), jnp.uint8)
    common = {"tiles_ptr": visits.tiles, "layer_ptr": index}
    sizes = {"NUM_TILES": num_tiles, "EXPERTS": num_local, "M": features, "ROWS": tiles.rows, "DEPTH": tiles.depth}
    betas = {"BETA": config.situ_beta, "LINEAR_BETA": config.situ_linear_beta}
    gated = Launch(
        load=_gated_kernel,
        inputs={
            "x_ptr": value,
            "x_scale_ptr": value_scale,
            "tokens_ptr": visits.tokens,
            **common,
            "weights_ptr": w13,
            "scales_ptr": w13_scale,
        },
        outputs={
            "hidden_ptr": jax.ShapeDtypeStruct((num_rows, inner), value.dtype),
            "hidden_scale_ptr": None if value_scale is None else scale_shape,
        },
        constants={**sizes, **betas, "FEATURES": inner, "CONTRACTION": latent},
        grid=(2 * inner // features, num_tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    hidden = run(gated)
    plain = Launch(
        load=_plain_kernel,
        inputs={
            "x_ptr": hidden["hidden_ptr"],
            "x_scale_ptr": hidden.get("hidden_scale_ptr"),
            **common,
            "weights_ptr": w2,
            "scales_ptr": w2_scale,
        },
        outputs={"out_ptr": jax.ShapeDtypeStruct((num_rows, latent), z.dtype)},
        constants={**sizes, "FEATURES": latent, "CONTRACTION": inner},
        grid=(latent // features, num_tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return run(plain)["out_ptr"]


def _arrays(
    experts: moe.Experts, layer: int | Array | None
) -> tuple[tuple[Array, Array, Array, Array], int | Array | None]:
    """Weights and scales, and which layer of them if they are stacks."""
    layer = experts.layer if layer is None else layer
    if isinstance(experts.w13, tuple):
        experts, layer = experts.alone(), None
    w13, w2, w13_scale, w2_scale, *_ = experts
    assert w13_scale is not None and w2_scale is not None, "the kernels are for MXFP4 weights"
    assert not (isinstance(w13, tuple) or isinstance(w2, tuple)), "layers are stacked or apart, not both"
    assert not (isinstance(w13_scale, tuple) or isinstance(w2_scale, tuple)), "layers are stacked or apart, not both"
    return (w13, w2, w13_scale, w2_scale), layer


def _gated_kernel():
    from k3jax.triton_kernels import expert_kernels

    return expert_kernels.gated_kernel


def _plain_kernel():
    from k3jax.triton_kernels import expert_kernels

    return expert_kernels.plain_kernel


def routed_expert_rows(
    z: Float[Array, "T L"],
    routing: moe.Routing,
    experts: moe.Experts,
    config: K3Config,
    first_expert: int | Array = 0,
    *,
    layer: int | Int[Array, ""] | None = None,
    activations: Activations = "bfloat16",
    tiles: TritonTiles | None = None,
    run: Run = run_on_gpu,
) -> moe.ExpertRows:
    """Outputs of every chosen expert that is here, with their places. Padding has expert ids < 0. See `expert_rows`."""
    tiles = tiles or tiles_for(routing.experts.size, config.num_experts)
    num_local = _arrays(experts, layer)[0][0].shape[-4]
    visits = make_visits(routing.experts - first_expert, num_local, tiles.rows)
    rows = expert_rows(z, visits, experts, config, layer=layer, activations=activations, tiles=tiles, run=run)
    return moe.ExpertRows(rows, visits.place)


def supported(
    config: K3Config,
    dtype,
    platform: str,
    compute_capability: float,
    inner: int,
    is_mxfp4: bool = True,
    activations: Activations = "bfloat16",
) -> str | None:
    """Why the kernels cannot run, or None. `inner` is the expert width of one rank."""
    latent, tiles = config.routed_expert_hidden_size, TritonTiles(rows=_MIN_ROWS)
    if platform != "gpu":
        return f"Triton kernels need a GPU, not {platform}"
    if not 9 <= compute_capability < 11:
        return f"the kernels cover compute capabilities 9.x and 10.x, this device has {compute_capability}"
    if activations == "float8" and compute_capability < 10:
        return (
            "block-scaled products need compute capability 10.x; Hopper would unpack E4M3 and lose accuracy for nothing"
        )
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"activations are {jnp.dtype(dtype).name}, the kernels cover bfloat16"
    if not is_mxfp4:
        return "the experts are not in MXFP4"
    for name, width in (("the latent width", latent), ("an expert's width on this rank", inner)):
        if width % max(tiles.depth, tiles.features):
            return f"{name}, {width}, is no multiple of {max(tiles.depth, tiles.features)}"
    return _missing_package()


def _missing_package() -> str | None:
    import importlib.util

    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None
