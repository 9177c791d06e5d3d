"""Verify and commit against decoding the same tokens one by one, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import kda, kda_serving, presets, replay
from k3jax.cache import Pools
from k3jax.replay import Committed, Records, crossed_boundary, record_shapes

TOKENS, ROWS, SLOTS = 4, 3, 8
CONFIG = dataclasses.replace(presets.k3(), kda_num_heads=2, kda_head_dim=8)
HEADS, DIM = CONFIG.kda_num_heads, CONFIG.kda_head_dim
WIDTH = HEADS * DIM


@dataclasses.dataclass
class World:
    """Two layers of everything, float64."""

    params: dict  # stacked
    projected: kda.Projected  # ROWS * TOKENS tokens, row after row
    pools: Pools
    records: Records
    slots: jax.Array

    def layer_params(self, layer: int) -> dict:
        return {name: x[layer] for name, x in self.params.items()}


@pytest.fixture
def world(x64) -> World:
    rng = np.random.default_rng()

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape))

    num = ROWS * TOKENS
    state, tails = normal(2, SLOTS, HEADS, DIM, DIM), normal(2, SLOTS, 3, 3, WIDTH)
    shapes = (
        (2, ROWS, TOKENS, HEADS, DIM),
        (2, ROWS, TOKENS, 2, HEADS, DIM),
        (2, ROWS, TOKENS, 3, WIDTH),
    )
    return World(
        params={
            "conv": normal(2, 3, WIDTH, CONFIG.conv_size),
            "a_log": normal(2, HEADS),
            "dt_bias": normal(2, WIDTH),
            "out_norm": normal(2, DIM),
        },
        projected=kda.Projected(normal(num, 3, WIDTH), normal(num, WIDTH), normal(num, HEADS, DIM), normal(num, HEADS)),
        pools=Pools(jnp.zeros(()), state, tails),
        records=Records(*(jnp.full(shape, jnp.nan) for shape in shapes)),
        slots=jnp.array([3, 6, 1]),
    )


def verified(world: World, counts: tuple[int, ...] = (TOKENS,) * ROWS) -> tuple[list[jax.Array], Records]:
    """Outputs of both layers and the records. Rows of fewer tokens than TOKENS leave their last ones out."""
    kept = np.concatenate([np.arange(row * TOKENS, row * TOKENS + count) for row, count in enumerate(counts)])
    projected = kda.Projected(*(x[kept] for x in world.projected))
    cu_seqlens, records, outputs = jnp.cumsum(jnp.array([0, *counts])), world.records, []
    for layer in range(2):
        out, records = replay.verify(
            world.layer_params(layer), projected, world.pools, records, layer, cu_seqlens, world.slots, CONFIG
        )
        outputs.append(out)
    return outputs, records


def decoded(world: World, steps: int) -> tuple[list[list[jax.Array]], Pools]:
    """Outputs [layer][step] and pools after decoding the first tokens of all rows."""
    pools, outputs = world.pools, [[], []]
    for step in range(steps):
        at = jnp.arange(ROWS) * TOKENS + step
        projected = kda.Projected(*(x[at] for x in world.projected))
        for layer in range(2):
            out, pools = kda_serving.decode(
                world.layer_params(layer), projected, pools, layer, world.slots, world.slots > 0, CONFIG
            )
            outputs[layer].append(out)
    return outputs, pools


def chosen(world: World, accepted, boundary=(0, 0, 0), boundary_slots=(0, 0, 0)) -> Committed:
    return Committed(jnp.array(accepted), world.slots, jnp.array(boundary), jnp.array(boundary_slots))


def assert_slot(pools: Pools, slot: int, want: Pools, want_slot: int) -> None:
    for got, exact in ((pools.kda, want.kda), (pools.conv, want.conv)):
        np.testing.assert_allclose(got[:, slot], exact[:, want_slot], rtol=1e-9, atol=1e-9)


def test_verify_gives_the_outputs_of_decoding_token_by_token(world):
    outputs, _ = verified(world)
    want, _ = decoded(world, TOKENS)
    for layer in range(2):
        by_step = outputs[layer].reshape(ROWS, TOKENS, WIDTH)
        for step in range(TOKENS):
            np.testing.assert_allclose(by_step[:, step], want[layer][step], rtol=1e-9, atol=1e-9)


def test_ragged_rows_record_only_their_own_tokens(world):
    outputs, records = verified(world, (2, 0, 3))
    full, full_records = verified(world)
    np.testing.assert_allclose(outputs[0][:2], full[0][:2], rtol=1e-12)
    np.testing.assert_allclose(outputs[1][2:5], full[1][8:11], rtol=1e-12)
    for short, whole in zip(records, full_records, strict=True):
        np.testing.assert_allclose(short[:, 0, :2], whole[:, 0, :2], rtol=1e-12)
        assert bool(jnp.all(jnp.isnan(short[:, 0, 2:]))) and bool(jnp.all(jnp.isnan(short[:, 1])))


def test_rows_without_a_slot_give_zeros_and_record_nothing(world):
    world.slots = world.slots.at[1].set(0)
    world.pools = world.pools._replace(kda=world.pools.kda.at[:, 0].set(jnp.nan))
    outputs, records = verified(world)
    assert not np.any(outputs[0].reshape(ROWS, TOKENS, WIDTH)[1])
    assert bool(jnp.all(jnp.isnan(records.pseudo[:, 1])))


@pytest.mark.parametrize("accepted", range(1, TOKENS + 1))
def test_commit_gives_the_state_of_decoding_the_accepted_tokens(world, accepted):
    """Records of rejected tokens are NaN: they are never read."""
    _, records = verified(world)
    records = Records(*(x.at[:, :, accepted:].set(jnp.nan) for x in records))
    pools = replay.commit(world.params, records, world.pools, chosen(world, (accepted,) * ROWS), CONFIG)
    _, want = decoded(world, accepted)
    for slot in world.slots:
        assert_slot(pools, slot, want, slot)


def test_commit_keeps_the_state_at_a_crossed_boundary_in_the_spare_slot(world):
    _, records = verified(world)
    pools = replay.commit(world.params, records, world.pools, chosen(world, (4, 3, 2), (2, 3, 0), (5, 7, 2)), CONFIG)
    assert_slot(pools, 5, decoded(world, 2)[1], int(world.slots[0]))
    assert_slot(pools, 7, decoded(world, 3)[1], int(world.slots[1]))
    assert_slot(pools, 2, world.pools, 2)  # no boundary crossed: the spare slot is left alone


def test_commit_of_nothing_changes_nothing(world):
    _, records = verified(world)
    pools = replay.commit(world.params, records, world.pools, chosen(world, (0, 0, 0), (0, 0, 0), (5, 7, 2)), CONFIG)
    np.testing.assert_array_equal(pools.kda, world.pools.kda)
    np.testing.assert_array_equal(pools.conv, world.pools.conv)


def test_records_have_the_dtypes_of_the_step():
    shapes = record_shapes(CONFIG, ROWS, TOKENS, jnp.dtype(jnp.bfloat16))
    layers = len(CONFIG.kda_layers)
    assert shapes.pseudo.shape == (layers, ROWS, TOKENS, HEADS, DIM) and shapes.pseudo.dtype == jnp.float32
    assert shapes.key_gate.shape == (layers, ROWS, TOKENS, 2, HEADS, DIM) and shapes.key_gate.dtype == jnp.bfloat16
    assert shapes.conv.shape == (layers, ROWS, TOKENS, 3, WIDTH)


def test_a_boundary_is_the_last_multiple_of_the_grid_that_was_passed():
    lengths, accepted = (x.ravel() for x in np.meshgrid(np.arange(130), np.arange(17)))
    crossed = np.asarray(crossed_boundary(jnp.asarray(lengths), jnp.asarray(accepted), 64))
    for length, count, found in zip(lengths, accepted, crossed, strict=True):
        passed = [step for step in range(1, count + 1) if (length + step) % 64 == 0]
        assert found == (passed[-1] if passed else 0)
