"""What one step hands to the host, as one int32 vector: copying every field by itself costs more than planning."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import K3Config
from k3jax.draft_state import Drafting
from k3jax.draft_step import VerifyOutputs
from k3jax.layers import wide_dtype
from k3jax.sampling import MAX_LOGPROBS
from k3jax.step import StepOutputs
from k3jax.step_inputs import StepShape

Outputs = StepOutputs | VerifyOutputs


def layout(shape: StepShape, config: K3Config, dtype, drafting: Drafting | None) -> Outputs:
    """Shapes and dtypes of the fields as the host sees them; `dtype` is that of the activations."""
    lanes, best = (shape.rows,), (min(MAX_LOGPROBS, config.vocab_size),)

    def field(*size: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lanes, *size), dtype)

    wide = wide_dtype(dtype)
    if drafting is None:
        return StepOutputs(
            token=field(),
            is_nan=field(dtype=jnp.bool_),
            logprob=field(dtype=wide),
            top_ids=field(*best),
            top_logprobs=field(*best, dtype=wide),
        )
    targets = shape.tokens_per_row
    return VerifyOutputs(
        token=field(targets),
        count=field(),
        is_nan=field(dtype=jnp.bool_),
        logprob=field(targets, dtype=wide),
        top_ids=field(targets, *best),
        top_logprobs=field(targets, *best, dtype=wide),
        num_drafted=field(),
        boundary=field(),
        survival=field(drafting.tokens, dtype=jnp.float32),
    )


def packed_size(fields: Outputs) -> int:
    """Length of the vector."""
    return sum(map(_num_words, fields))


def _num_words(field: jax.ShapeDtypeStruct) -> int:
    is_float = np.issubdtype(field.dtype, np.floating)
    return math.prod(field.shape) * (np.dtype(field.dtype).itemsize // 4 if is_float else 1)


def pack(outputs: Outputs, fields: Outputs, size: int = 0) -> jax.Array:
    """The fields one after the other, in the program, and zeros behind them if `size` is longer. Raises `ValueError`
    where they are not as `fields` says."""
    for name, value, field in zip(fields._fields, outputs, fields, strict=True):
        is_float = jnp.issubdtype(field.dtype, jnp.floating)
        if value.shape != field.shape or (is_float and value.dtype != field.dtype):
            raise ValueError(f"{name} is {value.dtype}{value.shape}, the host reads {field.dtype}{field.shape}")
    padding = jnp.zeros(max(0, size - packed_size(fields)), jnp.int32)
    return jnp.concatenate([*map(_words, outputs), padding])


def in_place_of(place: jax.Array, vector: jax.Array, never: jax.Array) -> jax.Array:
    """`vector`, and XLA has to take it that the last kernel reads `place`: so that memory is kept for it, where
    otherwise whatever fits would be put in between. `never` is false, which XLA cannot know."""
    return jnp.where(never, place, lax.optimization_barrier(vector))


def _words(value: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return (lax.bitcast_convert_type(value, jnp.int32) if is_float else value.astype(jnp.int32)).ravel()


def unpack(vector: np.ndarray, fields: Outputs) -> Outputs:
    """The fields as views of the vector, on the host."""
    found, start = [], 0
    for field in fields:
        is_float = np.issubdtype(field.dtype, np.floating)
        end = start + _num_words(field)
        part = vector[start:end]
        found.append(
            (part.view(field.dtype) if is_float else part.astype(field.dtype, copy=False)).reshape(field.shape)
        )
        start = end
    return type(fields)(*found)
