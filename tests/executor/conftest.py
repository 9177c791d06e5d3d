"""One compiled executor for the whole session: two programs, float64, 8 rows, room for checkpoints and a host tier."""

from collections.abc import Iterator

import pytest

from serving.executor import DeviceExecutor
from serving.state.store import HostMemoryStore
from tests.executor.device import device_executor


@pytest.fixture(scope="session")
def shared_executor() -> Iterator[DeviceExecutor]:
    executor = device_executor(num_rows=8, num_slots=20, store=HostMemoryStore(2**24))
    yield executor
    executor.close()


@pytest.fixture
def executor(shared_executor: DeviceExecutor) -> Iterator[DeviceExecutor]:
    """The shared executor, empty before and after."""
    yield shared_executor
    shared_executor.reset()
