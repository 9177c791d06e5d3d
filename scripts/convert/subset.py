"""`convert_checkpoint.py subset`: the first layers and experts as a small checkpoint, for tests."""

import argparse
import signal
from pathlib import Path
from typing import NoReturn

from k3jax.config import ConfigError
from k3jax.subset_checkpoint import write_subset

HELP = "cut a checkpoint to its first layers and experts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="model folder (Hugging Face or Orbax)")
    parser.add_argument("target", type=Path, help="new folder, in the released layout")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers (default: all)")
    parser.add_argument("--experts", type=int, metavar="E", help="keep the first E routed experts (default: all)")


def run(args: argparse.Namespace) -> int:
    """Write the subset and say what it is."""
    if args.layers is None and args.experts is None:
        raise ConfigError("nothing to cut: pass --layers, --experts or both")
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        subset = write_subset(args.source, args.target, num_layers=args.layers, num_experts=args.experts)
    finally:
        signal.signal(signal.SIGTERM, before)
    for note in subset.notes:
        print(note)
    print(f"{subset.folder}: {subset.num_tensors:,} tensors, {subset.num_bytes:,} bytes")
    return 0


def _stop(number: int, frame: object) -> NoReturn:
    """Leave through the code that removes what was written."""
    raise SystemExit(128 + number)
