"""`make_demo_model.py train`: from the packed token file to weights in the released layout, curve and metrics.

JAX is imported when the step runs, so that the other steps, and `--help`, do without it.
"""

import argparse
import dataclasses
import logging
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Shards this small travel back from the training machine.
SHARD_BYTES = 15 * 2**20
# Kept free for the last checkpoint, quantising, writing and drawing.
CLOSING_SECONDS = 25
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"

logger = logging.getLogger(__name__)


def add_train(steps) -> None:
    """Add the subcommand to argparse's subparsers."""
    train = steps.add_parser("train", help="train on the token file: weights, metrics.jsonl and loss.png")
    train.add_argument("--data", type=Path, default=ROOT / ".cache/demo/packed", help="folder with train.npz")
    train.add_argument("--out", type=Path, default=ROOT / ".cache/demo/trained", help="folder for the results")
    train.add_argument(
        "--checkpoints",
        type=Path,
        default=ROOT / ".cache/demo/checkpoints",
        help="folder that a killed run continues from; delete it to begin anew (default: .cache/demo/checkpoints)",
    )
    train.add_argument("--config", type=Path, help="config.json of another model shape (default: the demo's)")
    length = train.add_mutually_exclusive_group()
    length.add_argument("--max-seconds", type=float, help="whole time of this command (default: 480)")
    length.add_argument("--steps", type=int, help="train for so many steps instead")
    train.add_argument("--row-tokens", type=int, default=1024, help="tokens per row (default: 1024)")
    train.add_argument("--batch-rows", type=int, default=32, help="rows per step (default: 32)")
    train.add_argument("--learning-rate", type=float, default=3e-3, help="highest learning rate (default: 0.003)")
    train.add_argument("--steps-per-dispatch", type=int, default=20, help="steps between two reports (default: 20)")
    train.add_argument("--float32", action="store_true", help="compute in float32 instead of bfloat16")
    train.add_argument("--remat", action="store_true", help="recompute layers in the backward pass, to save memory")
    train.add_argument("--seed", type=int, default=0, help="seed of weights and order (default: 0)")
    train.add_argument("--probe", action="store_true", help="only measure speed and memory, about two minutes")
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> None:
    """Train, or measure with `--probe`. Raises `ValueError` for settings that do not fit."""
    start = time.monotonic()
    from k3jax import presets
    from k3jax.config import K3Config
    from k3jax.train import Optimization, Rows, TrainConfig
    from scripts.demo.pack import TOKEN_FILE, read_token_file
    from scripts.demo.rows import pack_rows

    config = presets.demo() if args.config is None else K3Config.from_file(args.config)
    file = read_token_file(args.data / TOKEN_FILE)
    if int(file.tokens.max()) >= config.vocab_size:
        raise ValueError(
            f"{args.data / TOKEN_FILE} has token {file.tokens.max()}, the model a vocabulary of {config.vocab_size}. "
            "Use the config that the vocabulary was made for."
        )
    rows = Rows(*pack_rows(file, row_tokens=args.row_tokens, seed=args.seed))
    logger.info("%d rows of %d tokens, %.1f %% filled", *rows.tokens.shape, 100 * (rows.segments > 0).mean())
    optimization = Optimization(
        batch_rows=args.batch_rows, compute_dtype="float32" if args.float32 else "bfloat16", remat=args.remat
    )
    if args.probe:
        from scripts.demo.probe import probe

        probe(config, rows, optimization, deadline=start + 110)
        return
    seconds = None if args.steps is not None else (args.max_seconds or 480.0) - CLOSING_SECONDS
    training = TrainConfig(
        steps=args.steps,
        max_seconds=seconds,
        learning_rate=args.learning_rate,
        steps_per_dispatch=args.steps_per_dispatch,
        seed=args.seed,
        optimization=optimization,
    )
    _train_and_write(config, rows, training, args, start)


def _train_and_write(config, rows, training, args: argparse.Namespace, start: float) -> None:
    import jax

    from k3jax.checkpoint_writer import pack_experts, write_checkpoint
    from k3jax.train import newest_step, train
    from k3jax.train_report import MetricsFile, draw_curve

    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells every step of every save
    args.out.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    run = {"training": dataclasses.asdict(training), "rows": list(rows.tokens.shape), "device": device}
    metrics = MetricsFile(args.out / METRICS_FILE, run, first_step=newest_step(args.checkpoints))
    params = train(config, rows, training, checkpoints=args.checkpoints, on_report=metrics.add, start=start)
    written = write_checkpoint(pack_experts(params), config, args.out, max_shard_bytes=SHARD_BYTES)
    draw_curve(args.out / METRICS_FILE, args.out / CURVE_FILE)
    size = sum(path.stat().st_size for path in written)
    logger.info(
        "wrote %d files, %.1f MB, to %s after %.0f s", len(written), size / 1e6, args.out, time.monotonic() - start
    )
