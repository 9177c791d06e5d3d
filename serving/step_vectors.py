"""The vectors through which the host and a compiled step talk: one of inputs, one of outputs."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.programs import REPLICATED, StepProgram

logger = logging.getLogger(__name__)


class StepVectors:
    """Memory for the inputs and outputs of one step at a time, used again by later steps; see `StepProgram.lower`.

    On a GPU the host writes the inputs into pinned memory behind JAX's back, once the step that read them before has
    ended. On other devices a step gets the host's array itself, and its outputs are new.
    """

    def __init__(self, program: StepProgram, size: int) -> None:
        """`size` is that of both vectors, in words of 32 bits."""
        self._size = size
        self._sharding = program.vector_sharding
        self._device_sharding = NamedSharding(program.mesh, REPLICATED)
        self._is_pinned = program.reads_host_memory
        self._views: list[np.ndarray] = []
        self._inputs: jax.Array | None = None
        self._place: jax.Array | None = None
        self._running: jax.Array | None = None
        if self._is_pinned:
            self._map()

    def _map(self) -> None:
        inputs = jax.block_until_ready(jax.device_put(np.zeros(self._size, np.int32), self._sharding))
        self._inputs = inputs
        pattern = np.arange(self._size, dtype=np.int32)
        try:
            shards = [shard.data for shard in inputs.addressable_shards]
            self._views = [_view(shard) for shard in shards]
            for view in self._views:
                view[:] = pattern
            is_seen = all(np.array_equal(pattern, np.asarray(shard)) for shard in shards)
        except (RuntimeError, ValueError) as error:  # of a runtime that gives no address
            self._views, is_seen = [], False
            logger.debug("no address of pinned memory: %s", error)
        if not is_seen:
            self._views = []
            logger.warning("pinned memory cannot be written in place here: every step uploads its inputs")

    def filled(self, packed: np.ndarray) -> Any:
        """The operand that carries `packed`. Waits for the step that used this memory before."""
        if not self._is_pinned:
            return packed
        if self._running is not None:
            jax.block_until_ready(self._running)
        if not self._views:
            return jax.device_put(packed, self._sharding)
        for view in self._views:
            view[:] = packed
        return self._inputs

    def place(self) -> Any:
        """The operand that outputs are to replace; it is consumed."""
        if not self._is_pinned:
            return ()
        place, self._place = self._place, None
        if place is None:
            return jax.device_put(np.zeros(self._size, np.int32), self._device_sharding)
        return place

    def started(self, outputs: jax.Array) -> None:
        """A step that was given both leaves its outputs in `outputs`."""
        self._running = outputs if self._is_pinned else None

    def read(self, outputs: jax.Array) -> None:
        """The host has a copy of `outputs`: a later step may replace them."""
        if self._is_pinned and self._running is outputs:
            self._place, self._running = outputs, None

    def reset(self) -> None:
        """Forget what is running: nothing of it will be read."""
        self._place = self._running = None


def _view(shard: jax.Array) -> np.ndarray:
    """The host's memory of a pinned array as an array that can be written."""
    return np.ctypeslib.as_array((ctypes.c_int32 * shard.size).from_address(shard.unsafe_buffer_pointer()))
