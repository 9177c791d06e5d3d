"""`convert_checkpoint.py to-hf`: an Orbax folder as the Hugging Face folder that it came from, file for file."""

import argparse

from k3jax.convert import to_hf
from scripts.convert import conversion

HELP = "write a Hugging Face folder"
add_arguments = conversion.add_arguments


def run(args: argparse.Namespace) -> int:
    return conversion.run(to_hf, args, "to-hf")
