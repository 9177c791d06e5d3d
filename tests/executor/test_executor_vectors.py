"""The vectors that carry a step's inputs and outputs; pinned memory is the CPU's own here."""

import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from k3jax.programs import REPLICATED
from k3jax.sharding.mesh import make_mesh
from serving import executor_vectors
from serving.executor_pinned import PinnedVector
from serving.executor_vectors import StepVectors

SIZE = 7


def program(*, keeps: bool):
    return types.SimpleNamespace(mesh=make_mesh(), keeps_outputs_in_place=keeps)


def words(first: int) -> np.ndarray:
    return np.arange(first, first + SIZE, dtype=np.int32)


@pytest.fixture
def kept() -> StepVectors:
    return StepVectors(program(keeps=True), SIZE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [1, 7, 688])
def test_a_program_reads_what_the_host_wrote_last(size):
    vector = PinnedVector(size, NamedSharding(make_mesh(), REPLICATED))
    double = jax.jit(lambda x: 2 * x)
    addresses = set()
    for first in range(5):
        values = np.arange(first, first + size, dtype=np.int32)
        array = vector.write(values)
        addresses.add(array.unsafe_buffer_pointer())
        np.testing.assert_array_equal(double(array), 2 * values)
    assert len(addresses) == 1, "a command buffer names the address"


def test_memory_outlives_the_arrays_that_were_lent():
    vector = PinnedVector(SIZE, NamedSharding(make_mesh(), REPLICATED))
    vector.write(words(1)).delete()
    vector.write(words(2))
    np.testing.assert_array_equal(vector._owner.addressable_shards[0].data, words(2))


def test_a_process_may_end_while_the_memory_is_lent():
    code = """
import numpy as np
from jax.sharding import NamedSharding
from k3jax.programs import REPLICATED
from k3jax.sharding.mesh import make_mesh
from serving.executor_pinned import PinnedVector
array = PinnedVector(8, NamedSharding(make_mesh(), REPLICATED)).write(np.arange(8, dtype=np.int32))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]  # of a crash one in five had it
    assert [process.wait() for process in processes] == [0] * 4


def test_inputs_wait_for_the_step_that_reads_the_ones_before(kept, monkeypatch):
    waited = []
    monkeypatch.setattr(executor_vectors.jax, "block_until_ready", waited.append)
    outputs = jnp.asarray(words(5))
    kept.filled(words(1))
    assert not waited
    kept.started(outputs)
    kept.filled(words(2))
    assert len(waited) == 1 and waited[0] is outputs
    kept.read(outputs)
    kept.filled(words(3))
    assert len(waited) == 1, "what the host has read has ended"


def test_outputs_that_were_read_make_place_for_later_ones(kept):
    assert np.array_equal(kept.place(), np.zeros(SIZE))
    outputs = jnp.asarray(words(5))
    kept.started(outputs)
    assert kept.place() is not outputs, "the host has not read them"
    kept.read(outputs)
    assert kept.place() is outputs
    assert kept.place() is not outputs, "they are taken"


def test_outputs_of_a_step_that_was_forgotten_are_not_replaced(kept):
    forgotten = jnp.asarray(words(5))
    kept.started(forgotten)
    kept.reset()
    kept.read(forgotten)
    assert kept.place() is not forgotten


def test_memory_that_cannot_be_read_in_place_is_uploaded_and_said_so(monkeypatch, caplog):
    def refuse(size, sharding):
        raise ValueError("not seen")

    monkeypatch.setattr(executor_vectors, "PinnedVector", refuse)
    with caplog.at_level(logging.WARNING):
        vectors = StepVectors(program(keeps=True), SIZE)  # pyright: ignore[reportArgumentType]
    assert "uploads" in caplog.text and "not seen" in caplog.text
    packed = words(1)
    assert vectors.filled(packed) is packed
    assert np.array_equal(vectors.place(), np.zeros(SIZE))


def test_where_nothing_is_kept_a_step_gets_the_hosts_array():
    vectors = StepVectors(program(keeps=False), SIZE)  # pyright: ignore[reportArgumentType]
    packed = words(1)
    assert vectors.filled(packed) is packed and vectors.place() == ()
    vectors.started(jnp.asarray(packed))
    assert vectors.place() == ()
