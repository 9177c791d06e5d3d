"""The vectors through which the host and a compiled step talk: one of inputs, one of outputs."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.programs import REPLICATED, StepProgram
from serving.executor_pinned import PinnedVector

logger = logging.getLogger(__name__)


class StepVectors:
    """Memory for the inputs and outputs of one step at a time, used again by later steps; see `StepProgram.lower`.

    On a GPU the host writes the inputs where the program reads them, behind JAX's back, once the step that read them
    before has ended. An upload would need memory of the device, which may be written only once every step in front has
    ended: the next step would wait for a copy behind the last one's end. On other devices a step gets the host's array
    itself, and its outputs are new.
    """

    def __init__(self, program: StepProgram, size: int) -> None:
        """`size` is that of both vectors, in words of 32 bits."""
        self.size = size
        self._sharding = NamedSharding(program.mesh, REPLICATED)
        self._is_kept = program.keeps_outputs_in_place
        self._place: jax.Array | None = None
        self._running: jax.Array | None = None
        self._pinned: PinnedVector | None = None
        if self._is_kept:
            try:
                self._pinned = PinnedVector(size, self._sharding)
            except (RuntimeError, ValueError, TypeError) as error:
                logger.warning("the host's memory cannot be read in place (%s): every step uploads its inputs", error)

    def filled(self, packed: np.ndarray) -> Any:
        """The operand that carries `packed`. Waits for the step that used this memory before."""
        if self._pinned is None:
            return packed
        if self._running is not None:
            jax.block_until_ready(self._running)
        return self._pinned.write(packed)

    def place(self) -> Any:
        """The operand that outputs are to replace; it is consumed."""
        if not self._is_kept:
            return ()
        place, self._place = self._place, None
        if place is None:
            return jax.device_put(np.zeros(self.size, np.int32), self._sharding)
        return place

    def started(self, outputs: jax.Array) -> None:
        """A step that was given both leaves its outputs in `outputs`."""
        self._running = outputs if self._is_kept else None

    def read(self, outputs: jax.Array) -> None:
        """The host has a copy of `outputs`: a later step may replace them."""
        if self._running is outputs:
            self._place, self._running = outputs, None

    def reset(self) -> None:
        """Forget what is running: nothing of it will be read."""
        self._place = self._running = None
