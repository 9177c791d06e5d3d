"""Stores into another block's shared memory for the Mosaic GPU interpreter of the pinned JAX, which lacks them.

`install` teaches it `plgpu.async_store_smem` for clusters of one axis. The store happens at once on a thread of its
own, as its copies do: who has not waited on the barrier since races with it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPULoggingInfo, HostAllocationKey


class _Primitives:
    """The module of primitives; the interpreter looks up by these names what it knows how to run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(primitives, name)

    try_cluster_cancel_p = primitives.async_store_smem_p  # takes the place of one that no kernel of ours has


def _interpret(interpreter, eqn, token, get_values):
    value, ref, barrier, block, *leaves = get_values()
    assert eqn.params["atomic"] is None
    assert len(interpreter.cluster_dims) == 1, "blocks are numbered along one axis here"
    of_ref, of_barrier = eqn.params["ref_transforms_treedef"], eqn.params["barrier_transforms_treedef"]
    split = of_ref.num_leaves
    key = jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, of_barrier, leaves[split:])
    token = callback.io_callback(
        functools.partial(_store, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        value=value,
        ref=ref,
        transforms=jax.tree.unflatten(of_ref, leaves[:split]),
        barrier=key,
        block=jnp.asarray(block, jnp.int32),
    )
    return token, []


@gpu_callbacks.fail_on_exception
def _store(*, token, mesh_location, thread, value, ref, transforms, barrier, block, source_info=None):
    memory = gpu_callbacks._get_shared_memory()
    info = GPULoggingInfo(mesh_location, thread, source_info)
    target, arrival = (
        dataclasses.replace(HostAllocationKey.from_array(key), block_id=int(block)) for key in (ref, barrier)
    )
    while not (target in memory.mem and arrival in memory.mem):  # the hardware starts a cluster's blocks together
        memory.check_failed()
        time.sleep(0.001)
    access = memory.access(target, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
    clock = memory.incr_clock(thread) if memory.detect_races else None
    if clock is not None:
        clock.inc(memory.get_next_tma_thread_id())
        gpu_callbacks.get_races().check_write(
            thread, clock.generic_clock.copy(), target, access, source_info=source_info
        )
    memory.store_buffer_content(target, access, np.array(value), thread, logging_info=info)
    memory.get_barrier(arrival).arrive(thread, clock, info)
    return token


def install() -> None:
    """Teach the interpreter; twice does no harm."""
    setattr(jaxpr_interpret, "gpu_primitives", _Primitives())  # noqa: B010
    setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_try_cluster_cancel_p", _interpret)  # noqa: B010
