"""A written draft reads back as it was, in configuration and in every tensor."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from k3jax.draft_config import DraftConfig
from k3jax.draft_loading import load_draft, open_draft
from k3jax.draft_rope import Rope, Yarn
from k3jax.draft_train_export import to_hf, write_draft
from tests.k3jax.draft_models import KINDS, draft_config, random_draft
from tests.k3jax.draft_training import tiny_draft
from tests.k3jax.tiny_training import tiny_config


def as_written(config: DraftConfig) -> DraftConfig:
    return DraftConfig.from_hf(json.loads(json.dumps(to_hf(config))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_of_every_kind_reads_back(kind):
    for changes in ({}, {"target_num_hidden_layers": 6}, {"stream": "prefix"}, {"has_confidence": False}):
        config = draft_config(kind, **changes)
        read = as_written(config)
        for name in ("amplitude", "score_factor"):
            assert getattr(read.rope, name) == pytest.approx(getattr(config.rope, name), rel=1e-14)
        assert dataclasses.replace(read, rope=config.rope) == config
        assert dataclasses.replace(read.rope, amplitude=1.0, score_factor=1.0) == dataclasses.replace(
            config.rope, amplitude=1.0, score_factor=1.0
        )


def test_a_rope_that_scales_both_ways_reads_back():
    yarn = Yarn(factor=4.0, original_max_position_embeddings=128, beta_fast=16.0, beta_slow=2.0)
    rope = Rope(theta=5e3, pairs="half", yarn=yarn, amplitude=1.3, score_factor=1.21)
    read = as_written(draft_config("gqa", rope=rope)).rope
    assert (read.theta, read.pairs, read.yarn) == (rope.theta, rope.pairs, rope.yarn)
    assert (read.amplitude, read.score_factor) == pytest.approx((1.3, 1.21), rel=1e-14)


@pytest.mark.parametrize("kind", ["gqa", "gqa_window", "mla_tap_norm"])
def test_every_tensor_reads_back_through_the_loader(kind, tmp_path):
    config = tiny_draft(kind)
    params = random_draft(config, dtype=np.float32)
    files = write_draft(params, config, tmp_path)
    assert sorted(path.name for path in files) == ["config.json", "model.safetensors"]
    folder = open_draft(tmp_path, tiny_config())
    assert dataclasses.replace(folder.config, rope=config.rope) == config
    read = load_draft(folder, np.float32)
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_weights_are_rounded_to_bf16_to_nearest(tmp_path):
    config = tiny_draft()
    params = jax.tree.map(lambda x: x + np.float32(1e-3), random_draft(config, dtype=np.float32))
    write_draft(params, config, tmp_path)
    read = load_draft(open_draft(tmp_path, tiny_config()), np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(ml_dtypes.bfloat16)), read, params)


def test_the_target_s_tables_are_not_written(tmp_path):
    config = tiny_draft()
    write_draft(random_draft(config, dtype=np.float32), config, tmp_path)
    stored = open_draft(tmp_path, tiny_config()).checkpoint.tensors
    assert not any("embed" in name or "lm_head" in name for name in stored)
    assert "markov_head.markov_w1.weight" in stored and "layers.0.self_attn.q_proj.weight" in stored


def test_parameters_that_do_not_fit_are_refused_by_name(tmp_path):
    config = tiny_draft()
    params = random_draft(config, dtype=np.float32)
    params["context"]["proj"] = params["context"]["proj"][:, 1:]
    params["extra"] = params["norm"]
    del params["confidence"]["bias"]
    with pytest.raises(ValueError, match=r"confidence.bias is missing; context.proj has shape .* extra is unknown"):
        write_draft(params, config, tmp_path)
    assert not list(tmp_path.iterdir())
