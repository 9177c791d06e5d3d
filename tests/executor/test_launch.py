"""From flags to an engine: every flag that start-up consumes changes something or is refused (D68)."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import params
from serving import launch
from serving.config import ConfigError, ServeConfig, flag_name
from serving.core.types import GenerationRequest
from serving.core.validation import refuse
from serving.fake_executor import DEFAULT_LIMITS, FakeExecutor
from serving.llm import LLM
from serving.run import main
from tests.executor.device import CONFIG
from tests.k3jax.golden_data import TINY8, random_params, random_tensors, write_checkpoint

TREE = params.abstract(CONFIG)


class Captured(FakeExecutor):
    """Stands in for the compiled programs: keeps what it was built from."""

    def __init__(self, program, weights, limits, *, kernels, cache, store, measures_costs, settings, progress):
        super().__init__(limits)
        self.settings = settings
        self.program, self.weights, self.kernels, self.cache, self.store = program, weights, kernels, cache, store
        self.measures_costs = measures_costs


@pytest.fixture(autouse=True)
def restored_settings(monkeypatch):
    """Start-up changes settings of the process: jax's, and an environment variable."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    names = ("jax_enable_x64", "jax_compilation_cache_dir", "jax_default_prng_impl")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of `CONFIG`."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", CONFIG, random_tensors(CONFIG))


def build(monkeypatch, folder, **flags) -> Captured:
    built = []

    class Remembered(Captured):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            built.append(self)

    monkeypatch.setattr("serving.executor_build.DeviceExecutor", Remembered)
    engine, tokenizer, _ = launch.build_engine(ServeConfig(model=str(folder), **flags))
    engine.shutdown(0.0)
    assert tokenizer is None
    return built[0]


def test_dummy_weights_need_a_configuration_only_and_depend_on_the_seed(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # compiles three times as fast
    first, again, other = (
        dict(params.flatten(build(monkeypatch, tmp_path, load_format="dummy", seed=seed).weights)) for seed in (1, 1, 2)
    )
    assert {p: leaf.shape for p, leaf in first.items()} == {p: s.shape for p, s in params.flatten(TREE)}
    np.testing.assert_array_equal(first["embed",], again["embed",])
    assert (first["embed",] != other["embed",]).any()


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", jnp.float32), ("bfloat16", jnp.bfloat16), ("float64", jnp.float64)]
)
def test_the_dtype_reaches_weights_and_program(monkeypatch, folder, name, dtype):
    executor = build(monkeypatch, folder, dtype=name)
    assert executor.program.dtype == dtype
    assert dict(params.flatten(executor.weights))["embed",].dtype == dtype


def test_sizes_reach_pools_and_limits(monkeypatch, folder):
    flags = {"max_num_seqs": 3, "max_step_tokens": 96, "max_model_len": 300, "num_pages": 12, "num_slots": 3}
    executor = build(monkeypatch, folder, **flags)
    limits, shape = executor.limits, executor.program.cache_shape
    assert (limits.num_rows, limits.max_step_tokens, limits.max_model_len) == (3, 96, 300)
    assert (limits.num_pages, limits.num_slots) == (shape.num_pages, shape.num_slots) == (12, 3)
    assert limits.vocab_size == CONFIG.vocab_size


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ({"num_pages": 3}, "the cache has 2 pages of 64 (--num-pages), which hold 128"),
        ({"num_pages": 3, "max_model_len": 100}, "--max-model-len is 100"),
        ({}, f"the model reads at most {CONFIG.max_position_embeddings}"),
    ],
)
def test_a_prompt_that_never_fits_is_told_which_flag_limits_it(monkeypatch, folder, flags, limit):
    """Also where the pool is so small that it sets the longest sequence."""
    limits = build(monkeypatch, folder, **flags).limits
    longest = GenerationRequest(request_id="r", prompt_token_ids=(1,) * limits.max_model_len, max_tokens=1)
    refusal = refuse(longest, limits)
    assert refusal is not None and f"The prompt is {limits.max_model_len} tokens and {limit}" in refusal.message


def test_a_host_cache_brings_a_store_and_its_identity_says_what_the_weights_are(monkeypatch, folder, tmp_path):
    """D61: keys must differ wherever the bytes would."""
    built = build(monkeypatch, folder, host_cache_gb=0.5)
    assert built.store.capacity_bytes == built.limits.host_cache_bytes == 500_000_000
    assert build(monkeypatch, folder).store is None
    assert build(monkeypatch, folder, host_cache_gb=0.5).limits.identity == built.limits.identity
    other = write_checkpoint(tmp_path / "other", CONFIG, random_tensors(CONFIG))
    others = [
        build(monkeypatch, other),
        build(monkeypatch, folder, dtype="bfloat16"),
        build(monkeypatch, folder, tp=2),
        build(monkeypatch, folder, load_format="dummy"),
    ]
    assert len({built.limits.identity, *(each.limits.identity for each in others)}) == 5


def test_a_host_cache_reaches_the_fake_executor_too(folder):
    """D68: no flag is silently dead."""
    engine, _, _ = launch.build_engine(ServeConfig(model=str(folder), load_format="fake", host_cache_gb=0.5))
    engine.shutdown(0.0)
    assert engine.limits.host_cache_bytes == 500_000_000


def test_the_bound_on_the_queue_reaches_the_engine_and_the_offline_one_has_none(folder):
    def max_unfinished(build) -> int | None:
        engine = build()
        engine.shutdown(0.0)
        return engine.max_unfinished

    settings = {"model": str(folder), "load_format": "fake", "max_num_seqs": 4}
    assert max_unfinished(lambda: launch.build_engine(ServeConfig(**settings))[0]) == 4 + 1024
    assert max_unfinished(lambda: launch.build_engine(ServeConfig(**settings, max_waiting=3))[0]) == 4 + 3
    assert max_unfinished(lambda: launch.build_engine(ServeConfig(**settings, max_waiting=0))[0]) is None
    assert max_unfinished(lambda: LLM(**settings).engine) is None
    assert max_unfinished(lambda: LLM(**settings, max_waiting=3).engine) == 4 + 3


def test_tp_makes_the_mesh_and_places_the_weights(monkeypatch, folder):
    executor = build(monkeypatch, folder, tp=4)
    assert executor.program.mesh.shape == {"tp": 4, "dcp": 1}
    embedding = dict(params.flatten(executor.weights))["embed",]
    assert embedding.sharding.shard_shape(embedding.shape) == (128, 128)
    assert not executor.program.parallel.whole_experts


@pytest.mark.parametrize(("flag", "expected"), [("on", True), ("off", False), ("auto", False)])
def test_shard_latents_reaches_the_program(monkeypatch, folder, flag, expected):
    assert build(monkeypatch, folder, tp=2, shard_latents=flag).program.parallel.shard_latents is expected


def test_experts_stay_whole_where_their_width_does_not_divide(monkeypatch, tmp_path):
    narrow = dataclasses.replace(CONFIG, moe_intermediate_size=64)
    folder = write_checkpoint(tmp_path / "narrow", narrow, random_tensors(narrow))
    assert build(monkeypatch, folder, tp=4).program.parallel.whole_experts


def test_programs_are_kept_where_the_flag_says_else_where_jax_is_told_else_with_the_user(monkeypatch, folder, tmp_path):
    def cache(**flags):
        executor = build(monkeypatch, folder, **flags)
        assert jax.config.jax_compilation_cache_dir == str(executor.cache)
        assert executor.cache.is_dir()
        return executor.cache

    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert cache() == tmp_path / "own"
    assert cache(compile_cache=str(tmp_path / "flag")) == tmp_path / "flag"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", None)
    assert cache() == tmp_path / "home" / "k3jax" / "programs"


def test_the_memory_fraction_beats_the_environment_and_is_refused_on_a_cpu(monkeypatch, folder):
    with pytest.raises(ConfigError, match="--memory-fraction works on a GPU only"):
        build(monkeypatch, folder, memory_fraction=0.25)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


def test_without_a_flag_the_environment_decides_the_memory_fraction(monkeypatch, folder):
    build(monkeypatch, folder)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


@pytest.mark.parametrize(("flags", "fraction"), [({}, 0.5), ({"memory_fraction": 0.25}, 0.25)])
def test_pools_are_planned_with_the_share_that_jax_uses(monkeypatch, folder, flags, fraction):
    """It tells how large the device is, of which jax reports that share only."""
    planned = []

    def plan(*_, memory_fraction, **__):
        planned.append(memory_fraction)
        raise ConfigError("enough seen")

    monkeypatch.setattr("serving.executor_build.plan_sizes", plan)
    with pytest.raises(ConfigError, match="enough seen"):
        build(monkeypatch, folder, **flags)
    assert planned == [fraction]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 3}, r"degree 3 .*does not divide this model.*Nearest degrees that do: 2, 4"),
        ({"tp": 16}, r"tp=16 x dcp=1 needs 16 devices, this process has 8"),
        ({"shard_latents": "on"}, r"--shard-latents=on has no effect on one device"),
        ({"max_model_len": 5000}, r"--max-model-len=5000 exceeds the model's limit"),
        ({"num_pages": 3, "max_model_len": 1000}, r"not enough memory for one request: 1000 tokens need 16 pages"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(monkeypatch, folder, flags, words):
    """D55, D68."""
    with pytest.raises(ValueError, match=words):
        build(monkeypatch, folder, **flags)


@pytest.fixture
def compile_nothing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("programs were compiled")

    monkeypatch.setattr("serving.executor_build.DeviceExecutor", fail)


@pytest.mark.parametrize("load_format", ["auto", "fake"])
@pytest.mark.parametrize(
    ("flag", "value", "fix"),
    [
        ("checkpoint_stride", 64 * 20000, r"Use at most \d+\.$"),
        ("checkpoint_every", 64 * 20000, r"Use at most \d+\.$"),
        ("host_cache_gb", 1e-9, r"Give at least 0\.\d+, or leave it out\.$"),
    ],
)
def test_a_flag_without_effect_on_this_device_is_refused_with_what_would_have_one(
    compile_nothing, folder, load_format, flag, value, fix
):
    """D68."""
    settings: dict[str, Any] = {"model": str(folder), "load_format": load_format, flag: value}
    with pytest.raises(ConfigError, match=f"{flag_name(flag)}={value} has no effect: .*{fix}"):
        launch.build_engine(ServeConfig(**settings))


def test_what_is_advised_instead_has_an_effect():
    limits = dataclasses.replace(DEFAULT_LIMITS, page_bytes=200_000, slot_bytes=3_200_000, host_cache_bytes=3_000_000)
    cases: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
        ({"checkpoint_stride": 65536}, "Use at most 65472.", {"checkpoint_stride": 65472}),
        ({"checkpoint_every": 65536}, "Use at most 65472.", {"checkpoint_every": 65472}),
        ({"host_cache_gb": 0.003}, "take 3400000 bytes. Give at least 0.0034, ", {"host_cache_gb": 0.0034}),
    )
    for refused, words, advised in cases:
        with pytest.raises(ConfigError, match=re.escape(words)):
            launch.check_effects(ServeConfig(**refused), limits)
        launch.check_effects(ServeConfig(**advised), dataclasses.replace(limits, host_cache_bytes=3_400_000))


def test_a_budget_without_a_token_is_refused_before_anything_is_compiled(compile_nothing, folder):
    flags = {"token_budget": "static", "reserve_draft_slots": 8, "max_num_seqs": 8, "max_step_tokens": 64}
    with pytest.raises(ValueError, match=r"leaves no token of a step of 64 .*--max-step-tokens.*--reserve-draft-slots"):
        launch.build_engine(ServeConfig(model=str(folder), **flags))


def test_a_checkpoint_reaches_the_executor_as_it_is_stored(monkeypatch, folder):
    executor = build(monkeypatch, folder)
    assert executor.program.config == CONFIG and executor.program.unstacked
    weights, expected = dict(params.flatten(executor.weights)), dict(params.flatten(random_params(CONFIG)))
    for path in (("embed",), ("moe", "w13_packed"), ("kda", "a_log")):
        np.testing.assert_array_equal(weights[path], expected[path])
    assert {choice.backend for choice in executor.kernels} == {"xla"}


def test_a_missing_shard_is_one_line_and_exit_2(tmp_path, caplog):
    shutil.copytree(TINY8, tmp_path / "model")
    (tmp_path / "model" / "model-00005-of-000009.safetensors").unlink()
    status = main(["--model", str(tmp_path / "model"), "--port", "0", "--compile-cache", str(tmp_path / "cache")])
    assert status == 2
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "model-00005-of-000009.safetensors" in error
    assert "\n" not in error
