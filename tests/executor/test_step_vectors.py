"""The vectors that carry a step's inputs and outputs, with pinned memory of the CPU's own."""

import logging
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from k3jax.programs import REPLICATED
from k3jax.sharding.mesh import make_mesh
from serving import step_vectors
from serving.step_vectors import StepVectors

SIZE = 7


def program(*, reads_host_memory: bool):
    mesh = make_mesh()
    kind = "pinned_host" if reads_host_memory else None
    sharding = NamedSharding(mesh, REPLICATED, memory_kind=kind)
    return types.SimpleNamespace(mesh=mesh, reads_host_memory=reads_host_memory, vector_sharding=sharding)


def words(first: int) -> np.ndarray:
    return np.arange(first, first + SIZE, dtype=np.int32)


@pytest.fixture
def pinned() -> StepVectors:
    return StepVectors(program(reads_host_memory=True), SIZE)  # pyright: ignore[reportArgumentType]


def test_inputs_are_written_where_the_program_reads_them(pinned):
    first = pinned.filled(words(1))
    address = first.unsafe_buffer_pointer()
    np.testing.assert_array_equal(first.addressable_shards[0].data, words(1))
    second = pinned.filled(words(100))
    assert second is first and second.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(step_vectors._view(second), words(100))


def test_outputs_that_were_read_make_place_for_later_ones(pinned):
    assert np.array_equal(pinned.place(), np.zeros(SIZE))
    outputs = jnp.asarray(words(5))
    pinned.started(outputs)
    assert pinned.place() is not outputs, "the host has not read them"
    pinned.started(outputs)
    pinned.read(outputs)
    assert pinned.place() is outputs
    assert pinned.place() is not outputs, "they are taken"


def test_outputs_of_a_step_that_was_forgotten_are_not_replaced(pinned):
    forgotten = jnp.asarray(words(5))
    pinned.started(forgotten)
    pinned.reset()
    pinned.read(forgotten)
    assert pinned.place() is not forgotten


def test_inputs_wait_for_the_step_that_reads_the_ones_before(pinned, monkeypatch):
    waited = []
    monkeypatch.setattr(step_vectors.jax, "block_until_ready", waited.append)
    outputs = jnp.asarray(words(5))
    pinned.filled(words(1))
    assert not waited
    pinned.started(outputs)
    pinned.filled(words(2))
    assert len(waited) == 1 and waited[0] is outputs
    pinned.read(outputs)
    pinned.filled(words(3))
    assert len(waited) == 1, "what the host has read has ended"


def test_memory_that_cannot_be_written_in_place_is_uploaded_and_said_so(monkeypatch, caplog):
    def unknown(_):
        raise RuntimeError("no address")

    monkeypatch.setattr(step_vectors, "_view", unknown)
    with caplog.at_level(logging.WARNING):
        vectors = StepVectors(program(reads_host_memory=True), SIZE)  # pyright: ignore[reportArgumentType]
    assert "uploads" in caplog.text
    first, second = vectors.filled(words(1)), vectors.filled(words(2))
    assert first is not second
    np.testing.assert_array_equal(first.addressable_shards[0].data, words(1))


def test_without_pinned_memory_a_step_gets_the_hosts_array():
    vectors = StepVectors(program(reads_host_memory=False), SIZE)  # pyright: ignore[reportArgumentType]
    packed = words(1)
    assert vectors.filled(packed) is packed and vectors.place() == ()
