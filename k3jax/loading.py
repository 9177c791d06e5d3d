"""Checkpoint to parameter tree: everything is checked first, then each tensor is read once and written into its stack.

Stacks are allocated with their sharding before the first byte is read. Pieces of a bounded size are put together on the
host, cast, moved, and written into the donated stack, so a device never holds more than the stacks and one piece.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.checkpoint_reader import Checkpoint, LoadError, open_checkpoint
from k3jax.config import K3Config
from k3jax.params import ExpertFormat, ParamSpec, Source, Tree, abstract, flatten, map_tree
from k3jax.sharding.collectives import SINGLE, Parallel
from k3jax.sharding.mesh import parallel_of
from k3jax.sharding.rules import check_divisible, partition_spec

__all__ = ["LoadError", "Progress", "compute_dtype", "expert_format", "fill", "is_skipped", "load_params"]

SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")  # the vision part: known, not served
MAX_EXPERTS = 112  # per piece: 0.62 GB of one packed weight at K3's widths
MAX_PIECE_BYTES = 704 * 2**20
NAN_SCALE = 255
# A wide parameter that was stored in bf16 is widened; a weight stored in fp32 is rounded to the compute dtype.
_ACCEPTED = {"weight": ("BF16", "F32"), "wide": ("F32", "BF16"), "bytes": ("U8",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far loading is."""

    bytes_read: int
    bytes_total: int

    @property
    def fraction(self) -> float:
        return self.bytes_read / self.bytes_total if self.bytes_total else 1.0


def compute_dtype(name: str) -> jnp.dtype:
    """The dtype of activations for "auto", "float32", "bfloat16" or "float64". Raises `ValueError`."""
    if name == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    if name not in ("float32", "bfloat16", "float64"):
        raise ValueError(f"dtype={name!r} is unknown: pass auto, float32, bfloat16 or float64")
    if name == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "dtype='float64' needs 64-bit types: call jax.config.update('jax_enable_x64', True) first, "
            "or set JAX_ENABLE_X64=1"
        )
    return jnp.dtype(name)


def is_skipped(name: str) -> bool:
    """Whether a checkpoint tensor belongs to the vision part."""
    return name.startswith(SKIPPED_PREFIXES)


def expert_format(checkpoint: Checkpoint) -> ExpertFormat:
    """MXFP4 if any packed expert weight is there; files that cannot be read count by the index's word."""
    names = itertools.chain(checkpoint.tensors, checkpoint.lost)
    return "mxfp4" if any(name.endswith(".weight_packed") for name in names) else "bf16"


def load_params(
    path: str | Path,
    config: K3Config,
    dtype: Any,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Tree:
    """The parameter tree of a model folder, on the default device or sharded over `mesh`.

    `parallel` is needed only to shard latents or to keep experts whole. Raises `LoadError` with every fault of the
    folder, `ConfigError` when the mesh does not divide the model.
    """
    return fill(open_checkpoint(path), config, dtype, mesh, parallel, progress=progress)


def fill(
    checkpoint: Checkpoint,
    config: K3Config,
    dtype: Any,
    mesh: Mesh | None = None,
    parallel: Parallel | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> Tree:
    """`load_params` on an opened checkpoint."""
    tree = abstract(config, expert_format(checkpoint))
    if parallel is None:
        parallel = SINGLE if mesh is None else parallel_of(mesh)
    if parallel.degree > 1:
        check_divisible(tree, config, parallel)
    check(checkpoint, tree)
    return fill_tree(checkpoint, tree, dtype, mesh, parallel, progress=progress, max_piece_bytes=max_piece_bytes)


def fill_tree(
    checkpoint: Checkpoint,
    tree: Tree,
    dtype: Any,
    mesh: Mesh | None = None,
    parallel: Parallel = SINGLE,
    *,
    progress: Callable[[Progress], None] | None = None,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> Tree:
    """The arrays of an abstract tree, whose tensors have been checked; tensors it does not name are left alone.

    Raises `LoadError` for values that cannot be.
    """
    stacks: dict[tuple[str, ...], _Stack] = {}
    pieces = []
    for path, spec in flatten(tree):
        stacks[path] = stack = _Stack(spec, spec.dtype(dtype), parallel, mesh)
        found = [(path, piece) for piece in cut(spec, parallel, stack.dtype.itemsize, max_piece_bytes)]
        if len(found) > 1:
            stack.allocate()
        pieces += found
    # File by file, so that a checkpoint larger than memory is read from the disk once.
    pieces.sort(key=lambda item: str(checkpoint.tensors[item[1].parts[0].source.name].file))

    names = {part.source.name for _, piece in pieces for part in piece.parts}
    total = sum(checkpoint.tensors[name].num_bytes for name in names)
    done = 0
    bad_values: list[str] = []
    for path, piece in pieces:
        is_scale = stacks[path].spec.init == "scales"
        if bad_values and not is_scale:
            continue  # loading has failed; only look for further bad scales
        block = stacks[path].host_block(piece)
        done += read_piece(checkpoint, piece, block, bad_values, is_scale=is_scale)
        if not bad_values:
            stacks[path].write(piece, block)
            if progress:
                progress(Progress(bytes_read=min(done, total), bytes_total=total))
    if bad_values:
        raise LoadError(checkpoint.folder, {"invalid values": bad_values})
    return map_tree(lambda path, _: stacks[path].array, tree)


# --- checks before the first byte ------------------------------------------------------------------------------------
def check(checkpoint: Checkpoint, tree: Tree) -> None:
    """Compare every tensor's name, shape and dtype with the tree. Raises `LoadError` with all differences."""
    problems = find_problems(checkpoint, tree)
    if any(problems.values()):
        raise LoadError(checkpoint.folder, problems)


def find_problems(
    checkpoint: Checkpoint, tree: Tree, accepts: Callable[[ParamSpec, str], bool] | None = None
) -> dict[str, list[str]]:
    """Every difference by kind, the files' own faults included. `accepts(spec, dtype)` adds stored dtypes."""
    problems = {kind: list(found) for kind, found in checkpoint.problems.items()}
    problems |= {"missing tensors": [], "unknown tensors": [], "wrong shapes": [], "wrong dtypes": []}
    wanted: set[str] = set()
    for _, spec in flatten(tree):
        for source in spec.sources():
            assert source.name not in wanted, source.name
            wanted.add(source.name)
            stored = checkpoint.tensors.get(source.name)
            if stored is None:
                if source.name not in checkpoint.lost:
                    problems["missing tensors"].append(source.name)
                continue
            if stored.shape != source.shape and stored.shape != (source.padded_to,):
                expected = f"expected {list(source.shape)}"
                problems["wrong shapes"].append(f"{source.name} is {list(stored.shape)}, {expected}")
            if stored.dtype not in _ACCEPTED[spec.kind] and not (accepts and accepts(spec, stored.dtype)):
                expected = " or ".join(_ACCEPTED[spec.kind])
                problems["wrong dtypes"].append(f"{source.name} is {stored.dtype}, expected {expected}")
    problems["unknown tensors"] = [n for n in checkpoint.tensors if n not in wanted and not is_skipped(n)]
    return problems


# --- pieces ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor's share of a piece: `block[target] = tensor[taken]`."""

    source: Source
    target: tuple[Any, ...]
    taken: tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stack. `start` and `size` are in one rank's coordinates: every rank gets its own box of that place."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    parts: list[Part]


def cut(spec: ParamSpec, parallel: Parallel, item_bytes: int, max_bytes: int) -> Iterator[Piece]:
    """Boxes of at most `max_bytes` over all ranks that together cover the stack exactly once."""
    degrees = _degrees(spec, parallel)
    local = tuple(n // d for n, d in zip(spec.shape, degrees, strict=True))
    size = _piece_size(spec, local, degrees, item_bytes, max_bytes)
    by_lead: dict[tuple[int, ...], list[tuple[Source, tuple[int, ...]]]] = {}
    for source in spec.sources():
        lead = len(source.index)
        inside = tuple(i % n for i, n in zip(source.index, local[:lead], strict=True))
        start = tuple(i // b * b for i, b in zip(inside, size[:lead], strict=True))
        # Ranks' boxes lie one after the other in a block, each as long as the piece is here.
        row = tuple(
            i // n * min(b, n - s) + (j - s)
            for i, j, n, b, s in zip(source.index, inside, local[:lead], size[:lead], start, strict=True)
        )
        by_lead.setdefault(start, []).append((source, row))
    for start, sources in by_lead.items():
        rest = range(len(start), len(local))
        for tail in itertools.product(*(range(0, local[axis], size[axis]) for axis in rest)):
            whole_start = (*start, *tail)
            box = tuple(min(b, n - s) for b, n, s in zip(size, local, whole_start, strict=True))
            segments = [
                [
                    (slice(r * box[a], (r + 1) * box[a]), slice(r * local[a] + s, r * local[a] + s + box[a]))
                    for r in range(degrees[a])
                ]
                for a, s in zip(rest, tail, strict=True)
            ]
            boxes = list(itertools.product(*segments))
            parts = [
                Part(source, (*row, *(target for target, _ in pairs)), tuple(taken for _, taken in pairs))
                for source, row in sources
                for pairs in boxes
            ]
            yield Piece(whole_start, box, parts)


def _degrees(spec: ParamSpec, parallel: Parallel) -> tuple[int, ...]:
    return tuple(parallel.degree if names else 1 for names in partition_spec(spec.axes, parallel))


def _piece_size(spec: ParamSpec, local, degrees, item_bytes: int, max_bytes: int) -> tuple[int, ...]:
    """Largest box per rank: one layer's group of experts, else as many leading rows as fit."""
    size = list(local)
    if "experts" in spec.axes:
        axis = spec.axes.index("experts")
        size[0] = 1
        size[axis] = max(1, min(local[axis], MAX_EXPERTS // degrees[axis]))
    for axis in range(len(size)):
        num_bytes = item_bytes * math.prod(size) * math.prod(degrees)
        if num_bytes <= max_bytes:
            break
        size[axis] = max(1, size[axis] * max_bytes // num_bytes)
    return tuple(size)


def read_piece(checkpoint: Checkpoint, piece: Piece, block: np.ndarray, bad: list[str], *, is_scale: bool) -> int:
    """Fill `block` from the files, casting; returns bytes read. NaN scales and non-zero padding are added to `bad`."""
    num_bytes = 0
    for part in piece.parts:
        source, stored = part.source, checkpoint.tensors[part.source.name]
        if source.padded_to and stored.shape != source.shape:
            tensor = checkpoint.read(source.name)
            if np.any(tensor[source.shape[0] :] != 0):
                bad.append(f"{source.name} has values in its padding, behind entry {source.shape[0]}")
            taken = tensor[: source.shape[0]][part.taken]
        else:
            taken = checkpoint.read(source.name, _stored_box(stored.shape, part.taken))
        # Same elements in the same order; the stored tensor may have an extra axis of one.
        shaped = _squeezed(taken, len(part.taken))
        if is_scale and np.any(shaped == NAN_SCALE):
            bad.append(f"{source.name} has scale byte {NAN_SCALE}, which is NaN")
        block[part.target] = shaped
        num_bytes += shaped.size * taken.dtype.itemsize
    return num_bytes


def _stored_box(shape: tuple[int, ...], taken: tuple[slice, ...]) -> tuple[slice, ...]:
    """`taken` in the axes of the stored tensor, which may have axes of one beside."""
    extra, rest, box = len(shape) - len(taken), iter(taken), []
    for size in shape:
        if extra and size == 1:
            box.append(slice(None))
            extra -= 1
        else:
            box.append(next(rest))
    return tuple(box)


def _squeezed(tensor: np.ndarray, num_axes: int) -> np.ndarray:
    """Drop axes of one, from the front, until `num_axes` are left: [1, D] to [D], [W, 1, J] to [W, J]."""
    while tensor.ndim > num_axes:
        tensor = tensor.squeeze(tensor.shape.index(1))
    return tensor


# --- stacks ----------------------------------------------------------------------------------------------------------
class _Stack:
    """One parameter on the device, allocated before the first write unless it comes in one piece."""

    def __init__(self, spec: ParamSpec, dtype: jnp.dtype, parallel: Parallel, mesh: Mesh | None):
        self.spec, self.dtype, self._mesh = spec, dtype, mesh
        self._degrees = _degrees(spec, parallel)
        self._partition = partition_spec(spec.axes, parallel) if mesh is not None else PartitionSpec()
        self._sharding = NamedSharding(mesh, self._partition) if mesh is not None else None
        self.array: jax.Array | None = None

    def allocate(self) -> None:
        """Claim the memory, so that a model too large for the device fails before anything is read."""
        self.array = jnp.zeros(self.spec.shape, self.dtype, device=self._sharding)

    def host_block(self, piece: Piece) -> np.ndarray:
        """An uninitialised host array for a piece of all ranks."""
        return np.empty([n * d for n, d in zip(piece.size, self._degrees, strict=True)], self.dtype)

    def write(self, piece: Piece, block: np.ndarray) -> None:
        """Move a filled block to its place; the stack is updated in place."""
        if self._sharding is None:
            moved = jax.device_put(block)
        else:
            moved = jax.make_array_from_callback(block.shape, self._sharding, lambda index: block[index])
        if self.array is None:  # the piece is the whole stack
            self.array = moved
            return
        start = np.asarray(piece.start, np.int32)
        self.array = _writer(self._mesh, self._partition)(self.array, moved, start)


@functools.cache
def _writer(mesh: Mesh | None, partition: PartitionSpec) -> Callable:
    """Donating update of a box. Under a mesh every rank writes its own box: no collective, whatever is sharded."""

    def update(stack, block, start):
        return lax.dynamic_update_slice(stack, block, tuple(start))

    if mesh is not None:
        specs = (partition, partition, PartitionSpec())
        update = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=partition, check_vma=False)
    return jax.jit(update, donate_argnums=0)
