"""Convert Kimi K3 checkpoints and drafts: between Hugging Face and Orbax folders, and what goes with it."""

import argparse
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.convert import inspect, subset, to_hf, to_orbax, verify  # noqa: E402

# Every module has HELP, add_arguments(parser) and run(args) -> exit code.
COMMANDS: dict[str, ModuleType] = {
    "inspect": inspect,
    "to-orbax": to_orbax,
    "to-hf": to_hf,
    "verify": verify,
    "subset": subset,
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        one = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(one)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; what is wrong with its input is exit code 2 and a message that lists it."""
    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint.py {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
