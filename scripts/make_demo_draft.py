"""Make the demo draft, which proposes tokens for the demo model. Without arguments all steps run, one after the other.

`collect` has the demo model answer questions and prompts of its corpus and keeps its hidden states, `train` trains the
draft on them (minutes on a GPU, an hour or two on a CPU), `export` writes demo/draft, `eval` measures how many tokens a
verify step commits.

The steps read what the earlier ones left in the work folder (`--work`, git-ignored), and what was done is not done
again. The corpus comes from `make_demo_model.py`: where its folder is missing, the run without arguments makes it.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import make_demo_model  # noqa: E402
from scripts.demo.pack import TOKEN_FILE  # noqa: E402
from scripts.demo_draft.collect_cmd import add_collect  # noqa: E402
from scripts.demo_draft.eval_cmd import add_eval  # noqa: E402
from scripts.demo_draft.export_cmd import add_export  # noqa: E402
from scripts.demo_draft.train_cmd import add_train  # noqa: E402

STEPS = {"collect": add_collect, "train": add_train, "export": add_export, "eval": add_eval}

logger = logging.getLogger("make_demo_draft")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="make_demo_draft.py", description="Make the demo draft: all steps, or one of them with options of its own."
    )
    steps = top.add_subparsers(dest="step")
    for add in STEPS.values():
        add(steps)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.step is not None:
        return _run(args)
    todo = [parser().parse_args([step]) for step in STEPS]
    if not (todo[0].data / TOKEN_FILE).exists():
        for step in ("corpus", "pack"):
            if status := make_demo_model.main([step]):
                return status
    return next((status for status in map(_run, todo) if status), 0)


def _run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)  # a library has set its own
    for library in ("absl", "jax"):
        logging.getLogger(library).setLevel(logging.WARNING)
    start = time.monotonic()
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"make_demo_draft.py {args.step}: {error}", file=sys.stderr)
        return 2
    logger.info("%s done in %.0f s", args.step, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
