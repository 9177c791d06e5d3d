"""`make_demo_model.py export`: put trained weights and the vocabulary together as a model folder."""

import argparse
import json
import logging
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folder travels with the repository.
MAX_BYTES = 34_000_000
HUB_FOLDER = "hf-tokenizer"

logger = logging.getLogger(__name__)


def add_export(steps) -> None:
    """Add the subcommand to argparse's subparsers."""
    export = steps.add_parser("export", help="write the model folder from trained weights and the vocabulary")
    export.add_argument("--trained", type=Path, default=ROOT / ".cache/demo/trained", help="what `train` wrote")
    export.add_argument("--data", type=Path, default=ROOT / ".cache/demo/packed", help="what `pack` wrote")
    export.add_argument("--model", type=Path, default=ROOT / "demo", help="model folder to write (default: demo)")
    export.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> None:
    """Copy, check and load the folder once.

    Raises:
        ValueError: weights and vocabulary do not belong together, a file is missing, or the folder becomes too large.
    """
    from k3jax.tokenizer import load_tokenizer
    from k3jax.tokenizer_hub import write_tokenizer_json
    from scripts.demo.pack import TOKENIZER_FOLDER
    from scripts.demo.train_cmd import CURVE_FILE, METRICS_FILE

    check_vocabulary(args.trained / "config.json", args.data / TOKENIZER_FOLDER)
    args.model.mkdir(parents=True, exist_ok=True)
    for old in args.model.glob("model*.safetensors*"):
        old.unlink()
    shards = sorted(args.trained.glob("model-*.safetensors"))
    fixed = ["model.safetensors.index.json", "config.json", "generation_config.json", METRICS_FILE, CURVE_FILE]
    for path in [*shards, *(args.trained / name for name in fixed)]:
        shutil.copyfile(path, args.model / path.name)
    for path in sorted((args.data / TOKENIZER_FOLDER).iterdir()):
        shutil.copyfile(path, args.model / path.name)
    write_tokenizer_json(load_tokenizer(args.model), args.model / HUB_FOLDER)
    shutil.copyfile(args.trained / "config.json", args.model / HUB_FOLDER / "config.json")
    size = sum(path.stat().st_size for path in args.model.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise ValueError(f"{args.model} has {size} bytes, more than {MAX_BYTES}. Train a smaller shape.")
    check_loads(args.model)
    logger.info("%s: %.1f MB, loads and computes", args.model, size / 1e6)


def check_vocabulary(config_file: Path, tokenizer_folder: Path) -> None:
    """The ids that generation depends on must be the same in both. Raises `ValueError`."""
    from k3jax.config import K3Config
    from k3jax.tokenizer import load_tokenizer

    config, tokenizer = K3Config.from_file(config_file), load_tokenizer(tokenizer_folder)
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, tokenizer.vocab_size),
        ("bos_token_id", config.bos_token_id, tokenizer.bos_id),
        ("eos_token_id", config.eos_token_id, tokenizer.eos_id),
        ("pad_token_id", config.pad_token_id, tokenizer.pad_id),
    ):
        if ours != theirs:
            raise ValueError(
                f"{config_file} has {name}={ours}, the vocabulary in {tokenizer_folder} {theirs}. "
                "They do not belong together: train on what `pack` wrote with that vocabulary."
            )


def check_loads(folder: Path) -> None:
    """Load the folder as a user would and compute finite logits. Raises `ValueError`."""
    import numpy as np

    import k3jax

    model = k3jax.load(folder, dtype="float32")
    logits = np.asarray(model.logits(np.arange(8)))
    if not np.isfinite(logits).all():
        raise ValueError(f"{folder} gives logits that are not finite. Look at {json.dumps(logits[:, :4].tolist())}.")
