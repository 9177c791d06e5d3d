"""`convert_checkpoint.py inspect`: what is in a checkpoint, what does not fit, and the memory that it needs."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from k3jax.cache import PAGE_SIZE
from k3jax.checkpoint_reader import MAX_LISTED
from k3jax.config import ConfigError, K3Config
from k3jax.draft_config import DraftConfig, target_problems
from k3jax.inspect_checkpoint import Inspection, Total, inspect, summary
from k3jax.memory_estimate import RankMemory, parameter_bytes, rank_memory
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.mesh import AXES
from k3jax.sharding.rules import check_divisible, choose_parallel
from serving.config import ConfigError as ServeConfigError
from serving.config import ServeConfig
from serving.sizing import MEMORY_FRACTION, plan_sizes

HELP = "configuration, totals by part and dtype, missing and unknown names, memory per rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="model folder (Hugging Face or Orbax), or a config.json alone")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree to estimate for (default: 1)")
    parser.add_argument("--dcp", type=int, default=1, help="decode-context-parallel degree (default: 1)")
    parser.add_argument(
        "--shard-latents", choices=["auto", "on", "off"], default="auto", help="as for the server (default: auto)"
    )
    parser.add_argument(
        "--device-memory-gb", type=float, metavar="GB", help="memory of one device in 10^9 bytes: says whether it fits"
    )
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="requests at once (default: the server's)")
    parser.add_argument("--target", type=Path, metavar="FOLDER", help="the target that a draft must fit")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 when the checkpoint is complete, 1 when something does not fit its configuration."""
    found = inspect(args.source)
    if args.target is not None:
        found = dataclasses.replace(found, problems=found.problems | _against(found, args.target))
    report = describe(found) | {"memory": estimate(found, args)}
    print(json.dumps(report, indent=1) if args.json else "\n".join(_lines(report)))
    return 1 if found.problems else 0


def describe(found: Inspection) -> dict[str, Any]:
    """The inspection as JSON."""
    return {
        "source": str(found.source),
        "expected_only": found.is_expected,
        "configuration": summary(found.folder.model),
        "files": found.num_files,
        "total": dataclasses.asdict(found.total),
        "parts": {name: dataclasses.asdict(total) for name, total in found.parts.items()},
        "dtypes": {name: dataclasses.asdict(total) for name, total in found.dtypes.items()},
        "problems": found.problems,
    }


def _against(found: Inspection, target: Path) -> dict[str, list[str]]:
    """The reasons why a draft does not fit `target`."""
    if not isinstance(found.folder.model, DraftConfig):
        raise ConfigError(f"--target={target} is for drafts; {found.source} is none")
    problems = target_problems(found.folder.model, K3Config.from_file(target))
    return {"does not fit the target": problems} if problems else {}


def estimate(found: Inspection, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes per rank in bfloat16, and what is left of a device. Raises `ConfigError` for a mesh that cannot be."""
    for flag, value in (("--tp", args.tp), ("--dcp", args.dcp), ("--max-num-seqs", args.max_num_seqs)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}={value} must be at least 1")
    if args.device_memory_gb is not None and args.device_memory_gb <= 0:
        raise ConfigError(f"--device-memory-gb={args.device_memory_gb} must be positive")
    model, sizes = found.folder.model, (args.tp, args.dcp)
    if isinstance(model, K3Config):
        shard = {"auto": None, "on": True, "off": False}[args.shard_latents]
        parallel = choose_parallel(model, sizes, shard)
        if parallel.degree > 1:
            check_divisible(found.tree, model, parallel)
        memory = rank_memory(found.tree, model, jnp.bfloat16, parallel)
    else:
        parallel = Parallel(axes=AXES, sizes=sizes)
        memory = RankMemory(parameters=parameter_bytes(found.tree, jnp.bfloat16, parallel))
    result = {
        "tp": args.tp,
        "dcp": args.dcp,
        "latents_sharded": parallel.shard_latents,
        "experts_whole": parallel.whole_experts,
        "parameter_bytes": memory.parameters,
        "cache_bytes_per_token": memory.token,
        "cache_bytes_per_request": memory.slot,
    }
    if args.device_memory_gb is None:
        return result
    limit = int(args.device_memory_gb * 1e9 * MEMORY_FRACTION)
    left = limit - memory.parameters
    result |= {"device_memory_gb": args.device_memory_gb, "left_bytes": left}
    if left < 0:
        return result | {"fits": False, "reason": f"the server may use {limit:,} bytes, the parameters take more"}
    if isinstance(model, K3Config):
        device = _Device(bytes_limit=limit, bytes_in_use=memory.parameters)
        return result | _fit(found.source, model, parallel, device, args.max_num_seqs)
    return result | {"fits": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Device:
    """What `plan_sizes` asks of a GPU, with the weights on it."""

    bytes_limit: int
    bytes_in_use: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}


def _fit(source: Path, model: K3Config, parallel: Parallel, device: _Device, num_rows: int | None) -> dict[str, Any]:
    """How the server would divide the device, or why it would not start."""
    try:
        sizes = plan_sizes(ServeConfig(model=str(source), max_num_seqs=num_rows), model, jnp.bfloat16, parallel, device)
    except ServeConfigError as error:
        return {"fits": False, "reason": str(error)}
    shape = sizes.cache_shape
    return {
        "fits": True,
        "max_num_seqs": shape.num_rows,
        "slots": shape.num_slots - 1,
        "cache_tokens": (shape.num_pages - 1) * PAGE_SIZE,
    }


# --- text ------------------------------------------------------------------------------------------------------------
def _lines(report: dict[str, Any]) -> list[str]:
    files = f"{report['files']} file{'s' if report['files'] != 1 else ''}"
    what = "configuration only; the tensors it stands for" if report["expected_only"] else files
    lines = [f"{report['source']}: {what}", ""]
    lines += [f"{name:<18}{value}" for name, value in report["configuration"].items()]
    lines += ["", f"{'part':<32}{'tensors':>9}{'bytes':>20}{'parameters':>20}"]
    for group in (report["parts"], report["dtypes"], {"total": report["total"]}):
        lines += [_row(name, Total(**total)) for name, total in group.items()] + [""]
    for kind, found in report["problems"].items():
        lines.append(f"{kind} ({len(found)}):")
        lines += [f"  {problem}" for problem in found[:MAX_LISTED]]
        if len(found) > MAX_LISTED:
            lines.append(f"  and {len(found) - MAX_LISTED} more (--json lists all)")
    if not report["problems"] and not report["expected_only"]:
        lines.append("every tensor is there, none is unknown, shapes and dtypes fit")
    return lines + _memory_lines(report["memory"])


def _row(name: str, total: Total) -> str:
    return f"{name:<32}{total.tensors:>9,}{total.bytes:>20,}{total.parameters:>20,}"


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    latents = "sharded" if memory["latents_sharded"] else "replicated"
    experts = "whole" if memory["experts_whole"] else "sliced"
    mesh = f"tp {memory['tp']}, dcp {memory['dcp']}"
    lines = [
        f"memory per rank at {mesh}, bfloat16, latents {latents}, experts {experts}:",
        f"  parameters          {memory['parameter_bytes']:>20,}",
    ]
    if memory["cache_bytes_per_request"]:
        lines += [
            f"  cache per request   {memory['cache_bytes_per_request']:>20,}",
            f"  cache per token     {memory['cache_bytes_per_token']:>20,.0f}",
        ]
    if "fits" not in memory:
        return lines
    device = f"{memory['device_memory_gb']:g} GB"
    if not memory["fits"]:
        return [*lines, f"  does not fit {device}: {memory['reason']}"]
    device += f", {memory['left_bytes']:,} bytes beside the parameters"
    if "slots" not in memory:
        return [*lines, f"  fits {device}"]
    pools = f"{memory['cache_tokens']:,} tokens of cache, {memory['slots']} slots"
    return [*lines, f"  fits {device}: {memory['max_num_seqs']} requests at once, {pools}"]
