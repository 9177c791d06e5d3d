"""How far a conversion is, with rate and remaining time: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from k3jax.loading import Progress

LINE_SECONDS = 10.0


@contextlib.contextmanager
def shown(verb: str) -> Iterator[Callable[[Progress], None]]:
    """A function that takes every state; bytes that an earlier run did count for the bar, not for the rate."""
    if not sys.stderr.isatty():
        yield _lines(verb)
        return
    columns = (TaskProgressColumn(), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar("{task.description}", *columns, transient=False) as bar:
        task = bar.add_task(verb, total=None, start=False)

        def show(state: Progress) -> None:
            if not bar.tasks[task].started:
                bar.start_task(task)
                bar.update(task, total=state.bytes_total)
            bar.update(task, completed=state.bytes_read)

        yield show


def _lines(verb: str) -> Callable[[Progress], None]:
    begun = time.monotonic()
    last, first_bytes = begun, None

    def show(state: Progress) -> None:
        nonlocal last, first_bytes
        first_bytes = state.bytes_read if first_bytes is None else first_bytes
        now = time.monotonic()
        is_end = state.bytes_read == state.bytes_total
        if not is_end and now - last < LINE_SECONDS:
            return
        last = now
        rate = (state.bytes_read - first_bytes) / max(now - begun, 1e-3)
        left = (state.bytes_total - state.bytes_read) / rate if rate else float("inf")
        print(
            f"{verb}: {state.bytes_read / 1e9:.2f} of {state.bytes_total / 1e9:.2f} GB ({100 * state.fraction:.0f} %), "
            f"{rate / 1e6:.0f} MB/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    return show
