"""Random traffic with cancels against the demo, on pools that it exhausts: a short run of `scripts/soak.py`."""

import json
import subprocess
import sys

import pytest

from tests.server.real_server import REPOSITORY, started

pytestmark = pytest.mark.slow

# Every request fits alone, and no more than two of the longest together.
FLAGS = ("--max-num-seqs", "4", "--max-step-tokens", "128", "--max-model-len", "768", "--num-pages", "17")


def test_nothing_is_left_and_no_answer_is_wrong_after_random_traffic():
    with started(*FLAGS, "--host-cache-gb", "0.2") as server:
        server.wait_for("Ready. Try:")
        command = [sys.executable, "scripts/soak.py", "--url", server.url(), "--pid", str(server.process.pid)]
        command += ["--minutes", "0.5", "--clients", "8", "--questions", "10"]
        ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    report = json.loads(ran.stdout.splitlines()[-1])
    # Half a minute is too short for memory to settle; the long run looks at that.
    assert [problem for problem in report["problems"] if "grew" not in problem] == [], ran.stderr
    assert report["counts"]["cancelled"] > 0 and report["known_questions"] > 0
