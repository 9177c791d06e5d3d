"""The executor seam: what the engine asks of whatever runs the device step.

`serving.executor.DeviceExecutor` is the real one, `serving.fake_executor.FakeExecutor` the one for tests without a
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from serving.core.types import ExecutorLimits, StepPlan, StepResult, Transfer, TransferResult


class StepRejected(Exception):
    """The step could not be dispatched; the device state is as before it. Only the step's own requests end."""


class DeviceFailure(Exception):
    """The device program failed and the donated pools are gone; `Executor.reset` rebuilds them, empty."""


class Executor(Protocol):
    """Runs planned steps in order. `submit` does not wait for the device, `collect` does."""

    limits: ExecutorLimits

    def submit(self, plan: StepPlan) -> None:
        """Dispatch `plan`. Raises `StepRejected` before dispatch, `DeviceFailure` after."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step and return it. Raises `DeviceFailure`."""
        ...

    def transfer(self, transfer: Transfer) -> None:
        """Start a copy to or from the state store; never waits. Only with `limits.host_cache_bytes` above 0."""
        ...

    def finished_transfers(self, wait_s: float = 0.0) -> tuple[TransferResult, ...]:
        """Transfers that ended since the last call; waits up to `wait_s` for the first when none has."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop entries of the state store. Keys that are not there are ignored."""
        ...

    def reset(self) -> None:
        """Drop all rows, pages and slots and rebuild empty pools. Transfers in flight are forgotten; the state store
        keeps what was stored whole."""
        ...

    def info(self) -> dict[str, object]:
        """Facts for /server_info and the log: device, dtype, mesh, programs, compile seconds, kernels and why."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...
