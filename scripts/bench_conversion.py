"""Time conversion on full-width Kimi K3 tensors against `cp` + fsync of the same files on the same disk.

Writes a synthetic checkpoint (random bytes, valid scales) of three whole layers with fewer experts: one KDA layer
with a dense block, one KDA and one MLA layer with experts. Every measured command starts with its source dropped from
the page cache and ends when its result is on the disk. The folder is removed afterwards.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from k3jax.checkpoint_reader import INDEX_FILE  # noqa: E402
from k3jax.checkpoint_writer import released_config  # noqa: E402
from k3jax.config import K3Config  # noqa: E402
from k3jax.released_layout import ReleasedTensor, released_tensors, shard_header  # noqa: E402
from serving.option_types import OneLineParser, whole  # noqa: E402

# K3's widths; two KDA layers, the first dense, and an MLA layer.
WIDTHS = {
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "num_hidden_layers": 3,
    "kda_layers": (0, 1),
    "mla_layers": (2,),
    "kda_num_heads": 96,
    "kda_head_dim": 128,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 33_792,
    "num_experts_per_token": 16,
    "moe_intermediate_size": 3072,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 3584,
    "attn_res_block_size": 12,
    "max_position_embeddings": 4096,
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "pad_token_id": 163_839,
}
BLOCK = 2**24
CONVERT = str(REPOSITORY / "scripts" / "convert_checkpoint.py")


def main() -> None:
    arguments = OneLineParser(description=__doc__)
    arguments.add_argument(
        "folder", type=new_folder, help="empty or new folder on the disk to measure; 4 x the size is needed"
    )
    arguments.add_argument(
        "--experts",
        type=whole(WIDTHS["num_experts_per_token"]),
        default=100,
        help="experts of a layer (default: %(default)s)",
    )
    arguments.add_argument("--repeats", type=whole(1), default=1, help="rounds of all commands (default: %(default)s)")
    args = arguments.parse_args()
    source, copy, orbax, back = (args.folder / name for name in ("source", "copy", "orbax", "back"))
    try:
        num_bytes = write_source(source, args.experts)
        print(f"{num_bytes / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards")
        for _ in range(args.repeats):
            base = measure("cp + fsync", ["cp", "-r", str(source), str(copy)], source, copy, num_bytes)
            shutil.rmtree(copy)
            python = [sys.executable, CONVERT]
            measure("to-orbax", [*python, "to-orbax", str(source), str(orbax)], source, orbax, num_bytes, base)
            measure("to-hf", [*python, "to-hf", str(orbax), str(back)], orbax, back, num_bytes, base)
            for shard in source.glob("*.safetensors"):
                subprocess.run(["cmp", shard, back / shard.name], check=True)
            shutil.rmtree(orbax)
            shutil.rmtree(back)
    finally:
        for place in (source, copy, orbax, back):
            shutil.rmtree(place, ignore_errors=True)


def new_folder(text: str) -> Path:
    """Make the folder. One with anything in it is refused, since everything is deleted at the end."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {error}. Name another folder.") from None
    if not is_empty:
        raise argparse.ArgumentTypeError(f"{text!r} is not empty. Name a new or an empty folder.")
    return folder


def write_source(folder: Path, num_experts: int) -> int:
    """The released layout for these widths; returns the bytes of its shards."""
    config = K3Config(**WIDTHS, num_experts=num_experts)
    folder.mkdir()
    shards: dict[str, list[ReleasedTensor]] = {}
    for tensor in released_tensors(config):
        shards.setdefault(tensor.file, []).append(tensor)
    rng, used, written = np.random.default_rng(0), config.kda_num_heads * 4, 0
    for file, tensors in shards.items():
        with (folder / file).open("wb") as stream:
            stream.write(shard_header((t.name, t.dtype, t.shape) for t in tensors))
            for tensor in tensors:
                for first in range(0, tensor.num_bytes, BLOCK):
                    block = rng.integers(0, 256, min(BLOCK, tensor.num_bytes - first), np.uint8)
                    if tensor.name.endswith("weight_scale"):
                        block = block // 32 + 120
                    if tensor.name.endswith("A_log"):
                        block[used:] = 0
                    stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            written += stream.tell()
    weight_map = {t.name: file for file, tensors in shards.items() for t in tensors}
    index = {
        "metadata": {"total_size": sum(t.num_bytes for ts in shards.values() for t in ts)},
        "weight_map": weight_map,
    }
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(released_config(config, packed=True)))
    return written


def measure(
    name: str, command: list[str], source: Path, target: Path, num_bytes: int, base: float | None = None
) -> float:
    """Run a command on a cold source; print and return its rate in bytes per second."""
    each_file(source, drop)
    os.sync()  # what others wrote must not be paid for here
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, process.returncode, usage = os.wait4(process.pid, 0)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    each_file(target, os.fsync)
    seconds = time.monotonic() - begun
    peak = usage.ru_maxrss * 1024
    ratio = "" if base is None else f", {100 * num_bytes / seconds / base:.0f} % of cp"
    rate, cpu = num_bytes / seconds, usage.ru_utime + usage.ru_stime
    print(
        f"{name}: {seconds:.1f} s, {rate / 1e6:.0f} MB/s{ratio}, peak {peak / 1e9:.2f} GB, {cpu:.0f} CPU seconds",
        flush=True,
    )
    return num_bytes / seconds


def each_file(folder: Path, act) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                act(descriptor)
            finally:
                os.close(descriptor)


def drop(descriptor: int) -> None:
    """Forget a file's cached pages; only clean ones can go."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
