"""Router and experts on the MoE layers of the golden checkpoint, each fed what the published code fed it.

The checkpoint is too narrow for the kernels, so it is widened by zeros, which change no number: latent and inner width
to the kernels' multiples, and experts that a bias keeps from being chosen. The hidden rows are rounded to bfloat16, so
the ids have to be those of float64 on the rounded rows, and the published ones wherever their margin is not rounding.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from k3jax import loading, moe
from k3jax.config import K3Config
from k3jax.layers import linear
from k3jax.pallas import expert_ops, moe_tail, router
from k3jax.pallas.expert_cases import BF16, ExpertCase, ExpertInputs, ExpertVerdict, judge
from k3jax.pallas.expert_ops import ExpertTiles
from k3jax.pallas.kda_decode_cases import sigmoid
from k3jax.pallas.moe_tail import TailTiles
from k3jax.pallas.router import RouterTiles

TINY8 = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny8_mxfp4"
EXPERTS, LATENT, INNER = 128, 256, 128  # as the kernels take them
FEW = 9  # tokens
NEVER = -1e4  # a bias with which no expert is chosen
INPUT_ROUNDING = 2e-3  # of a score: hidden rows in bfloat16 may swap experts that are closer
SUM_LIMIT = 6e-3  # against the published sums, of rows in float32: on the reference it is 4.1e-3 to 4.3e-3
TAIL = TailTiles(warpgroups=1, vector=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenLayer:
    """One MoE layer of the checkpoint and what the published code computed in it, numpy, not widened."""

    number: int  # of the model, from 0
    hidden: np.ndarray  # [T, D] float32, behind the layer's norm
    ids: np.ndarray  # [T, k] ascending
    weights: np.ndarray  # [T, k], by ascending id
    margin: np.ndarray  # [T] between the last score chosen and the first left out
    combined: np.ndarray  # [T, L] weighted sums
    params: dict[str, np.ndarray]  # by name, in float32; experts in MXFP4


def golden_layers() -> tuple[K3Config, list[GoldenLayer]]:
    """All MoE layers."""
    config = K3Config.from_file(TINY8)
    params = jax.device_get(loading.load_params(TINY8, config, jnp.float32)["moe"])
    golden = load_file(TINY8 / "golden.safetensors")
    numbers = [layer for layer in range(config.num_hidden_layers) if config.ffn(layer) == "moe"]
    return config, [
        GoldenLayer(
            number=layer,
            hidden=golden[f"layers.{layer}.ffn.in"][0],
            ids=golden[f"layers.{layer}.router.topk_idx_sorted"],
            weights=golden[f"layers.{layer}.router.topk_weight_sorted_by_idx"],
            margin=golden[f"layers.{layer}.router.margin"],
            combined=golden[f"layers.{layer}.moe.latent_combined_prenorm"],
            params={name: stack[place] for name, stack in params.items()},
        )
        for place, layer in enumerate(numbers)
    ]


def route(hidden: np.ndarray, layer: GoldenLayer, num_chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids by falling score and weights in float64."""
    scores = sigmoid(hidden.astype(np.float64) @ layer.params["router"].astype(np.float64).T)
    ids = np.argsort(-(scores + layer.params["router_bias"]), axis=1, kind="stable")[:, :num_chosen]
    chosen = np.take_along_axis(scores, ids, axis=1)
    return ids, chosen / chosen.sum(axis=1, keepdims=True)


def widened(config: K3Config) -> K3Config:
    """The configuration with the widths that the kernels take."""
    return dataclasses.replace(
        config, num_experts=EXPERTS, routed_expert_hidden_size=LATENT, moe_intermediate_size=INNER
    )


def inputs_of(layer: GoldenLayer, z: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> ExpertInputs:
    """A case of the expert kernels: the layer's experts, widened, and rows z [T, LATENT] with their choice."""
    packed = {name: layer.params[name] for name in ("w13_packed", "w13_scale", "w2_packed", "w2_scale")}
    sizes = {
        "w13_packed": (2, INNER, LATENT // 2),
        "w13_scale": (2, INNER, LATENT // 32),
        "w2_packed": (LATENT, INNER // 2),
        "w2_scale": (LATENT, INNER // 32),
    }
    w13, w13_scale, w2, w2_scale = (_zeros_behind(packed[name], sizes[name])[None] for name in sizes)
    num_experts = w13.shape[1]
    case = ExpertCase(
        name=f"golden layer {layer.number}",
        tokens=len(z),
        k=ids.shape[1],
        experts=num_experts,
        total=EXPERTS,
        latent=LATENT,
        inner=INNER,
    )
    return ExpertInputs(
        case=case,
        layer=0,
        z=z,
        experts=ids.astype(np.int32),
        weights=weights.astype(np.float32),
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
    )


def _zeros_behind(array: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """[E, ...] with the trailing axes filled up to `sizes`; zero codes are zero weights under any scale."""
    return np.pad(array, [(0, 0), *((0, size - old) for size, old in zip(sizes, array.shape[1:], strict=True))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenVerdict:
    """What a run of a layer showed."""

    wrong_ids: int  # tokens with other experts than in float64 on the same rows
    unpublished_ids: int  # tokens with other experts than the published ones although the margin is no rounding
    weight_error: float
    published_sum_error: float  # relative in the norm, tokens with the published experts
    experts: ExpertVerdict

    @property
    def passed(self) -> bool:
        close = self.weight_error <= 1e-5 and self.published_sum_error <= SUM_LIMIT
        return not self.wrong_ids and not self.unpublished_ids and close and self.experts.passed


def run_kernels(
    config: K3Config,
    layer: GoldenLayer,
    tokens: int,
    *,
    router_tiles: RouterTiles | None = None,
    expert_tiles: ExpertTiles | None = None,
    interpret=None,
) -> GoldenVerdict:
    """The first `tokens` tokens of a layer through router, expert and tail kernels."""
    hidden = layer.hidden[:tokens].astype(BF16)
    rows = np.zeros((1, EXPERTS, hidden.shape[1]), BF16)
    bias = np.full((1, EXPERTS), NEVER, np.float32)
    rows[0, : config.num_experts], bias[0, : config.num_experts] = layer.params["router"], layer.params["router_bias"]
    z = np.zeros((tokens, LATENT), BF16)
    latents = linear(jnp.asarray(hidden), jnp.asarray(layer.params["latent_down"], jnp.bfloat16))
    z[:, : latents.shape[1]] = latents
    blank = np.zeros((tokens, config.num_experts_per_token))
    drawn = inputs_of(layer, z, blank, blank)
    wide = widened(config)
    packed = moe.Experts(*(jnp.asarray(x[0]) for x in (drawn.w13, drawn.w2, drawn.w13_scale, drawn.w2_scale)))

    @jax.jit
    def run(hidden, z, stacks, packed):
        first = jnp.zeros(1, jnp.int32)
        routing = router.route_pallas(first, hidden, None, stacks, wide, tiles=router_tiles, interpret=interpret)
        experts = expert_ops.repack(packed)
        outputs = expert_ops.routed_expert_rows(z, routing, experts, wide, tiles=expert_tiles, interpret=interpret)
        arrays = outputs.rows, outputs.place, routing.weights
        sums = moe_tail.tail_pallas(first, *arrays, None, 0.0, tiles=TAIL, interpret=interpret)
        return routing, outputs, sums

    stacks = router.RouterStacks(jnp.asarray(rows), jnp.asarray(bias))
    routing, outputs, sums = jax.device_get(run(jnp.asarray(hidden), jnp.asarray(z), stacks, packed))
    return verdict_of(config, layer, drawn, hidden, (routing, outputs, sums))


def verdict_of(config: K3Config, layer: GoldenLayer, drawn: ExpertInputs, hidden, results) -> GoldenVerdict:
    """Compare (routing, expert rows, sums) with float64 on the same rows and with the published numbers."""
    routing, outputs, sums = results
    tokens, ids = len(hidden), np.asarray(routing.experts)
    exact_ids, exact_weights = route(hidden, layer, config.num_experts_per_token)
    is_published = np.all(np.sort(ids, axis=1) == layer.ids[:tokens], axis=1)
    drawn = dataclasses.replace(drawn, experts=ids, weights=np.asarray(routing.weights))
    latents = layer.combined.shape[1]
    published, got = layer.combined[:tokens][is_published], np.asarray(sums)[is_published, :latents]
    betas = {"beta": config.situ_beta, "linear_beta": config.situ_linear_beta}
    return GoldenVerdict(
        wrong_ids=int(np.sum(np.any(ids != exact_ids, axis=1))),
        unpublished_ids=int(np.sum(~is_published & (layer.margin[:tokens] > INPUT_ROUNDING))),
        weight_error=float(np.max(np.abs(routing.weights - exact_weights))),
        published_sum_error=float(np.linalg.norm(got - published) / np.linalg.norm(published)),
        experts=judge(drawn, np.asarray(outputs.rows), np.asarray(outputs.place), np.asarray(sums), **betas),
    )


def check_golden_moe(only_small: bool = False) -> bool:
    """Every MoE layer, all of its tokens, or `FEW` of the first layer; a line for each."""
    config, layers = golden_layers()
    passed = []
    for layer in layers[:1] if only_small else layers:
        verdict = run_kernels(config, layer, FEW if only_small else len(layer.hidden))
        passed.append(verdict.passed)
        print(f"golden layer {layer.number}: {'ok' if verdict.passed else 'FAILED'} {verdict}", flush=True)
    return all(passed)
