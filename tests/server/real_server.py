"""Servers as processes of their own, whose log is read; `started` runs `python -m serving.run` with the real model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
START_S = 240.0  # compiling on a machine that does other things too


@dataclasses.dataclass(kw_only=True)
class ServerProcess:
    """A running server and the lines it has logged."""

    process: subprocess.Popen[str]
    lines: list[str] = dataclasses.field(default_factory=list)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Wait for a log line."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert self.process.poll() is None, f"exit {self.process.returncode}: {self.lines}"
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def url(self) -> str:
        """Where it listens."""
        return self.wait_for(r"Listening on (http://[0-9.:]+)")[1]

    def exit_status(self) -> int:
        """Wait for the end."""
        return self.process.wait(20)


@contextlib.contextmanager
def launched(module: str, *flags: str, environment: Mapping[str, str]) -> Iterator[ServerProcess]:
    """Run a module with warnings as errors; end it however the test ends."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", module, *flags],
        cwd=REPOSITORY,
        env=dict(environment),
        stderr=subprocess.PIPE,
        text=True,
    )
    server = ServerProcess(process=process)
    assert process.stderr is not None
    stderr = process.stderr
    reader = threading.Thread(target=lambda: server.lines.extend(stderr))
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        stderr.close()


@contextlib.contextmanager
def started(*flags: str) -> Iterator[ServerProcess]:
    """Start a server on a free port."""
    hidden = ("K3JAX_", "XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment |= {"JAX_PLATFORMS": "cpu"}
    with launched("serving.run", "--port", "0", *flags, environment=environment) as server:
        yield server
