"""Which implementation runs each op: chosen once, at start-up, with the reason. The XLA reference always works.

An op is a plain callable with the signature of its reference, so kernels plug in without touching the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from k3jax import (
    attn_res,
    branches,
    draft_block,
    kda_serving,
    mla_serving,
    mla_verify,
    moe,
    replay_serving,
    sampling,
    snapshot,
)
from k3jax.config import K3Config
from k3jax.draft_config import DraftConfig
from k3jax.pallas import attn_res as attn_res_kernel
from k3jax.pallas import (
    draft_attend,
    expert_ops,
    kda_decode,
    kda_ops,
    kda_prefill_op,
    kda_verify,
    mla_decode,
    mla_ops,
    moe_tail,
    requirements,
    router,
    slot_copy,
    tensor_cores,
    top_tokens,
)
from k3jax.pallas import sampling as sampling_kernel

Kernels = Literal["auto", "xla", "pallas"]
MoeFinalize = Literal["deferred", "separate"]
KERNELS: dict[str, Callable] = {
    "copy_slots": slot_copy.copy_slots,
    "kda_decode": kda_ops.decode,
    "kda_prefill": kda_ops.prefill,
    "kda_verify": kda_ops.verify,
    "kda_commit": kda_ops.commit,
    "mla_decode": mla_ops.decode,
    "mla_verify": mla_ops.verify,
    "depth_mix": attn_res_kernel.mix_and_norm,
    "route": router.route_live,
    "routed_experts": expert_ops.routed_expert_rows,
    "finish_rows": moe_tail.finish_rows,
    "draft_attend": draft_attend.attend_context,
    "keep_threshold": sampling_kernel.keep_threshold,
    "logprobs": top_tokens.logprobs,
}
# On Blackwell in the place of those above: the same kernels with its tensor cores' products. None has run on one.
BLACKWELL_KERNELS: dict[str, Callable] = {
    "kda_prefill": functools.partial(kda_ops.prefill, generation="blackwell"),
    "kda_verify": functools.partial(kda_ops.verify, generation="blackwell"),
    "route": functools.partial(router.route_live, generation="blackwell"),
    "draft_attend": functools.partial(draft_attend.attend_context, generation="blackwell"),
}
# Kernels that are not to be chosen whatever they cover, and why: "held back: ...".
HELD_BACK: dict[str, str] = {}
_KERNEL_REASONS = {
    "pallas": "asked for, and it covers model and device",
    "auto": "it covers model and device",
    "xla": "asked for",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """The ops of the serving step."""

    copy_slots: Callable = kda_serving.copy_slots
    kda_decode: Callable = kda_serving.decode
    kda_prefill: Callable = kda_serving.prefill
    mla_decode: Callable = mla_serving.decode
    mla_prefill: Callable = mla_serving.prefill
    kda_verify: Callable = replay_serving.verify  # this and the next three: with a draft model
    kda_commit: Callable = replay_serving.commit
    mla_verify: Callable = mla_verify.verify
    draft_attend: Callable = draft_block.attend_context
    depth_mix: Callable = attn_res.mix_and_norm
    route: Callable = moe.route_live
    routed_experts: Callable = moe.routed_experts
    finish_rows: Callable = moe.finish_rows  # of expert ops that leave their rows unsummed
    keep_threshold: Callable = sampling.keep_threshold
    logprobs: Callable = sampling.logprobs
    when_wanted: Callable = branches.by_condition
    repeat: Callable = branches.loop

    @property
    def for_sampling(self) -> sampling.SamplingOps:
        """Those of sampling."""
        return sampling.SamplingOps(
            keep_threshold=self.keep_threshold, logprobs=self.logprobs, when_wanted=self.when_wanted
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs an op and why."""

    op: str
    backend: str
    reason: str


def with_rollback(ops: Ops, rollback: str) -> Ops:
    """The ops of the way back from rejected drafts: by `replay` as they are, or from one state per token."""
    if rollback == "replay":
        return ops
    return dataclasses.replace(ops, kda_verify=snapshot.verify, kda_commit=snapshot.commit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides whether a kernel can run: the device, the model, and how the step uses it."""

    platform: str  # "cpu" or "gpu"
    config: K3Config
    dtype: Any
    compute_capability: float = 0.0  # of a GPU: 9.0 is Hopper
    drafts: int | None = None  # that a row may verify; None without a draft model
    draft: DraftConfig | None = None  # that model
    rollback: str = "replay"
    expert_width: int | None = None  # of one rank; None: all of it
    num_ranks: int = 1  # over which the vocabulary is divided
    has_mxfp4_experts: bool = True
    moe_finalize: MoeFinalize = "deferred"  # where kernels leave expert rows unsummed

    @classmethod
    def on(cls, device: Any, **facts: Any) -> Situation:
        """The situation on a device; `facts` are the other fields."""
        capability = float(getattr(device, "compute_capability", 0.0))
        return cls(platform=device.platform, compute_capability=capability, **facts)


def wants_repacked_experts(ops: Ops) -> bool:
    """Whether the step takes its experts as `expert_load.repack` leaves them."""
    return ops.routed_experts is KERNELS["routed_experts"]


def choose(situation: Situation, kernels: Kernels = "auto") -> tuple[Ops, tuple[Choice, ...]]:
    """Pick an implementation of every op that the step uses, with the reasons.

    "auto" takes every kernel that supports the situation and is not held back, and so does "pallas", which raises
    `ValueError` when there is none; "xla" takes the references.
    """
    taken: dict[str, Callable] = {}
    reasons = {}
    if situation.platform == "cpu":
        taken["mla_decode"] = mla_serving.decode_by_row
        reasons["mla_decode"] = "a row at a time: each walks its own context only"
    else:
        taken["mla_verify"] = mla_verify.verify_by_token
        reasons["mla_verify"] = "every token is a decode row: no loop over rows"
        taken["mla_prefill"] = mla_serving.prefill_in_large_tiles
        reasons["mla_prefill"] = "no kernel yet; few long products instead of many short ones"
        taken |= {"when_wanted": branches.unless_small, "repeat": branches.unrolled}
        reasons |= dict.fromkeys(("when_wanted", "repeat"), "a step's graph is sent off faster without branches")
    running = set()
    is_blackwell = tensor_cores.generation_of(situation.compute_capability) == "blackwell"
    unproven = "; it has never run on a GPU of this kind" if is_blackwell and kernels != "xla" else ""
    for op, kernel in (KERNELS | (BLACKWELL_KERNELS if is_blackwell else {})).items():
        refusal = _refusal(op, situation) or HELD_BACK.get(op)
        reasons[op] = refusal or _KERNEL_REASONS[kernels] + unproven
        if kernels != "xla" and refusal is None:
            taken[op] = kernel
            running.add(op)
    if kernels == "pallas" and not running:
        raise ValueError(f"no kernel can run here: {reasons['kda_decode']}. Use --kernels auto.")
    unused = {"kda_verify", "kda_commit", "mla_verify", "draft_attend"} if situation.drafts is None else set()
    if "routed_experts" not in running:
        unused |= {"finish_rows"}
    elif situation.moe_finalize == "separate":
        taken["finish_rows"] = moe.finish_rows_apart
    choices = [
        Choice(
            op=field.name,
            backend="pallas" if field.name in running else "xla",
            reason=reasons.get(field.name, "the XLA reference is the only implementation"),
        )
        for field in dataclasses.fields(Ops)
        if field.name not in unused
    ]
    return dataclasses.replace(with_rollback(Ops(), situation.rollback), **taken), tuple(choices)


def _refusal(op: str, situation: Situation) -> str | None:
    """Why the kernel of `op` cannot run, or None."""
    config, device = situation.config, (situation.dtype, situation.platform, situation.compute_capability)
    if op == "copy_slots":
        return slot_copy.supported(config.kda_head_dim, *device)
    if op == "kda_decode":
        return kda_decode.supported(config, *device)
    if op == "kda_prefill":
        return kda_prefill_op.supported(config, *device)
    if op == "mla_decode":
        return mla_decode.supported(config, *device, 1)
    if op == "depth_mix":
        num_snapshots = sum(config.is_snapshot(layer) for layer in range(config.num_hidden_layers))
        return attn_res_kernel.supported(config.hidden_size, num_snapshots, *device)
    if op == "route":
        return router.supported(config, *device)
    if op in ("routed_experts", "finish_rows"):
        width = situation.expert_width or config.moe_intermediate_size
        refusal = expert_ops.supported(config, *device, width, situation.has_mxfp4_experts)
        if op == "routed_experts" or refusal is not None:
            return refusal
        if situation.moe_finalize == "separate":
            return "summing apart from the norm was asked for"
        return moe_tail.supported(config.routed_expert_hidden_size, *device)
    if op in ("keep_threshold", "logprobs"):
        ranks = situation.num_ranks
        refusal = requirements.refusal(*device)
        return refusal or sampling_kernel.supported(config.vocab_size // ranks, ranks, *device[1:])
    if situation.drafts is None:
        return "nothing is drafted"
    if op == "draft_attend":
        if situation.draft is None:
            return "nothing is known of the draft model"
        return draft_attend.supported(situation.draft, situation.num_ranks, *device)
    if op == "mla_verify":
        return mla_decode.supported(config, *device, 1 + situation.drafts)
    if situation.rollback != "replay":
        return "rollback is by snapshots, which have no kernel"
    return kda_verify.supported(config, *device, 1 + situation.drafts)
