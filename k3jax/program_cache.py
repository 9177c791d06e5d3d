"""Compiled steps on disk. JAX's own cache skips XLA but still traces and lowers every program; this one skips both.

A file is named by everything that decides the program: the sources of k3jax, the step's static description, versions,
devices and compiler flags. A file that does not load is compiled anew and replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import pickle
import platform
import tempfile
import threading
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from k3jax.programs import StepProgram
from k3jax.step_inputs import StepShape

logger = logging.getLogger(__name__)
DIGEST_BYTES = 32


def load_or_compile(
    program: StepProgram, shape: StepShape, folder: pathlib.Path | None
) -> tuple[jax.stages.Compiled, bool]:
    """The compiled bucket and whether it came from `folder` (None: always compile)."""
    if folder is None:
        return program.compile(shape), False
    path = folder / f"step-{key(program, shape)}.bin"
    if path.is_file():
        try:
            # The folder is the user's own; like every compile cache it must not be writable by others.
            return _load(pickle.loads(_content(path)), program), True
        except Exception as error:
            logger.warning("%s does not load (%s); compiling again", path, error)
    hits_before = _jax_cache_hits()
    compiled = program.compile(shape)
    if _jax_cache_hits() > hits_before:
        # Came from JAX's own cache. Such an executable must not be serialised again: on a CPU it loses its functions.
        return compiled, True
    try:
        content = pickle.dumps(serialize_executable.serialize(compiled))
        write_whole(path, hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() + content)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        logger.warning("%s could not be written (%s); the next start compiles again", path, error)
    return compiled, False


def load_again(compiled: jax.stages.Compiled, program: StepProgram) -> jax.stages.Compiled:
    """The same program as another executable, which on a GPU has command buffers of its own. Raises what JAX raises."""
    return _load(serialize_executable.serialize(compiled), program)


def _load(stored: tuple[Any, ...], program: StepProgram) -> jax.stages.Compiled:
    # Without the devices it would be loaded for all that the process has, used or not.
    devices = list(program.mesh.devices.flat)
    return serialize_executable.deserialize_and_load(*stored, execution_devices=devices)


_here = threading.local()


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _here.hits = _jax_cache_hits() + 1


def _jax_cache_hits() -> int:
    """Programs that JAX took from its own cache on this thread."""
    return getattr(_here, "hits", 0)


jax.monitoring.register_event_listener(_count_hit)


def _content(path: pathlib.Path) -> bytes:
    """What stands behind the digest. Raises `ValueError`: a flipped bit in machine code would not show by itself."""
    stored = path.read_bytes()
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() != digest:
        raise ValueError("its digest does not fit its content")
    return content


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Whole or not at all: another server may read while this one writes. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def key(program: StepProgram, shape: StepShape) -> str:
    """The name of a compiled bucket: equal only for equal programs."""
    text = repr((_description(program), shape, _surroundings(program))) + _source_hash()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _description(program: StepProgram) -> dict[str, object]:
    """Every field of the program, a later one too, as text that is the same in every process."""
    described: dict[str, object] = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    described["tree"] = [
        (jax.tree_util.keystr(path), spec.shape, spec.axes, spec.kind)
        for path, spec in jax.tree_util.tree_leaves_with_path(program.tree)
    ]
    described["dtype"] = jax.numpy.dtype(program.dtype).name
    described["mesh"] = (
        program.mesh.shape_tuple,
        [(d.id, d.device_kind, d.platform) for d in program.mesh.devices.flat],
    )
    described["ops"] = [(op.__module__, op.__qualname__) for op in dataclasses.astuple(program.ops)]
    return described


def _surroundings(program: StepProgram) -> tuple:
    """Versions, compiler settings and the host."""
    return (
        jax.__version__,
        jaxlib.version.__version__,
        program.mesh.devices.flat[0].client.platform_version,
        jax.config.jax_enable_x64,
        jax.config.jax_default_matmul_precision,
        os.environ.get("XLA_FLAGS", ""),
        _processor(),
    )


@functools.cache
def _source_hash() -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _processor() -> str:
    """Instruction sets of the host: XLA:CPU compiles for exactly these."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
