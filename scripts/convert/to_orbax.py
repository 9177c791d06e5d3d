"""`convert_checkpoint.py to-orbax`: a Hugging Face folder as an Orbax folder, the same bytes tensor for tensor."""

import argparse

from k3jax.convert import to_orbax
from scripts.convert import conversion

HELP = "write an Orbax folder"
add_arguments = conversion.add_arguments


def run(args: argparse.Namespace) -> int:
    return conversion.run(to_orbax, args, "to-orbax")
