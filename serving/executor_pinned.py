"""A vector in the host's memory that programs on devices read in place, and that the host may write again."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_DLPACK_INT = 0


class PinnedVector:
    """Words of 32 bits, one copy for each device of a replicated sharding.

    JAX has no array that can be written, so the memory of a pinned one is taken by its address, and handed to JAX once
    more as an array of the device, which reads pinned memory as its own. What a program sees is what stands there
    while it runs: the caller waits for it before writing.
    """

    def __init__(self, size: int, sharding: NamedSharding) -> None:
        """Raises `ValueError` where a device does not see what the host writes."""
        pinned = NamedSharding(sharding.mesh, sharding.spec, memory_kind="pinned_host")
        self._owner = jax.block_until_ready(jax.device_put(np.zeros(size, np.int32), pinned))
        shards = [shard.data for shard in self._owner.addressable_shards]
        self._views = [_words_at(shard.unsafe_buffer_pointer(), size) for shard in shards]
        arrays = [jax.dlpack.from_dlpack(_Lent(x.unsafe_buffer_pointer(), size, x.device)) for x in shards]
        self._array = jax.make_array_from_single_device_arrays((size,), sharding, arrays)
        self._check()

    def _check(self) -> None:
        invert = jax.jit(lambda x: ~x)
        for first in (1, -7):
            pattern = np.arange(first, first + self._array.shape[0], dtype=np.int32)
            seen = invert(self.write(pattern))
            if any(not np.array_equal(~pattern, np.asarray(shard.data)) for shard in seen.addressable_shards):
                raise ValueError("a device does not see what the host wrote to pinned memory")

    def write(self, values: np.ndarray) -> jax.Array:
        """Put `values` there; returns the array that programs read them from, the same at every call."""
        for view in self._views:
            view[:] = values
        return self._array


def _words_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(address))


# Called when an array is dropped, at the end of the process too, when no function of Python's can be called any more. A
# C function that does nothing with what it is given: the memory is the vector's.
_NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value


class _Tensor(ctypes.Structure):  # DLManagedTensor of DLPack's C header
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Lent:
    """Memory by its address, as DLPack hands it over."""

    def __init__(self, address: int, size: int, device: Any) -> None:
        self._device = (_DLPACK_CPU if device.platform == "cpu" else _DLPACK_CUDA, device.local_hardware_id or 0)
        self._shape = (ctypes.c_int64 * 1)(size)
        self._tensor = _Tensor(
            data=address,
            device_type=self._device[0],
            device_id=self._device[1],
            ndim=1,
            code=_DLPACK_INT,
            bits=32,
            lanes=1,
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            strides=None,
            byte_offset=0,
            context=None,
            deleter=_NOTHING,
        )
        # Both are read when the array is dropped, which may be after Python has freed what it had: they stay for ever.
        for kept in (self._shape, self._tensor):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)
