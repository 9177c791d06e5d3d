"""Bytes from the source's files into the result's, by a few threads with one small buffer each.

Every thread reads, hashes and writes one tensor at a time, slice by slice: while one waits for the disk another hashes.
So memory is threads x slice however large a tensor is, and no queue is needed to bound it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from k3jax.checkpoint_reader import DTYPES, Checkpoint, StoredTensor
from k3jax.conversion.experts import NAN_SCALE, InvalidValuesError
from k3jax.conversion.recipes import Output, Recipe

SLICE_BYTES = 16 * 2**20
SYNC_BYTES = 128 * 2**20  # of a batch
SYNC_FILES = 64


class InterruptedConversion(Exception):  # noqa: N818 - it is no error
    """The conversion was asked to stop; what is done can be resumed."""


class OutputFile:
    """A file of known size that threads write at different places. Only after `sync` has it survived a power cut."""

    def __init__(self, path: Path, num_bytes: int):
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, num_bytes)  # a full disk shows now; the file stays in one piece
        elif num_bytes:
            os.ftruncate(self._descriptor, num_bytes)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Syncer:
    """Forces written bytes to the disk behind the backs of those who write, who wait once it is two batches behind.

    Left to itself the system would collect gigabytes first. Several files go together, because alone each new file
    would cost the file system a commit of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[OutputFile, bool] = {}  # whether nobody writes it any more
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._running: list[Future[None]] = []

    def wrote(self, file: OutputFile, num_bytes: int, *, is_last: bool) -> None:
        """Note bytes of a file. It is closed once it is on the disk, if these were its last."""
        with self._lock:
            self._files[file] = is_last
            self._bytes += num_bytes
            if self._bytes < SYNC_BYTES and len(self._files) < SYNC_FILES:
                return
            before = self._start()
        for batch in before[:-1]:
            batch.result()

    def flush(self) -> None:
        """Return when everything noted so far is on the disk."""
        with self._lock:
            batches = self._start()
        for batch in batches:
            batch.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _start(self) -> list[Future[None]]:
        """Begin a batch of all files noted; it and those before it that are not done."""
        files, self._files, self._bytes = self._files, {}, 0
        self._running = [batch for batch in self._running if not batch.done() or batch.exception()]
        self._running.append(self._pool.submit(_sync_files, files))
        return list(self._running)


def _sync_files(files: Mapping[OutputFile, bool]) -> None:
    in_parallel(OutputFile.sync, files)
    for file, is_last in files.items():
        if is_last:
            file.close()


def in_parallel[T](act: Callable[[T], None], items: Iterable[T]) -> None:
    """Many small waits for the disk at once, which it serves together."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(act, items):
            pass


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A place for bytes: a range of an open file, or a file of its own that may be longer than its bytes."""

    num_bytes: int
    offset: int = 0
    shared: OutputFile | None = None
    path: Path | None = None
    file_bytes: int = 0


class Sink:
    """Writes one tensor's bytes in order into its extents."""

    def __init__(self, extents: Iterable[Extent], syncer: Syncer):
        self._extents, self._syncer = iter(extents), syncer
        self._extent: Extent | None = None
        self._file: OutputFile | None = None
        self._written = 0

    def write(self, data: memoryview) -> None:
        while data:
            if self._extent is None:
                self._open_next()
            extent, file = self._extent, self._file
            assert extent is not None and file is not None
            part = data[: extent.num_bytes - self._written]
            file.write(part, extent.offset + self._written)
            self._written += len(part)
            data = data[len(part) :]
            is_through = self._written == extent.num_bytes
            if is_through:
                self._extent = self._file = None
            self._syncer.wrote(file, len(part), is_last=is_through and extent.shared is None)

    def _open_next(self) -> None:
        extent = next(self._extents)
        assert extent.shared or extent.path
        self._extent, self._written = extent, 0
        self._file = extent.shared or OutputFile(Path(extent.path or ""), extent.file_bytes)

    def abandon(self) -> None:
        """Close a file that was not finished."""
        if self._file is not None and self._extent is not None and self._extent.shared is None:
            self._syncer.flush()  # it may be at this very file
            self._file.close()

    @property
    def is_full(self) -> bool:
        return self._extent is None and next(self._extents, None) is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentRules:
    """What content is refused. `used` has, for a vector that is padded with zeros, how many entries are not padding."""

    used: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def fault(self, name: str, tensor: StoredTensor, data: np.ndarray, position: int) -> str | None:
        """What is wrong with the bytes `data` of a tensor, which start at byte `position` of it."""
        if name.endswith(".weight_scale") and tensor.dtype == "U8":
            return f"has scale byte {NAN_SCALE}, which is NaN" if np.any(data == NAN_SCALE) else None
        if (used := self.used.get(name)) is not None:
            padding = data[max(0, used * DTYPES[tensor.dtype].itemsize - position) :]
            return f"has values in its padding, behind entry {used}" if np.any(padding) else None
        return None

    def concern(self, recipe: Recipe) -> bool:
        """Whether the content of a recipe's inputs can be wrong."""
        return recipe.convert is not None or recipe.inputs[0] in self.used or recipe.inputs[0].endswith(".weight_scale")


class Stream:
    """Runs recipes on the threads it owns; `with` ends them. Faults of content are collected, by `faults`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rules: ContentRules | None = None,
        digests: Mapping[str, str] | None = None,
        workers: int,
        slice_bytes: int = SLICE_BYTES,
        stop: threading.Event | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ):
        self.faults: list[str] = []
        self._checkpoint, self._rules, self._slice_bytes = checkpoint, rules or ContentRules(), slice_bytes
        self._digests = digests or {}  # what the source says its tensors hash to
        self._stop, self._on_bytes = stop or threading.Event(), on_bytes
        self._failed = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        self._syncer = Syncer()
        self._local = threading.local()
        self._lock = threading.Lock()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._failed.set()
        self._pool.shutdown(cancel_futures=True)
        self._syncer.close()

    def run(self, recipes: Iterable[Recipe], extents: Callable[[Output], Iterable[Extent]] | None) -> dict[str, str]:
        """SHA-256 of every output, which is on the disk in `extents(output)`, or nowhere when that is None.

        Bytes in a file that several outputs share are left to the caller to sync.
        """
        futures = [self._pool.submit(self._one, recipe, extents) for recipe in recipes]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            self._failed.set()  # the others end at their next slice
            wait([future for future in futures if not future.cancel()])
            self._failed.clear()
        self._syncer.flush()
        errors = [e for future in futures if not future.cancelled() and (e := future.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, InterruptedConversion)), errors[0])
        return {name: digest for future in futures for name, digest in future.result().items()}

    def _one(self, recipe: Recipe, extents: Callable[[Output], Iterable[Extent]] | None) -> dict[str, str]:
        sinks = {output: Sink(extents(output), self._syncer) for output in recipe.outputs} if extents else {}
        try:
            found = self._copy(recipe, sinks) if recipe.convert is None else self._convert(recipe, sinks)
            assert self.faults or all(sink.is_full for sink in sinks.values()), recipe
            return found
        except BaseException:
            for sink in sinks.values():
                sink.abandon()
            raise

    def can_refuse(self, recipe: Recipe) -> bool:
        """Whether reading the recipe's inputs can find a fault."""
        return bool(self._digests) or self._rules.concern(recipe)

    def _copy(self, recipe: Recipe, sinks: Mapping[Output, Sink]) -> dict[str, str]:
        (output,) = recipe.outputs
        digest = hashlib.sha256()
        for data in self._read(recipe.inputs[0]):
            digest.update(data)
            self._write(sinks, output, data)
        self._compare(recipe.inputs[0], digest.hexdigest())
        return {output.name: digest.hexdigest()}

    def _compare(self, name: str, digest: str) -> None:
        if self._digests.get(name, digest) != digest:
            self._add_fault(f"{name} does not have the SHA-256 that the manifest says")

    def _convert(self, recipe: Recipe, sinks: Mapping[Output, Sink]) -> dict[str, str]:
        assert recipe.convert is not None
        try:
            results = recipe.convert(*(self._read_whole(name) for name in recipe.inputs))
        except InvalidValuesError as error:
            self._add_fault(f"{recipe.inputs[0]} {error}")
            return {}
        digests = {}
        for output, result in zip(recipe.outputs, results, strict=True):
            assert result.shape == output.shape and result.dtype == DTYPES[output.dtype], (output, result.shape)
            data = memoryview(np.ascontiguousarray(result).reshape(-1).view(np.uint8))
            digests[output.name] = hashlib.sha256(data).hexdigest()
            self._write(sinks, output, data)
        return digests

    def _write(self, sinks: Mapping[Output, Sink], output: Output, data: memoryview) -> None:
        # After a fault nothing is kept; reading goes on to find the others.
        if output in sinks and not self.faults:
            sinks[output].write(data)

    def _read_whole(self, name: str) -> np.ndarray:
        tensor = self._checkpoint.tensors[name]
        whole = np.empty(tensor.num_bytes, np.uint8)
        position = 0
        for data in self._read(name):
            whole[position : position + len(data)] = data
            position += len(data)
        if name in self._digests:
            self._compare(name, hashlib.sha256(whole).hexdigest())
        return whole.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _read(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes in slices; each is valid until the next."""
        tensor, position, faults = self._checkpoint.tensors[name], 0, set()
        buffer = self._buffer()
        for path, offset, num_bytes in tensor.extents():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                end = offset + num_bytes
                _advise(descriptor, offset, num_bytes, "POSIX_FADV_SEQUENTIAL")
                while offset < end:
                    if self._stop.is_set() or self._failed.is_set():
                        raise InterruptedConversion
                    data = buffer[: min(len(buffer), end - offset)]
                    # The disk reads on while this slice is hashed and written.
                    _advise(descriptor, offset + len(data), len(buffer), "POSIX_FADV_WILLNEED")
                    done = os.preadv(descriptor, [data], offset)
                    if not done:
                        raise OSError(f"{path} ends at byte {offset}, inside {name}: it was cut off meanwhile")
                    data = data[:done]
                    fault = self._rules.fault(name, tensor, np.frombuffer(data, np.uint8), position)
                    if fault and fault not in faults:
                        faults.add(fault)
                        self._add_fault(f"{name} {fault}")
                    yield data
                    offset, position = offset + done, position + done
                    if self._on_bytes:
                        with self._lock:
                            self._on_bytes(done)
                # The source is read once; its pages would push out what others on the machine use.
                _advise(descriptor, end - num_bytes, num_bytes, "POSIX_FADV_DONTNEED")
            finally:
                os.close(descriptor)

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(np.empty(self._slice_bytes, np.uint8))
        return self._local.buffer

    def _add_fault(self, fault: str) -> None:
        with self._lock:
            self.faults.append(fault)


def _advise(descriptor: int, offset: int, num_bytes: int, advice: str) -> None:
    """Tell the page cache what comes, where the system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, num_bytes, getattr(os, advice))
