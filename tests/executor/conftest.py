"""One compiled executor for the whole session: two programs, float64, 8 rows."""

from collections.abc import Iterator

import pytest

from serving.executor import DeviceExecutor
from tests.executor.device import device_executor


@pytest.fixture(scope="session")
def shared_executor() -> Iterator[DeviceExecutor]:
    executor = device_executor(num_rows=8)
    yield executor
    executor.close()


@pytest.fixture
def executor(shared_executor: DeviceExecutor) -> Iterator[DeviceExecutor]:
    """The shared executor, empty before and after."""
    yield shared_executor
    shared_executor.reset()
