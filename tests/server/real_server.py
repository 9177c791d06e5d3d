"""`python -m serving.run` as a process of its own, with the real model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def started(*flags: str) -> Iterator[ServerProcess]:
    """Start a server on a free port; end it however the test ends."""
    hidden = ("K3JAX_", "XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "serving.run", "--port", "0", *flags],
        cwd=REPOSITORY,
        env=environment | {"JAX_PLATFORMS": "cpu"},
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
