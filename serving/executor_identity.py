"""What decides the bytes of cached state besides the tokens. Servers with the same words may share a store."""

from __future__ import annotations

import dataclasses
import hashlib

import jax

from k3jax import cache
from k3jax.checkpoint_reader import Checkpoint
from k3jax.programs import StepProgram


def state_identity(program: StepProgram, revision: str) -> str:
    """Everything but the tokens that decides the bytes of a page or slot: the root of the state store's keys."""
    return repr(
        (
            program.config,
            revision,
            str(program.dtype),
            cache.PAGE_SIZE,
            [(str(s.dtype), s.shape[2:]) for s in jax.tree.leaves(program.pool_shapes()._replace(records=()))],
            program.mesh.shape_tuple,
            program.parallel,
            None if program.drafting is None else program.drafting.config,
            [(op.__module__, op.__qualname__) for op in dataclasses.astuple(program.ops)],
        )
    )


def weights_revision(checkpoint: Checkpoint) -> str:
    """A digest of what the tensor files say about themselves: names, shapes, places, sizes and times of change."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.offset} {tensor.file.name}".encode())
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
