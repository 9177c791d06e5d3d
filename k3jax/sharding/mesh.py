"""The device mesh of the step: axes `tp` and `dcp`; the tensor-parallel degree is their product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from k3jax.sharding.collectives import Parallel

AXES = ("tp", "dcp")


def make_mesh(tp: int = 1, dcp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A (tp, dcp) mesh over the first tp x dcp devices."""
    available = list(devices if devices is not None else jax.devices())
    if tp * dcp > len(available):
        raise ValueError(f"tp={tp} x dcp={dcp} needs {tp * dcp} devices, this process has {len(available)}")
    grid = np.array(available[: tp * dcp]).reshape(tp, dcp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def parallel_of(mesh: Mesh, *, shard_latents: bool = False, whole_experts: bool = False) -> Parallel:
    """The collectives' view of a (tp, dcp) mesh."""
    if mesh.axis_names != AXES:
        raise ValueError(
            f"mesh axes are {mesh.axis_names}, expected {AXES}: build it with k3jax.sharding.mesh.make_mesh"
        )
    return Parallel(axes=AXES, sizes=mesh.devices.shape, shard_latents=shard_latents, whole_experts=whole_experts)
