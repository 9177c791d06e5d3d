"""Routed experts in another format: packed MXFP4, plain bf16, and scales that a source stores as fp32 powers of two."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax import mxfp4

NAN_SCALE = 255
PLAIN_DTYPE = np.dtype(ml_dtypes.bfloat16)
_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class InvalidValuesError(ValueError):
    """Values that the target format cannot hold; the message says which, without the tensor's name."""


def scale_bytes(values: np.ndarray) -> np.ndarray:
    """E8M0 bytes of fp32 powers of two: 2^k becomes k + 127. Raises `InvalidValuesError` for anything else."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    lowest = bits == 1 << 22  # 2^-127 is the one subnormal that a scale byte has
    wrong = ~(((mantissa == 0) & (exponent > 0) & (exponent < NAN_SCALE)) | lowest)  # a sign is above bit 8 of exponent
    if np.any(wrong):
        first = values.reshape(-1)[np.flatnonzero(wrong)[0]]
        raise InvalidValuesError(
            f"has {np.count_nonzero(wrong)} scales that are no powers of two, the first is {first}"
        )
    return exponent.astype(np.uint8)


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 to bf16, exactly. Raises `InvalidValuesError` where bf16 has no such value."""
    if scale.dtype != np.uint8:
        scale = scale_bytes(scale)
    if np.any(scale == NAN_SCALE):
        raise InvalidValuesError(f"has scale byte {NAN_SCALE}, which is NaN")
    weight = _on_host(_decode, packed, scale)
    if np.any(low := scale < 2):
        weight = _with_subnormals(weight, packed, scale, low)
    # The largest scales overflow with the largest codes; nothing else is out of bf16's range.
    if np.any(scale >= 253) and not np.all(np.isfinite(weight.astype(np.float32))):
        raise InvalidValuesError("has scales so large that values overflow bf16")
    return weight


def pack(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and scales of a plain weight; exact for values on the grid, but below 2^-126 all is zero."""
    packed, scale = _on_host(mxfp4.encode, weight)
    if not np.all(np.isfinite(weight.astype(np.float32))):
        raise InvalidValuesError("has values that are not finite")
    return packed, scale


def _with_subnormals(weight: np.ndarray, packed: np.ndarray, scale: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Decode the marked groups anew: compiled code takes the subnormal results of the two lowest scales for zero."""
    weight = weight.copy()
    rows, columns = np.nonzero(groups)
    half = mxfp4.GROUP // 2
    found = packed.reshape(*groups.shape, half)[rows, columns]
    nibbles = np.stack([found & 0xF, found >> 4], axis=-1).reshape(len(rows), mxfp4.GROUP)
    exact = np.ldexp(_CODES[nibbles], scale[rows, columns].astype(np.int32)[:, None] - 127)
    weight.reshape(*groups.shape, mxfp4.GROUP)[rows, columns] = exact.astype(PLAIN_DTYPE)
    return weight


def is_packable(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] % mxfp4.GROUP == 0


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed bytes and of the scales of a plain weight."""
    return (shape[0], shape[1] // 2), (shape[0], shape[1] // mxfp4.GROUP)


def plain_shape(packed_shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*packed_shape[:-1], packed_shape[-1] * 2)


def _decode(packed, scale):
    """One function, not a partial per call: compiled code is kept by function."""
    return mxfp4.decode(packed, scale, dtype=jnp.bfloat16)


def _on_host(function, *arrays: np.ndarray):
    """Run on the CPU whatever the default device is: a conversion needs no accelerator and must not fill one."""
    with jax.default_device(_host()):
        return jax.tree.map(np.asarray, _compiled(function)(*arrays))


@cache
def _host():
    return jax.local_devices(backend="cpu")[0]


@cache
def _compiled(function):
    return jax.jit(function)
