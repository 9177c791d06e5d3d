"""What `to-orbax` and `to-hf` share: arguments, the announcement, progress, and stopping so that it can go on."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from k3jax.convert import InterruptedConversion, Need, Options, Watch
from scripts.convert.progress import shown

INTERRUPTED = 130  # what shells report for Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="model or draft folder (Hugging Face or Orbax)")
    parser.add_argument("target", type=Path, help="new folder; TARGET.partial holds the work until it is complete")
    parser.add_argument(
        "--experts",
        choices=("keep", "bf16", "mxfp4"),
        default="keep",
        help="format of the routed experts (default: keep)",
    )
    add_workers(parser)


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=Options().workers, metavar="N", help="threads (default: %(default)s)"
    )


def run(convert: Callable[[Path, Path, Options, Watch], None], args: argparse.Namespace, verb: str) -> int:
    """Convert, or say how to go on."""
    options = Options(experts=args.experts, workers=args.workers)
    with stopping() as stop, shown(verb) as progress:
        watch = Watch(announce=_announce, progress=progress, stop=stop)
        try:
            convert(args.source, args.target, options, watch)
        except InterruptedConversion:
            print(f"stopped; run the same command again to go on with {args.target}.partial", file=sys.stderr)
            return INTERRUPTED
    print(f"{args.target} is complete")
    return 0


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; the second time they end the process."""
    stop = threading.Event()

    def request(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(need: Need) -> None:
    print(
        f"needs at most {need.memory_bytes / 1e9:.1f} GB of memory and {need.disk_bytes / 1e9:.2f} GB of disk "
        f"({need.free_bytes / 1e9:.0f} GB are free)",
        file=sys.stderr,
    )
    if need.resumed_bytes:
        print(f"goes on behind {need.resumed_bytes / 1e9:.2f} GB that an earlier run did", file=sys.stderr)
