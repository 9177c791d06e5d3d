"""Executors with one set of weights and different ways to draft."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from slice_bench.slice_model import DEGREE, random_weights, slice_config

from k3jax import cache, draft_params, loading, params
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig
from k3jax.draft_loading import load_draft, open_draft
from k3jax.draft_rope import Rope
from k3jax.draft_state import AcceptanceRule, Drafting, Rollback
from k3jax.pallas import dispatch, expert_load
from k3jax.params import Tree
from k3jax.programs import StepProgram
from k3jax.sharding.mesh import make_mesh, parallel_of
from serving import executor_plan
from serving.executor import DeviceExecutor
from serving.executor_limits import limits_of
from serving.launch import DEMO_DRAFT_FOLDER, DEMO_FOLDER

PAGES_PER_ROW = 16
MAX_STEP_TOKENS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A model, and the drafts that can be put beside it by name."""

    name: str
    config: K3Config
    tree: Tree
    weights: Tree
    dtype: Any
    drafts: dict[str, tuple[DraftConfig, Tree]]
    kernels: dispatch.Kernels

    def situation(self, device: jax.Device) -> dispatch.Situation:
        """What the choice of kernels depends on."""
        return dispatch.Situation.on(
            device, config=self.config, dtype=self.dtype, has_mxfp4_experts="w13_packed" in self.tree["moe"]
        )

    def arranged(self) -> Target:
        """The same with experts as their kernels read them, if these were chosen; consumes the weights."""
        mesh = make_mesh()
        ops, _ = dispatch.choose(self.situation(mesh.devices.flat[0]), self.kernels)
        if not dispatch.wants_repacked_experts(ops):
            return self
        weights = expert_load.repack(self.tree, self.weights, mesh, parallel_of(mesh))
        return dataclasses.replace(self, tree=expert_load.repacked_tree(self.tree), weights=weights)


def demo(dtype: Any, kernels: dispatch.Kernels = "auto") -> Target:
    """The demo with its trained draft, and one of the same shape with random weights."""
    config = K3Config.from_file(DEMO_FOLDER)
    checkpoint = open_checkpoint(DEMO_FOLDER)
    folder = open_draft(DEMO_DRAFT_FOLDER, config)
    mesh = make_mesh()
    return Target(
        name="demo",
        config=config,
        tree=params.abstract(config, loading.expert_format(checkpoint)),
        weights=loading.fill(checkpoint, config, dtype, mesh, parallel_of(mesh)),
        dtype=dtype,
        drafts={
            "trained": (folder.config, load_draft(folder, dtype)),
            "random": (folder.config, _random_draft(folder.config, dtype)),
        },
        kernels=kernels,
    ).arranged()


def rank_slice(layers: int, dtype: Any, kernels: dispatch.Kernels = "auto") -> Target:
    """K3's widths on one rank of eight, with a random draft of the first published shape, divided likewise."""
    config = slice_config(layers)
    tree = params.abstract(config)
    draft = published_draft(config, divided_by=DEGREE)
    weights = random_weights(config, tree, dtype)
    drafts = {"random": (draft, _random_draft(draft, dtype))}
    return Target(
        name=f"slice of {layers}",
        config=config,
        tree=tree,
        weights=weights,
        dtype=dtype,
        drafts=drafts,
        kernels=kernels,
    ).arranged()


def published_draft(target: K3Config, divided_by: int = 1) -> DraftConfig:
    """The first published draft (5 layers, 64 query and 16 KV heads of 64) for `target`, or one rank's share of it."""
    return DraftConfig(
        attention="gqa",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=5,
        intermediate_size=14336 // divided_by,
        num_attention_heads=64 // divided_by,
        num_key_value_heads=16 // divided_by,
        head_dim=64,
        taps=tuple(sorted({number * target.num_hidden_layers // 5 for number in range(5)})),
        stream="attn_res",
        target_hidden_size=target.hidden_size,
        block_size=7,
        mask_token_id=target.vocab_size - 1,
        causal=False,
        rope=Rope(theta=1e4, pairs="half"),
        rms_norm_eps=1e-5,
        max_position_embeddings=target.max_position_embeddings,
        markov_rank=256,
    )


def build(
    target: Target,
    draft: str | None,
    *,
    rows: int,
    tokens: int | None = None,
    rollback: Rollback = "replay",
    rule: AcceptanceRule = "standard",
    max_step_tokens: int = MAX_STEP_TOKENS,
    programs: pathlib.Path | None = None,
) -> DeviceExecutor:
    """An executor with one row bucket. Without `tokens` the draft's whole block is verified. `programs` is a folder
    that keeps what is compiled."""
    tree, weights, drafting = target.tree, target.weights, None
    if draft is not None:
        config, drawn = target.drafts[draft]
        tree = tree | {"draft": draft_params.abstract_draft(config)}
        weights = weights | {"draft": drawn}
        drafting = Drafting(config=config, tokens=tokens or config.block_size, rollback=rollback, rule=rule)
    mesh = make_mesh()
    shape = cache.CacheShape(
        num_rows=rows, num_pages=rows * PAGES_PER_ROW + 1, num_slots=2 * rows + 1, pages_per_row=PAGES_PER_ROW
    )
    device = mesh.devices.flat[0]
    situation = dataclasses.replace(
        target.situation(device),
        drafts=drafting.tokens if drafting else None,
        draft=drafting.config if drafting else None,
        rollback=rollback,
    )
    ops, choices = dispatch.choose(situation, target.kernels)
    program = StepProgram(
        config=target.config,
        cache_shape=shape,
        tree=tree,
        dtype=target.dtype,
        mesh=mesh,
        parallel=parallel_of(mesh),
        ops=ops,
        drafting=drafting,
        unstacked=device.platform == "cpu",
    )
    limits = limits_of(program, max_step_tokens=max_step_tokens, identity=f"bench {target.name} {draft} {rollback}")
    shapes = [shape for shape in executor_plan.buckets_for(program, rows, max_step_tokens) if shape.rows == rows]
    return DeviceExecutor(program, weights, limits, kernels=choices, shapes=shapes, cache=programs)


def _random_draft(config: DraftConfig, dtype: Any) -> Tree:
    tree = draft_params.abstract_draft(config)
    return jax.jit(lambda key: params.init(tree, key, jnp.dtype(dtype)))(jax.random.key(0))
