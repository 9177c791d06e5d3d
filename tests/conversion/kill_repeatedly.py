"""Run a conversion in child processes and kill each at a random point: `kill_repeatedly.py COMMAND SOURCE TARGET SEED`.

Prints one line per kill: how many units were complete by then. Children are forked, so that importing is paid for once.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from k3jax import convert

KILLS = 10
# Units small enough that there are more of them than kills.
OPTIONS = convert.Options(workers=2, slice_bytes=300, chunk_bytes=900, experts_per_unit=1)


def main(command: str, source: str, target: str, seed: str) -> None:
    run = {"to-orbax": convert.to_orbax, "to-hf": convert.to_hf}[command]
    draw = random.Random(int(seed))
    journal = Path(f"{target}.partial.journal")
    for _ in range(KILLS):
        goal = num_records(journal) + draw.randint(0, 1)
        child = os.fork()
        if child == 0:
            run(source, target, OPTIONS)
            os._exit(0)
        while num_records(journal) < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"ended by itself with status {status}"
        assert not Path(target).exists()
        print(num_records(journal), flush=True)


def num_records(journal: Path) -> int:
    """Units that are complete; the first line says what is being converted."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
