"""`convert_checkpoint.py verify`: two folders of either kind, tensor by tensor; or one against its own manifest."""

import argparse
import sys
from pathlib import Path

from k3jax.convert import InterruptedConversion, verify
from k3jax.orbax_store import is_orbax_folder
from scripts.convert.conversion import INTERRUPTED, add_workers, stopping
from scripts.convert.progress import shown

HELP = "compare folders, or a folder with its manifest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="model or draft folder (Hugging Face or Orbax)")
    parser.add_argument("second", type=Path, nargs="?", help="the folder that must be equal")
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 only when nothing differs; every difference is a line."""
    with stopping() as stop, shown("verify") as progress:
        try:
            differences = verify(args.first, args.second, workers=args.workers, progress=progress, stop=stop)
        except InterruptedConversion:
            print("stopped before the end: nothing is known", file=sys.stderr)
            return INTERRUPTED
    for difference in differences:
        print(difference)
    if differences:
        print(f"{len(differences)} differences", file=sys.stderr)
        return 1
    if args.second:
        print("equal")
    elif is_orbax_folder(args.first):
        print("whole; its contents are those of the manifest")
    else:
        print("whole; the headers fit the files and the configuration, contents have nothing to be compared with")
    return 0
