"""Which implementation runs each op: chosen once, at start-up, with the reason. The XLA reference always works.

An op is a plain callable with the signature of its reference, so kernels plug in without touching the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from k3jax import kda_serving, mla_serving, mla_verify, moe, replay_serving, snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """The ops of the serving step."""

    kda_decode: Callable = kda_serving.decode
    kda_prefill: Callable = kda_serving.prefill
    mla_decode: Callable = mla_serving.decode
    mla_prefill: Callable = mla_serving.prefill
    kda_verify: Callable = replay_serving.verify  # this and the next two: with a draft model
    kda_commit: Callable = replay_serving.commit
    mla_verify: Callable = mla_verify.verify
    routed_experts: Callable = moe.routed_experts


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


def choose(platform: str, rollback: str | None = None) -> tuple[Ops, tuple[Choice, ...]]:
    """Pick implementations for devices of `platform` ("cpu", "gpu"); `rollback` with a draft model only."""
    by_row = {"mla_decode": mla_serving.decode_by_row} if platform == "cpu" else {}
    reasons = dict.fromkeys(by_row, "a row at a time: each walks its own context only")
    unused = () if rollback else ("kda_verify", "kda_commit", "mla_verify")
    names = [field.name for field in dataclasses.fields(Ops) if field.name not in unused]
    other = "the XLA reference is the only implementation"
    choices = tuple(Choice(op=name, backend="xla", reason=reasons.get(name, other)) for name in names)
    return with_rollback(Ops(**by_row), rollback or "replay"), choices
