"""Compiled programs on disk: found again, and never loaded from a damaged file."""

import secrets

import jax
import jax.numpy as jnp
import pytest

from k3jax import program_cache
from k3jax.sharding.mesh import make_mesh
from k3jax.step_inputs import StepShape


class CountingProgram:
    """Compiles something small instead of a step, and counts. One of the process's eight devices is used."""

    mesh = make_mesh()

    def __init__(self) -> None:
        self.num_compiled = 0
        self.offset = float(secrets.randbelow(1 << 20))  # no run has compiled this before, so JAX's cache has it not

    def compile(self, shape) -> jax.stages.Compiled:
        self.num_compiled += 1
        return jax.jit(lambda x: x * 2 + self.offset).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


@pytest.fixture
def program(monkeypatch) -> CountingProgram:
    monkeypatch.setattr(program_cache, "_key", lambda program, shape: "key")
    return CountingProgram()


def run(program, folder):
    compiled, was_loaded = program_cache.load_or_compile(program, StepShape(rows=8, prefill_tokens=0), folder)
    assert (compiled(jnp.arange(3.0)) - program.offset).tolist() == [0.0, 2.0, 4.0]
    return was_loaded


def test_a_program_is_compiled_once_and_then_loaded(program, tmp_path):
    assert [run(program, tmp_path) for _ in range(3)] == [False, True, True]
    assert program.num_compiled == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-key.bin"]


def test_what_jax_itself_had_in_its_cache_is_used_but_not_stored_again(program, tmp_path):
    """XLA:CPU loses the functions of an executable that is serialised a second time."""
    run(program, tmp_path)
    (tmp_path / "step-key.bin").unlink()
    assert run(program, tmp_path) is True
    assert program.num_compiled == 2 and not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_kept(program):
    assert run(program, None) is False
    assert run(program, None) is False and program.num_compiled == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_compiled_again_and_replaced(program, tmp_path, damage):
    run(program, tmp_path)
    path = tmp_path / "step-key.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": bytes(content), "cut": bytes(content[:100]), "empty": b""}[damage])
    program.offset += 1  # else JAX's own cache would answer
    assert run(program, tmp_path) is False
    assert run(program, tmp_path) is True


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(program, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(program, blocked) is False
