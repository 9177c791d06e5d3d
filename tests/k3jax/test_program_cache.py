"""Compiled programs on disk: found again, and never loaded from a damaged file."""

import dataclasses
import secrets

import jax
import jax.numpy as jnp
import pytest

from k3jax import mla_serving, params, presets, program_cache
from k3jax.cache import CacheShape
from k3jax.draft_state import Drafting
from k3jax.pallas import dispatch
from k3jax.programs import StepProgram
from k3jax.sharding.mesh import make_mesh, parallel_of
from k3jax.step_inputs import StepShape
from tests.k3jax.draft_models import draft_config


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
    monkeypatch.setattr(program_cache, "key", lambda program, shape: "key")
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


def step_program(**changes) -> StepProgram:
    """A step with a draft, never compiled here."""
    config = presets.tiny_mesh()
    draft = draft_config("gqa", target_hidden_size=config.hidden_size)
    mesh = make_mesh()
    fields: dict = {
        "config": config,
        "cache_shape": CacheShape(num_rows=2, num_pages=9, num_slots=5, pages_per_row=4),
        "tree": params.abstract(config),
        "dtype": jnp.float32,
        "mesh": mesh,
        "parallel": parallel_of(mesh),
        "drafting": Drafting(config=draft, tokens=3),
    }
    return StepProgram(**fields | changes)


def other(name: str):
    """Another value of the field `name`."""
    fields = {field.name: getattr(step_program(), field.name) for field in dataclasses.fields(StepProgram)}
    return {
        "config": lambda: dataclasses.replace(fields["config"], rms_norm_eps=1e-3),
        "cache_shape": lambda: dataclasses.replace(fields["cache_shape"], num_pages=10),
        "tree": lambda: params.abstract(fields["config"], "bf16"),
        "dtype": lambda: jnp.bfloat16,
        "mesh": lambda: make_mesh(2),
        "parallel": lambda: parallel_of(make_mesh(2)),
        "ops": lambda: dispatch.Ops(mla_decode=mla_serving.decode_by_row),
        "mixed_batch": lambda: "gather",
        "drafting": lambda: dataclasses.replace(fields["drafting"], rule="block"),
        "unstacked": lambda: not fields["unstacked"],
    }[name]()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(StepProgram)])
def test_every_field_of_a_program_tells_it_from_others(name):
    """A program found under another's name would run with the wrong weights' shapes, or the wrong rule, unnoticed."""
    shape = StepShape(rows=2, prefill_tokens=0, drafts=3)
    assert program_cache.key(step_program(), shape) == program_cache.key(step_program(), shape)
    changed = step_program(**{name: other(name)})
    assert program_cache.key(changed, shape) != program_cache.key(step_program(), shape)


def test_another_draft_of_the_same_block_is_another_program():
    shape = StepShape(rows=2, prefill_tokens=0, drafts=3)
    drafting = step_program().drafting
    assert drafting is not None
    draft = dataclasses.replace(drafting.config, markov_rank=drafting.config.markov_rank + 8)
    changed = step_program(drafting=dataclasses.replace(drafting, config=draft))
    assert program_cache.key(changed, shape) != program_cache.key(step_program(), shape)


def test_a_program_can_be_loaded_again_to_take_turns_with_itself(program):
    first, _ = program_cache.load_or_compile(program, StepShape(rows=8, prefill_tokens=0), None)
    second = program_cache.load_again(first, program)
    assert second is not first and program.num_compiled == 1
    for compiled in (first, second):
        assert (compiled(jnp.arange(3.0)) - program.offset).tolist() == [0.0, 2.0, 4.0]
