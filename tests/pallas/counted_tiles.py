"""`k3jax.pallas.tile_counters` for the Mosaic GPU interpreter of the pinned JAX, which runs no inlined instructions.

It runs the blocks of a grid one after the other, so who waits for a counter finds it counted, or waits for a later
block, which is an error here. Its clocks begin anew with every block: what a block stored is to the next ones a race,
but to those that waited for a counter it was told by.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPULoggingInfo, HostAllocationKey

_inline_mgpu = jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p
_clocks: dict[tuple, Any] = {}  # of those that have counted, by counter


def _interpret(interpreter, eqn, token, get_values):
    name = eqn.params["mgpu_fn"].__name__
    act = {"count_released": _release, "wait_acquired": _acquire, "count_relaxed": _count}.get(name)
    if act is None and name != "take_number":
        return _inline_mgpu(interpreter, eqn, token, get_values)
    num_arguments = len(eqn.params["flat_arg_types"])
    arguments, leaves = get_values()[:num_arguments], get_values()[num_arguments:]
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
    common = {
        "token": token,
        "mesh_location": interpreter.mesh_location,
        "thread": interpreter.thread,
        "counter": arguments[0],
        "transforms": transforms[0],
    }
    if act is None:
        _, takers, number = arguments
        function = functools.partial(_take, source_info=eqn.source_info)
        common |= {"takers": takers, "number": number, "number_transforms": transforms[2]}
    else:
        numbers = _numbers(eqn.params["mgpu_fn"])
        function = functools.partial(_act, act, numbers=numbers, source_info=eqn.source_info)
    return callback.io_callback(function, gpu_callbacks.TOKEN_SHAPE_DTYPE, **common), []


def _numbers(function) -> dict[str, int]:
    """Participants or stored tiles, which the inlined instructions have as constants."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


@gpu_callbacks.fail_on_exception
def _act(act, *, token, mesh_location, thread, counter, transforms, numbers, source_info=None):
    del mesh_location, source_info
    memory, name, update = _open(counter, transforms)
    act(memory, thread, name, update, **numbers)
    return token


@gpu_callbacks.fail_on_exception
def _take(*, token, mesh_location, thread, counter, transforms, takers, number, number_transforms, source_info=None):
    memory, _, update = _open(counter, transforms)
    found = update(lambda value: 0 if value >= int(takers) - 1 else value + 1)
    key = HostAllocationKey.from_array(number)
    access = memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(number_transforms)))
    info = GPULoggingInfo(mesh_location, thread, source_info)
    memory.store_buffer_content(key, access, np.asarray(found, np.float32), thread, logging_info=info)
    return token


def _open(counter, transforms) -> tuple:
    """The interpreter's memory, the counter's name, and what changes it and returns what it was."""
    memory = gpu_callbacks._get_shared_memory()
    key = HostAllocationKey.from_array(counter)
    access = memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
    buffer: Any = memory.mem[key]

    def update(change) -> int:
        with memory.lock:
            [value] = np.ravel(buffer.content[access.range])
            buffer.content[access.range] = change(int(value))
        return int(value)

    return memory, (id(memory), key, str(access.range)), update


def _release(memory, thread, name, update, participants: int) -> None:
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        _clocks.setdefault(name, clock.copy()).update(clock)
    _count(memory, thread, name, update, participants)


def _acquire(memory, thread, name, update, stored: int) -> None:
    found = update(lambda value: value)
    if found < stored:
        raise RuntimeError(f"a block waits for a tile that a later one prepares: {found} of {stored} have stored it")
    if memory.detect_races:
        with memory.lock:
            memory.clocks[thread].update(_clocks[name])


def _count(memory, thread, name, update, participants: int) -> None:
    del memory, thread
    if update(lambda value: 0 if value >= participants - 1 else value + 1) == participants - 1:
        _clocks.pop(name, None)


def install() -> None:
    """Teach the interpreter; twice does no harm."""
    _clocks.clear()
    setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p", _interpret)  # noqa: B010
