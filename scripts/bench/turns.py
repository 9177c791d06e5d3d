"""Benchmarks that run side by side on one GPU time one after the other: compiling takes most of their time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

VARIABLE = "K3JAX_BENCH_TURNS"  # names a file; unset: nobody else is there


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the file that the environment names, so that no other benchmark times meanwhile."""
    path = os.environ.get(VARIABLE)
    if not path:
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
