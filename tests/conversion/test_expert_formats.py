"""`--experts`: MXFP4 to bf16 exactly, and back to the same bytes; the configuration says which it is."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import k3jax
from k3jax import convert, mxfp4
from k3jax.checkpoint_reader import open_checkpoint
from k3jax.checkpoint_writer import released_config
from k3jax.conversion import experts
from tests.conversion.conversion_data import CONFIG, EXPERTS, arrays, change, contents, leftovers, mini
from tests.k3jax.golden_data import random_tensors

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TO_BF16, TO_MXFP4 = convert.Options(experts="bf16"), convert.Options(experts="mxfp4")


def every_pair(scale: int) -> tuple[np.ndarray, np.ndarray]:
    """All 256 packed bytes under one scale, with a 6 in every group of 32 so that encoding must pick that scale."""
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    packed = np.concatenate([packed, np.full((16, 16), 0x7F, np.uint8)])
    packed[:, 0] |= 0x07
    return packed, np.full((32, 1), scale, np.uint8)


def expected(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return CODES[nibbles] * 2.0 ** (np.repeat(scale, 32, axis=1).astype(float) - 127)


@pytest.mark.parametrize("scale", [0, 1, 2, 3, 64, 120, 126, 127, 128, 200, 250, 252])
def test_every_byte_unpacks_exactly_and_packs_to_itself(scale):
    """The two lowest scales have values below bf16's normal range: exact as bf16, but zero to the encoder."""
    packed, scales = every_pair(scale)
    weight = experts.unpack(packed, scales)
    assert weight.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight.astype(np.float64), expected(packed, scales))
    if scale > 1:
        again = experts.pack(weight)
        np.testing.assert_array_equal(again[0], packed)
        np.testing.assert_array_equal(again[1], scales)


def test_scales_beyond_bf16_are_refused():
    with pytest.raises(experts.InvalidValuesError, match="overflow bf16"):
        experts.unpack(*every_pair(254))
    packed, scales = every_pair(254)
    small = experts.unpack(packed & 0x22, scales)  # codes of 1 still fit
    np.testing.assert_array_equal(small.astype(np.float64), expected(packed & 0x22, scales))


def test_fp32_scales_of_every_byte_are_read_back():
    """D48."""
    scales = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(experts.scale_bytes(np.ldexp(np.float32(1), scales.astype(np.int32) - 127)), scales)
    for wrong in (0.0, -1.0, 3.0, np.inf, np.nan, 2.0**-128):
        with pytest.raises(experts.InvalidValuesError):
            experts.scale_bytes(np.array([1, wrong], np.float32))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with MXFP4 experts whose scales encoding chooses again: every group has a largest code of 6."""
    tensors = random_tensors(CONFIG)
    for name in tensors:
        if name.endswith("weight_packed"):
            tensors[name][:, ::16] |= 0x07
    folder = mini(tmp_path_factory.mktemp("packed") / "source", tensors)
    (folder / "config.json").write_text(json.dumps(released_config(CONFIG, packed=True), indent=2) + "\n")
    return folder


def test_mxfp4_to_bf16_and_back_is_the_same_folder(tmp_path, packed):
    convert.to_orbax(packed, tmp_path / "plain", TO_BF16)
    convert.to_hf(tmp_path / "plain", tmp_path / "plain-hf")
    convert.to_hf(tmp_path / "plain-hf", tmp_path / "again", TO_MXFP4)
    assert convert.verify(packed, tmp_path / "again") == []
    assert "quantization_config" not in json.loads((tmp_path / "plain-hf" / "config.json").read_text())["text_config"]
    assert contents(tmp_path / "again")["config.json"] == contents(packed)["config.json"]
    assert convert.verify(tmp_path / "plain") == convert.verify(tmp_path / "plain-hf") == []


def test_converted_weights_are_those_of_the_packed_ones(tmp_path, packed):
    convert.to_hf(packed, tmp_path / "plain", TO_BF16)
    before, after = arrays(packed), arrays(tmp_path / "plain")
    for name, value in after.items():
        if name in before:
            np.testing.assert_array_equal(value, before[name], err_msg=name)
            continue
        codes, scale = jnp.asarray(before[f"{name}_packed"]), jnp.asarray(before[f"{name}_scale"])
        np.testing.assert_array_equal(value, np.asarray(mxfp4.decode(codes, scale, jnp.bfloat16)), err_msg=name)
    converted = [name for name in after if name not in before]
    assert len(converted) == 3 * CONFIG.num_experts * 2  # two layers with experts


def test_the_converted_folders_load_and_say_which_format_they_have(tmp_path, packed):
    convert.to_orbax(packed, tmp_path / "plain", TO_BF16)
    plain, direct = k3jax.load(tmp_path / "plain"), k3jax.load(packed)
    assert (plain.experts, direct.experts) == ("bf16", "mxfp4")
    codes, scale = direct.params["moe"]["w2_packed"], direct.params["moe"]["w2_scale"]
    np.testing.assert_array_equal(plain.params["moe"]["w2"], mxfp4.decode(codes, scale, jnp.float32))


def test_keeping_a_format_that_is_there_already_changes_nothing(tmp_path, packed):
    convert.to_hf(packed, tmp_path / "same", TO_MXFP4)
    assert contents(tmp_path / "same") == contents(packed)


def test_experts_that_cannot_be_converted_are_all_named(tmp_path):
    source = mini(tmp_path / "source", experts="bf16")
    name, other = EXPERTS + "0.w1.weight", EXPERTS + "5.w2.weight"
    for changed, value in ((name, np.nan), (other, np.inf)):
        weight = open_checkpoint(source).read(changed).copy()
        weight[0, 0] = value
        change(source, changed, weight)
    with pytest.raises(k3jax.LoadError) as error:
        convert.to_orbax(source, tmp_path / "out", TO_MXFP4)
    assert error.value.problems == {"invalid values": [f"{n} has values that are not finite" for n in (name, other)]}
    assert leftovers(tmp_path / "out") == []


def test_nan_scales_are_found_while_unpacking(tmp_path, packed):
    """D48."""
    source = mini(tmp_path / "source")
    name = EXPERTS + "1.w3.weight_scale"
    scales = open_checkpoint(source).read(name).copy()
    scales[0, 0] = 255
    change(source, name, scales)
    with pytest.raises(k3jax.LoadError, match="has scale byte 255, which is NaN"):
        convert.to_orbax(source, tmp_path / "out", TO_BF16)
    assert leftovers(tmp_path / "out") == []


def test_a_second_weight_of_the_same_shape_compiles_nothing():
    packed, scale = every_pair(120)
    experts.unpack(packed, scale)
    before = experts._compiled.cache_info().currsize
    experts.unpack(packed, scale)
    assert experts._compiled.cache_info().currsize == before
