"""Subcommands of scripts/convert_checkpoint.py, one a module: HELP, add_arguments(parser), run(args) -> exit code."""
