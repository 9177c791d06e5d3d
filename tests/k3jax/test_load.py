"""Loading: what arrives in the stacks, in which dtype, on which device, from which layout of files."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import k3jax
from k3jax import loading, mxfp4, params
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.sharding.collectives import SINGLE
from k3jax.sharding.mesh import make_mesh, parallel_of
from tests.k3jax.golden_data import (
    TINY8,
    golden_model,
    mini_config,
    random_params,
    random_tensors,
    stored_tensors,
    write_checkpoint,
)

CONFIG = mini_config()
TREE = params.abstract(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mini"), CONFIG, random_tensors(CONFIG))


def assert_same(got: params.Tree, expected: params.Tree) -> None:
    got_leaves, expected_leaves = dict(params.flatten(got)), dict(params.flatten(expected))
    assert got_leaves.keys() == expected_leaves.keys()
    for path, value in expected_leaves.items():
        np.testing.assert_array_equal(got_leaves[path], value, err_msg=".".join(path))


def test_every_tensor_arrives_in_its_place(folder):
    loaded = loading.load_params(folder, CONFIG, jnp.float32)
    assert_same(loaded, random_params(CONFIG))


@pytest.mark.parametrize("num_shards", [2, 5])
def test_sharded_files_load_like_a_single_one(tmp_path, num_shards):
    write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG), num_shards)
    assert_same(loading.load_params(tmp_path, CONFIG, jnp.float32), random_params(CONFIG))


@pytest.mark.parametrize("max_piece_bytes", [200, 3000])
def test_stacks_filled_in_small_pieces_are_the_same(folder, max_piece_bytes):
    """D51: tensors larger than a piece are read by slices."""
    tree = loading.fill(open_checkpoint(folder), CONFIG, jnp.float32, max_piece_bytes=max_piece_bytes)
    assert_same(tree, random_params(CONFIG))


@pytest.mark.parametrize("max_piece_bytes", [64, 3000, 2**20])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_pieces_cover_every_stack_once_and_stay_within_their_size(max_piece_bytes, whole_experts):
    parallel = dataclasses.replace(parallel_of(make_mesh(2)), whole_experts=whole_experts)
    for path, spec in params.flatten(TREE):
        for degree_of in (SINGLE, parallel):
            item_bytes = spec.dtype(jnp.float32).itemsize
            read = {source.name: np.zeros(source.shape, np.int8) for source in spec.sources()}
            for piece in loading.cut(spec, degree_of, item_bytes, max_piece_bytes):
                values = int(np.prod(piece.size))
                assert values == 1 or values * item_bytes <= max_piece_bytes, path
                for part in piece.parts:
                    target = read[part.source.name]
                    loading._squeezed(target, len(part.taken))[part.taken] += 1
            assert all(np.all(count == 1) for count in read.values()), path


def test_padded_a_log_is_cut_to_the_heads(tmp_path):
    tensors = random_tensors(CONFIG)
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = np.pad(tensors[name], (0, 128 - CONFIG.kda_num_heads))
    write_checkpoint(tmp_path, CONFIG, tensors)
    assert_same(loading.load_params(tmp_path, CONFIG, jnp.float32), random_params(CONFIG))


def test_the_fp32_set_stays_wide_in_bf16_even_when_stored_in_bf16(tmp_path):
    """D53."""
    tensors = random_tensors(CONFIG)
    narrow = next(name for name in tensors if name.endswith("dt_bias"))
    tensors[narrow] = tensors[narrow].astype(ml_dtypes.bfloat16)
    loaded = loading.load_params(write_checkpoint(tmp_path, CONFIG, tensors), CONFIG, jnp.bfloat16)
    wide = {path: leaf.dtype for path, leaf in params.flatten(loaded) if leaf.dtype == jnp.float32}
    assert set(wide) == {
        ("kda", "conv"),
        ("kda", "a_log"),
        ("kda", "dt_bias"),
        ("kda", "out_norm"),
        ("moe", "router_bias"),
    }
    assert_same(loaded, random_params(CONFIG))


def test_float64_stacks_hold_the_stored_values(x64, folder):
    loaded = loading.load_params(folder, CONFIG, jnp.float64)
    assert loaded["kda"]["a_log"].dtype == loaded["embed"].dtype == jnp.float64
    assert_same(loaded, random_params(CONFIG))


@pytest.mark.parametrize("max_piece_bytes", [2000, 2**20])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_loading_onto_a_mesh_gives_the_same_values_divided(folder, whole_experts, max_piece_bytes):
    mesh = make_mesh(2)
    parallel = parallel_of(mesh, whole_experts=whole_experts)
    tree = loading.fill(open_checkpoint(folder), CONFIG, jnp.float32, mesh, parallel, max_piece_bytes=max_piece_bytes)
    assert_same(tree, random_params(CONFIG))
    experts = tree["moe"]["w13_packed"]
    assert experts.addressable_shards[0].data.shape[1:4] == ((3, 2, 64) if whole_experts else (6, 2, 32))
    assert {shard.device for shard in experts.addressable_shards} == set(mesh.devices.flat)


def test_bf16_experts_load_and_give_the_logits_of_the_packed_ones(tmp_path, folder):
    """Which of the two a checkpoint has is decided by its tensors, not by its configuration."""
    packed = random_params(CONFIG)
    plain = {**packed, "moe": dict(packed["moe"])}
    for name in ("w13", "w2"):
        codes, scale = (jnp.asarray(plain["moe"].pop(f"{name}_{part}")) for part in ("packed", "scale"))
        plain["moe"][name] = np.asarray(mxfp4.decode(codes, scale, jnp.float32))
    tensors = stored_tensors(params.abstract(CONFIG, "bf16"), plain)
    both = k3jax.load(write_checkpoint(tmp_path, CONFIG, tensors)), k3jax.load(folder)
    assert [model.experts for model in both] == ["bf16", "mxfp4"]
    assert_same(both[0].params, plain)
    ids = np.arange(20) % CONFIG.vocab_size
    np.testing.assert_array_equal(both[0].logits(ids), both[1].logits(ids))


def test_vision_tensors_are_skipped_and_reported(tmp_path):
    extra = {
        "vision_tower.patch_embed.proj.weight": np.ones((2, 3), np.float32),
        "mm_projector.proj.0.weight": np.ones(4),
    }
    model = k3jax.load(write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG) | extra))
    assert model.skipped == ("mm_projector.proj.0.weight", "vision_tower.patch_embed.proj.weight")
    assert_same(model.params, random_params(CONFIG))


def test_progress_reaches_the_end_and_never_goes_back(folder):
    seen: list[loading.Progress] = []
    loading.load_params(folder, CONFIG, jnp.float32, progress=seen.append)
    assert seen[-1].fraction == 1.0
    assert seen[-1].bytes_total == sum(tensor.nbytes for tensor in random_tensors(CONFIG).values())
    assert [p.bytes_read for p in seen] == sorted(p.bytes_read for p in seen)


# --- the public object ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mini(folder):
    return k3jax.load(folder)


def test_no_module_has_the_name_of_a_public_object():
    """Importing `k3jax.load` the module would replace `k3jax.load` the function."""
    assert [name for name in k3jax.__all__ if importlib.util.find_spec(f"k3jax.{name}")] == []
    assert k3jax.load is k3jax.api.load


@pytest.mark.slow
def test_the_golden_model_loads_and_gives_the_published_logits():
    model = k3jax.load(TINY8)
    assert model.tokenizer is None and model.skipped == () and model.dtype == jnp.float32
    logits = model.logits(golden_model()["input_ids_b"])
    assert logits.shape == (1, 37, 512)
    np.testing.assert_allclose(logits, golden_model()["logits_b"], rtol=0, atol=2e-3)


def test_logits_of_one_sequence_and_of_a_batch_agree(mini):
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 30))
    batch = mini.logits(ids)
    assert batch.shape == (2, 30, CONFIG.vocab_size) and batch.dtype == jnp.float32
    for row, one in zip(batch, ids, strict=True):
        np.testing.assert_allclose(mini.logits(one.tolist()), row, rtol=0, atol=1e-4)


def test_lengths_of_one_bucket_share_a_program_and_padding_changes_nothing(mini):
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 64)
    np.testing.assert_array_equal(mini.logits(ids[:17]), mini.logits(ids)[:17])


def test_logits_on_a_mesh_equal_those_of_one_device(folder, mini):
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 40)
    divided = k3jax.load(folder, mesh=make_mesh(2))
    np.testing.assert_allclose(divided.logits(ids), mini.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 96], "token id 96 is outside the vocabulary of 96"),
        ([[1, -1]], "token id -1 is outside"),
        ([0.5], "pass integers"),
        ([], "at least one token"),
        (7, "pass [T] or [B, T]"),
        ([[1, 2], [3]], "rows of different lengths"),
        ([0] * 513, "exceed max_position_embeddings=512"),
    ],
)
def test_wrong_ids_are_refused_with_the_reason(mini, ids, message):
    with pytest.raises(ValueError) as error:
        mini.logits(ids)
    assert message in str(error.value)


def test_auto_is_float32_on_a_cpu_and_unknown_dtypes_are_refused(folder):
    assert loading.compute_dtype("auto") == jnp.float32
    assert loading.compute_dtype("bfloat16") == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype='int4' is unknown: pass auto"):
        k3jax.load(folder, dtype="int4")


def test_float64_without_64_bit_types_says_how_to_get_them(folder):
    assert not jax.config.jax_enable_x64
    with pytest.raises(ValueError, match="jax_enable_x64"):
        k3jax.load(folder, dtype="float64")
