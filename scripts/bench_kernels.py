"""Print ours / peer / floor for the kernels of an op: `python scripts/bench_kernels.py --op kda-prefill`.

Runs `scripts/bench/OP.py` on the GPU, in its own process, and passes it whatever follows `--`. `--peers FILE` reads the
peers' JSON lines (op, peer, us and the shape), which must come from the same machine in the same session: a figure
means something only beside its peer's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from serving.option_types import OneLineParser, json_lines  # noqa: E402

BENCHES = pathlib.Path(__file__).resolve().parent / "bench"
OPS = (
    "attn-res",
    "draft-attend",
    "experts",
    "experts-triton",
    "gemm",
    "kda-decode",
    "kda-prefill",
    "kda-verify",
    "latent-moe",
    "mla-decode",
    "moe-tail",
    "router",
    "sampling",
    "short-conv",
    "slot-copy",
)
GROUPS = {
    "kda": ("kda-decode", "kda-verify", "slot-copy", "short-conv", "kda-prefill"),
    "moe": ("router", "experts", "moe-tail"),
}
SHAPE = (
    "op",
    "heads",
    "batch",
    "seq",
    "tokens",
    "experts",
    "inter",
    "context",
    "queries",
)  # what a line of ours must share with a peer's


def main() -> int:
    """Run the benchmark and print its table; exit status 1 when a line failed."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--op", required=True, choices=(*OPS, *GROUPS), help="what to time; kda and moe: all of their kernels"
    )
    parser.add_argument("--peers", type=json_lines, default=[], metavar="FILE", help="the peers' JSON lines")
    parser.add_argument("arguments", nargs="*", help="arguments of the op's own benchmark, after --")
    args = parser.parse_args()
    try:
        rows = [row for op in GROUPS.get(args.op, (args.op,)) for row in run(op, args.arguments)]
    except subprocess.CalledProcessError as error:  # which has said why
        return error.returncode
    print(table(rows, args.peers))
    return 1 if any("failed" in row for row in rows) else 0


def run(op: str, arguments: list[str]) -> list[dict]:
    """The lines of one op's benchmark, in its own process."""
    script = BENCHES / f"{op.replace('-', '_')}.py"
    command = [sys.executable, str(script), *arguments]
    return parse_lines(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def parse_lines(text: str) -> list[dict]:
    """The JSON objects among the lines of `text`."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def table(rows: list[dict], peers: list[dict]) -> str:
    """Markdown: shape, microseconds of ours, of the fastest peer at that shape, their ratio, and the floor."""
    lines = ["| shape | ours us | peer us | ours / peer | floor us |", "|---|---|---|---|---|"]
    for row in rows:
        hidden = {"op", "us", "floor_us", "failed"}
        shape = " ".join(f"{name}={value}" for name, value in row.items() if name not in hidden)
        if "failed" in row:
            lines.append(f"| {row['op']} {shape} | failed: {row['failed']} | | | |")
            continue
        peer = fastest(peers, row)
        cells = ["", ""] if peer is None else [f"{peer['us']:.1f} ({peer['peer']})", f"{row['us'] / peer['us']:.2f}"]
        lines.append(f"| {row['op']} {shape} | {row['us']} | {cells[0]} | {cells[1]} | {row.get('floor_us', '')} |")
    return "\n".join(lines)


def fastest(peers: list[dict], row: dict) -> dict | None:
    """The peer's line of the same op and shape that took least, if any."""
    keys = [key for key in SHAPE if key in row]
    same = [peer for peer in peers if "us" in peer and all(peer.get(key) == row[key] for key in keys)]
    return min(same, key=lambda peer: peer["us"], default=None)


if __name__ == "__main__":
    sys.exit(main())
