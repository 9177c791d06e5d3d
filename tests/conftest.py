"""Fixtures shared by all tests, and the JAX settings that must exist before its first import.

JAX itself is not imported here: the pure-Python tests stay fast that way.
"""

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import logging
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Eight virtual CPU devices, so that every mesh up to tp 8 runs anywhere; the user's own flags win.
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
if _DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test run is compiling, so every program is kept, however small. Subprocesses inherit this.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# A shell starts jobs in the background with interrupts ignored, and what they start inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs an NVIDIA GPU: JAX_PLATFORMS=cuda scripts/test -m gpu")


@pytest.fixture
def x64() -> Iterator[None]:
    """Switch 64-bit types on for one test, for equalities that float32 rounding would hide."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


SEED = int(os.environ.get("K3JAX_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return f"inputs drawn with K3JAX_TEST_SEED={SEED}"


@pytest.fixture(autouse=True)
def _inputs_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test inputs of its own, the same in every run: what fails once fails again.

    A generator that is asked for without a seed gets one from the test's name. K3JAX_TEST_SEED=N draws others; on a GPU
    `scripts/gpu_check.py` draws fresh ones every time.
    """
    import numpy as np

    default_rng, name, count = np.random.default_rng, zlib.crc32(request.node.nodeid.encode()), itertools.count()
    monkeypatch.setattr(
        np.random,
        "default_rng",
        lambda seed=None: default_rng([SEED, name, next(count)] if seed is None else seed),
    )


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Undo what a command called by the test set up: its handler writes to a stream that ends with the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what a file compiled and cached once it is done.

    Every compiled program holds memory mappings; a process that keeps those of all files crashes at the kernel's limit
    (vm.max_map_count, 65,530).
    """
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it; what it freed goes back to the system
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(scope="session")
def require_triton() -> None:
    """Report the test as not run when Triton is absent. In CI, which installs it, that is a failure."""
    if importlib.util.find_spec("triton") is not None:
        return
    reason = "needs Triton: scripts/setup --group aot"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
