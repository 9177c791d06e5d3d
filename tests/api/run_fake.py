"""A server process around the fake executor: `python -m tests.api.run_fake FLAGS`, for tests of serving.run.

TEST_BUILD says what building the engine does: `ok`, `slow` (never ends) or `fail`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from serving.config import ServeConfig
from serving.engine import Engine
from serving.fake_executor import FakeExecutor
from serving.run import main
from tests.api.served import LIMITS
from tests.k3jax.tokenizer_data import small_literals, small_tokenizer


def build(config: ServeConfig, progress: Callable[[str], None]) -> tuple[Engine, Any, Any]:
    progress("building")
    if os.environ["TEST_BUILD"] == "fail":
        raise ValueError("model-00002-of-00002.safetensors is missing.\nCopy it.")
    while os.environ["TEST_BUILD"] == "slow":
        time.sleep(0.05)
    engine = Engine(FakeExecutor(LIMITS, delay_s=0.005), seed=config.seed)
    engine.start()
    return engine, small_tokenizer(), small_literals()


if __name__ == "__main__":
    sys.exit(main(build=build))
