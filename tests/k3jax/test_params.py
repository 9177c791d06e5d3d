import collections
import dataclasses
import math

import jax
import numpy as np
import pytest

from k3jax import params, presets
from k3jax.params import STORED_DTYPE
from tests.k3jax.golden_data import mini_config

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
TEXT_BYTES = 1_559_965_598_080  # A_log without its padding
TOTAL_BYTES = 1_560_860_324_864  # `total_size` of the released index


def vision_bytes() -> int:
    """The vision tower and projector of the released model, all bf16."""
    width, inner, blocks = 1024, 4096, 27
    block = 2 * width + 4608 * width + width * 1536 + inner * width + width * inner
    tower = width * 3 * 14 * 14 + 64 * 64 * width + blocks * block + width
    projector = 4096 * 4096 + 7168 * 4096 + 7168
    return 2 * (tower + projector)


@pytest.fixture(scope="module")
def released_sources():
    tree = params.abstract(presets.k3())
    return [(spec, source) for _, spec in params.flatten(tree) for source in spec.sources()]


def test_the_tree_has_the_released_number_of_bytes(released_sources):
    text = sum(math.prod(source.shape) * ITEM_BYTES[STORED_DTYPE[spec.kind]] for spec, source in released_sources)
    assert text == TEXT_BYTES
    padding = sum(4 * (s.padded_to - s.shape[0]) for _, s in released_sources if s.padded_to)
    assert padding == 69 * 32 * 4
    assert text + padding + vision_bytes() == TOTAL_BYTES


def test_the_tree_has_the_released_number_of_tensors_of_each_dtype(released_sources):
    census = collections.Counter(STORED_DTYPE[spec.kind] for spec, _ in released_sources)
    assert (census["U8"], census["F32"]) == (494_592, 506)


def test_every_released_tensor_is_named_once(released_sources):
    names = [source.name for _, source in released_sources]
    assert len(set(names)) == len(names)
    for name in (
        "language_model.lm_head.weight",
        "language_model.model.layers.0.mlp.gate_proj.weight",
        "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale",
        "language_model.model.layers.92.self_attn.kv_a_proj_with_mqa.weight",
        "language_model.model.output_attn_res_proj.weight",
    ):
        assert name in names


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_the_sources_of_a_stack_fill_it_exactly_once(experts):
    for path, spec in params.flatten(params.abstract(mini_config(), experts)):
        hits = np.zeros(spec.shape, np.int8)
        for source in spec.sources():
            assert hits[source.index].size == math.prod(source.shape), path
            hits[source.index] += 1
        assert np.all(hits == 1), path


def test_random_parameters_are_independent_of_each_other():
    """Weights drawn from one stream of numbers would start as copies of each other."""
    tree = params.abstract(mini_config(), "bf16")
    short = params.map_tree(lambda _, spec: dataclasses.replace(spec, shape=(4,), axes=(None,)), tree)
    drawn = dict(params.flatten(params.init(short, jax.random.key(0))))
    by_start = collections.defaultdict(list)
    for path, spec in params.flatten(tree):
        if spec.init not in ("ones", "zeros"):
            by_start[tuple(drawn[path].tolist())].append(path)
    assert [paths for paths in by_start.values() if len(paths) > 1] == []


def test_a_model_without_dense_layers_has_no_dense_stack():
    assert "dense" not in params.abstract(mini_config(first_k_dense_replace=0))
