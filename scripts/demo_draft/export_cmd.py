"""`make_demo_draft.py export`: the trained draft as the folder that travels with the demo model."""

from __future__ import annotations

import argparse
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.draft_loading import load_draft, open_draft
from scripts.demo_draft.shape import ROOT, add_folders
from scripts.demo_draft.train_cmd import METRICS_FILE, TRAINED_FOLDER

MAX_BYTES = 8_000_000  # the folder travels with the repository
LICENCE_NOTE = """\
The demo draft was trained on answers of the demo model beside it and on the text which that model was trained on.
Sources and licences of that text are in ../LICENSES; none of it is kept in this repository.
"""

logger = logging.getLogger(__name__)


def add_export(steps) -> argparse.ArgumentParser:
    """Add the subcommand to argparse's subparsers."""
    step = steps.add_parser("export", help="write the draft's folder beside the demo model")
    add_folders(step)
    step.add_argument("--draft", type=Path, default=ROOT / "demo/draft", help="folder to write (default: demo/draft)")
    step.set_defaults(run=run_export)
    return step


def run_export(args: argparse.Namespace) -> None:
    """Check and copy.

    Raises:
        ValueError: there is no trained draft, it is too large, or its weights are not finite.
        ConfigError, LoadError: it does not fit the target, or a file is damaged.
    """
    trained = args.work / TRAINED_FOLDER
    if not (trained / "model.safetensors").exists():
        raise ValueError(f"{trained} has no draft. Run `make_demo_draft.py train` first.")
    params = load_draft(open_draft(trained, K3Config.from_file(args.model)), jnp.float32)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        raise ValueError(f"{trained} has weights that are not finite. Train again with a lower --learning-rate.")
    names = ("config.json", "model.safetensors", METRICS_FILE)
    size = sum((trained / name).stat().st_size for name in names)
    if size > MAX_BYTES:
        raise ValueError(f"the draft has {size} bytes, more than {MAX_BYTES}. Train fewer layers.")
    args.draft.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(trained / name, args.draft / name)
    (args.draft / "LICENSES").write_text(LICENCE_NOTE, encoding="utf-8")
    logger.info("%s: %.1f MB, fits %s", args.draft, size / 1e6, args.model)
