"""Repacking of expert weights and the plan of rows and tiles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import moe, mxfp4
from k3jax.pallas import expert_ops, expert_plan, expert_repack, expert_unpack
from k3jax.pallas.expert_repack import CODE_MASK, MAX_SCALE_BYTE
from k3jax.pallas.expert_tiles import tile_rows

make_plan = jax.jit(expert_plan.make_plan, static_argnums=(1, 2))
repack = jax.jit(expert_ops.repack)


def packed(seed: int = 0, experts: int = 2, latent: int = 256, inner: int = 128) -> moe.Experts:
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int, *shape: int):
        return jnp.asarray(rng.integers(low, high, shape, dtype=np.uint8))

    return moe.Experts(
        draw(0, 256, experts, 2, inner, latent // 2),
        draw(0, 256, experts, latent, inner // 2),
        draw(0, MAX_SCALE_BYTE + 1, experts, 2, inner, latent // 32),
        draw(0, MAX_SCALE_BYTE + 1, experts, latent, inner // 32),
    )


def test_repacking_keeps_every_byte_and_its_inverse_gives_them_back():
    experts = packed()
    repacked = repack(experts)
    for before, after in zip(experts[:4], repacked[:4], strict=True):
        assert before is not None and after is not None
        assert before.size * before.dtype.itemsize == after.size * after.dtype.itemsize
    for words, scales, codes, exponents, in_pairs in (
        (repacked.w13, repacked.w13_scale, experts.w13, experts.w13_scale, (0, 2, 1, 3, 4)),
        (repacked.w2, repacked.w2_scale, experts.w2, experts.w2_scale, (0, 1, 2, 3, 4)),
    ):
        for got, want in zip(expert_repack.unpack(words, scales), (codes, exponents), strict=True):
            in_order = np.transpose(np.asarray(got), in_pairs)
            np.testing.assert_array_equal(in_order.reshape(-1), np.asarray(want).reshape(-1))


def test_repacking_a_slice_of_the_inner_width_is_a_slice_of_the_repacked():
    """A rank repacks its own slice of F."""
    experts = packed(inner=256)
    whole = repack(experts)
    half = moe.Experts(experts.w13[:, :, 128:], experts.w2[..., 64:], *_halved_scales(experts))
    part = repack(half)
    np.testing.assert_array_equal(part.w13, whole.w13[:, 2:])
    np.testing.assert_array_equal(part.w2, whole.w2[:, :, 1:])
    np.testing.assert_array_equal(part.w13_scale, whole.w13_scale[:, 2:])
    np.testing.assert_array_equal(part.w2_scale, whole.w2_scale[:, :, 1:])


def _halved_scales(experts: moe.Experts):
    assert experts.w13_scale is not None and experts.w2_scale is not None
    return experts.w13_scale[:, :, 128:], experts.w2_scale[..., 4:]


def test_unpacked_tiles_are_the_exact_weights():
    """As the interpreter computes them, against mxfp4; every code with scales from 2^-126 to 2."""
    rng = np.random.default_rng(1)
    codes = jnp.asarray(rng.integers(0, 256, (1, 128, 64), dtype=np.uint8))
    scale = jnp.asarray(rng.integers(1, MAX_SCALE_BYTE + 1, (1, 128, 4), dtype=np.uint8))
    words, scales = expert_repack.repack_w2(codes), expert_repack.repack_w2_scale(scale)
    for half in range(2):
        lefts = expert_unpack.left_operands(words[0, 0, 0, half], scales[0, 0, 0, half], is_interpreted=True)
        got = np.concatenate([np.asarray(left, np.float32) for left in lefts], axis=1)
        want = np.asarray(mxfp4.decode(codes, scale, jnp.float32))[0, 64 * half : 64 * half + 64]
        normal = np.abs(want) >= 2.0**-125  # XLA on a CPU flushes smaller ones
        np.testing.assert_array_equal(got[normal], want[normal])


def test_shifting_two_words_at_once_equals_shifting_each_where_it_is_kept():
    words = np.arange(1 << 16, dtype=np.uint32)
    other = np.random.default_rng().permutation(words)
    both = words | (other << 16)
    for by, mask in ((3, CODE_MASK), (6, CODE_MASK), (1, 0x8000), (-5, 0x0100), (-4, 0x00C0)):
        shifted = both << by if by > 0 else both >> -by
        for lane, alone in ((shifted & 0xFFFF, words), (shifted >> 16, other)):
            each = (alone << by if by > 0 else alone >> -by) & mask
            np.testing.assert_array_equal(lane & mask, each)


def test_a_code_read_as_bfloat16_is_its_value_times_a_power_of_two():
    """Subnormal for 0.5, so not for a CPU to multiply; here by its bits."""
    codes = np.arange(16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 6)
    fraction = (bits & 0x7F) / 128
    exponent = (bits >> 7) & 0xFF
    value = np.where(exponent == 0, fraction * 2.0**-126, (1 + fraction) * np.exp2(exponent - 127.0))
    value = np.where(bits >> 15, -value, value) * 2.0**126
    want = np.asarray(
        mxfp4.decode(
            jnp.asarray(codes, jnp.uint8).repeat(16)[:, None].reshape(16, 16), jnp.full((16, 1), 127, jnp.uint8)
        )
    )
    np.testing.assert_array_equal(value, want[:, 0].astype(np.float64))


def test_scales_above_two_and_nan_are_recognised():
    assert expert_repack.scales_fit(jnp.asarray([0, MAX_SCALE_BYTE], jnp.uint8))
    assert not expert_repack.scales_fit(jnp.asarray([MAX_SCALE_BYTE + 1], jnp.uint8))
    assert not expert_repack.scales_fit(jnp.asarray([255], jnp.uint8))


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(-2, 6), min_size=4, max_size=4), min_size=16, max_size=16),
    tile=st.sampled_from([8, 24]),
)
def test_a_plan_gives_every_live_pair_one_row_inside_the_tiles_of_its_expert(ids, tile):
    experts, num = np.asarray(ids, np.int32), 5
    plan = make_plan(jnp.asarray(experts), num, tile)
    source, place = np.asarray(plan.source), np.asarray(plan.place)
    count = int(plan.num_tiles[0])
    assert count <= len(plan.tile_expert)
    covered: dict[int, int] = {}  # row -> expert
    for expert, first, rows in itertools.islice(zip(*(np.asarray(x) for x in plan[2:5]), strict=True), count):
        assert first % 8 == 0 and rows % 8 == 0 and 0 < rows <= tile
        assert first + tile <= len(source)
        for row in range(first, first + rows):
            assert row not in covered
            covered[row] = int(expert)
    is_live = (experts >= 0) & (experts < num)
    np.testing.assert_array_equal(place >= 0, is_live)
    assert len(set(place[is_live].tolist())) == is_live.sum()
    for token, rank in zip(*np.nonzero(is_live), strict=True):
        assert source[place[token, rank]] == token
        assert covered[int(place[token, rank])] == experts[token, rank]
    wanted = {e: -(-int((experts == e).sum()) // 8) * 8 for e in range(num)}
    assert {e: list(covered.values()).count(e) for e in range(num)} == wanted


@pytest.mark.parametrize(("pairs", "rows"), [(16, 8), (16 * 144, 8), (16 * 1024, 24), (16 * 8192, 80)])
def test_tiles_grow_with_the_rows_of_an_expert(pairs, rows):
    assert tile_rows(pairs, 896) == rows
