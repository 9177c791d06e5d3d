"""Verify and commit of the serving step, by replay and by snapshot, against prefilling the accepted tokens, in float64.

Everything that must not be read is NaN: slots of nobody, records of rejected tokens, packed tokens of no row.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import kda, kda_serving, program_text, replay, replay_serving, snapshot
from k3jax.cache import Pools
from k3jax.program_text import ArrayType
from k3jax.replay import Committed
from tests.k3jax.golden_data import mini_config

LAYERS, ROWS, SLOTS = 2, 4, 9
MAX_PROMPT, CAPACITY = 11, 144  # of the packed arrays: tokens of all rows and more than a chunk behind them
CONFIG = mini_config(num_hidden_layers=2, kda_layers=(0, 1), mla_layers=(), kda_num_heads=2, kda_head_dim=8)
HEADS, DIM = CONFIG.kda_num_heads, CONFIG.kda_head_dim
WIDTH = HEADS * DIM
DEAD = 2  # a row without a slot
SPARE = (4, 0, 5, 7)  # boundary slots
OPS = {"replay": (replay_serving, replay.record_shapes), "snapshot": (snapshot, snapshot.record_shapes)}


@dataclasses.dataclass
class World:
    """ROWS rows of up to `limit` tokens behind a prompt each. Row DEAD has no slot. NumPy throughout."""

    ops: types.ModuleType
    limit: int
    params: dict  # stacked
    prompts: list[kda.Projected]
    tokens: list[kda.Projected]  # `limit` for every row
    pools: Pools
    records: tuple
    slots: np.ndarray

    @property
    def live(self) -> list[int]:
        return [row for row in range(ROWS) if row != DEAD]


def build(rollback: str, limit: int) -> World:
    rng = np.random.default_rng()

    def projected(count: int) -> kda.Projected:
        shapes = ((count, 3, WIDTH), (count, WIDTH), (count, HEADS, DIM), (count, HEADS))
        return kda.Projected(*(rng.standard_normal(shape) for shape in shapes))

    ops, record_shapes = OPS[rollback]
    shapes = record_shapes(CONFIG, ROWS, limit, jnp.dtype(jnp.float64))
    pool_shapes = (1,), (LAYERS, SLOTS, HEADS, DIM, DIM), (LAYERS, SLOTS, 3, 3, WIDTH)
    world = World(
        ops=ops,
        limit=limit,
        params={
            "conv": rng.standard_normal((LAYERS, 3, WIDTH, CONFIG.conv_size)),
            "a_log": rng.standard_normal((LAYERS, HEADS)),
            "dt_bias": rng.standard_normal((LAYERS, WIDTH)),
            "out_norm": rng.standard_normal((LAYERS, DIM)),
        },
        prompts=[projected(int(count)) for count in rng.integers(1, MAX_PROMPT + 1, ROWS)],
        tokens=[projected(limit) for _ in range(ROWS)],
        pools=Pools(*(np.full(shape, np.nan) for shape in pool_shapes)),
        records=type(shapes)(*(np.full(s.shape, np.nan, s.dtype) for s in shapes)),
        slots=np.array([3, 6, 0, 1], np.int32),
    )
    for row in world.live:
        world.pools = prefilled(world, row, 0, world.pools)[1]
    return world


@pytest.fixture(params=OPS)
def rollback(request, x64) -> str:
    return request.param


def joined(parts: list[kda.Projected]) -> kda.Projected:
    """Packed, with NaN behind the last token."""

    def pack(*field: np.ndarray) -> np.ndarray:
        whole = np.full((CAPACITY, *field[0].shape[1:]), np.nan)
        whole[: sum(map(len, field))] = np.concatenate(field)
        return whole

    return kda.Projected(*map(pack, *parts))


@functools.cache
def prefill(config=CONFIG):
    """Both layers over the first tokens of a fresh row."""

    def run(params, projected, pools, slot, count):
        zero = jnp.zeros(1, jnp.int32)
        chunks = kda_serving.Chunks(0, jnp.stack([0 * count, count]), zero, zero, slot[None], zero, zero)
        outputs = []
        for layer in range(LAYERS):
            weights = {name: x[layer] for name, x in params.items()}
            out = jnp.zeros_like(projected.gate)
            out, pools = kda_serving.prefill(weights, projected, pools, layer, chunks, out, config)
            outputs.append(out)
        return outputs, pools

    return jax.jit(run)


def prefilled(world: World, row: int, count: int, pools: Pools) -> tuple[list[np.ndarray], Pools]:
    """Outputs of `count` tokens of a row and the pools after a fresh prefill of its prompt and those tokens."""
    prompt = world.prompts[row]
    start, end = len(prompt.beta), len(prompt.beta) + count
    whole = joined([prompt, world.tokens[row]])
    outputs, pools = prefill()(world.params, whole, pools, world.slots[row], np.int32(end))
    return [np.asarray(out[start:end]) for out in outputs], jax.tree.map(np.asarray, pools)


@functools.cache
def verify_layers(verify):
    """Both layers of a verify op; the layer is an operand, so that there is one program."""

    def run(params, projected, pools, records, layer, cu_seqlens, slots):
        out = jnp.full_like(projected.gate, jnp.nan)
        return verify(params, projected, pools, records, layer, cu_seqlens, slots, out, CONFIG)

    return jax.jit(run)


@functools.cache
def commit_layers(commit):
    return jax.jit(lambda params, records, pools, chosen: commit(params, records, pools, chosen, CONFIG))


def verified(world: World, counts: tuple[int, ...]):
    """Outputs of both layers, NaN where nothing was written, and the records."""
    parts = [kda.Projected(*(x[:count] for x in tokens)) for tokens, count in zip(world.tokens, counts, strict=True)]
    cu_seqlens = np.cumsum([0, *counts]).astype(np.int32)
    projected, records, outputs = joined(parts), world.records, []
    for layer in range(LAYERS):
        weights = {name: x[layer] for name, x in world.params.items()}
        operands = (weights, projected, world.pools, records, np.int32(layer), cu_seqlens, world.slots)
        out, records = verify_layers(world.ops.verify)(*operands)
        outputs.append(np.asarray(out))
    return outputs, type(world.records)(*(np.array(record) for record in records))


def committed(world: World, records, accepted, boundary=(0,) * ROWS, params=None) -> Pools:
    chosen = Committed(*(np.asarray(x, np.int32) for x in (accepted, world.slots, boundary, SPARE)))
    params = world.params if params is None else params
    pools = commit_layers(world.ops.commit)(params, records, world.pools, chosen)
    return jax.tree.map(np.asarray, pools)


def assert_slot(world: World, pools: Pools, slot: int, row: int, count: int) -> None:
    """The slot holds what a fresh prefill up to `count` tokens of the row leaves: 1e-9 in the norm, layer by layer."""
    want_slot = world.slots[row]
    want = prefilled(world, row, count, world.pools)[1]
    for got_pool, want_pool in ((pools.kda, want.kda), (pools.conv, want.conv)):
        for layer in range(LAYERS):
            got, exact = np.asarray(got_pool[layer, slot]), np.asarray(want_pool[layer, want_slot])
            assert np.linalg.norm(got - exact) <= 1e-9 * np.linalg.norm(exact)


def assert_same_bits(got, want) -> None:
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 16])
def test_verify_gives_the_outputs_of_a_prefill(rollback, limit):
    world = build(rollback, limit)
    outputs, _ = verified(world, (limit,) * ROWS)
    for row in world.live:
        want, _ = prefilled(world, row, limit, world.pools)
        for layer in range(LAYERS):
            got = outputs[layer][row * limit : (row + 1) * limit]
            np.testing.assert_allclose(got, want[layer], rtol=1e-9, atol=1e-9)


def test_ragged_rows_write_and_record_only_their_own_tokens(rollback):
    world = build(rollback, 5)
    counts = (3, 0, 4, 2)
    outputs, records = verified(world, counts)
    starts = np.cumsum([0, *counts])
    for layer in range(LAYERS):
        for row in (0, 3):
            want, _ = prefilled(world, row, counts[row], world.pools)
            np.testing.assert_allclose(outputs[layer][starts[row] : starts[row + 1]], want[layer], rtol=1e-9, atol=1e-9)
        assert np.isnan(outputs[layer][starts[DEAD] : starts[DEAD + 1]]).all()
        assert np.isnan(outputs[layer][starts[-1] :]).all()
    for record in records:
        for row, count in enumerate(counts):
            own = 0 if row == DEAD else count
            assert np.isfinite(record[:, row, :own]).all() and np.isnan(record[:, row, own:]).all()


def test_empty_steps_change_nothing(rollback):
    world = build(rollback, 3)
    outputs, records = verified(world, (0,) * ROWS)
    assert np.isnan(outputs).all() and all(np.isnan(record).all() for record in records)
    pools = committed(world, records, (0,) * ROWS, (2,) * ROWS)
    assert_same_bits(pools, world.pools)


@pytest.mark.parametrize("limit", [1, 2, 4, 8, 16])
def test_commit_of_any_length_gives_the_state_of_a_prefill(rollback, limit):
    """Recurrent, convolution and boundary state, for every accepted length."""
    world = build(rollback, limit)
    _, records = verified(world, (limit,) * ROWS)
    places = [np.arange(limit).reshape(-1, *(1,) * (record.ndim - 3)) for record in records]
    rng = np.random.default_rng()
    for accepted in range(1, limit + 1):
        poisoned = type(records)(*(np.where(at < accepted, x, np.nan) for at, x in zip(places, records, strict=True)))
        boundary = rng.integers(1, accepted + 1, ROWS)
        pools = committed(world, poisoned, (accepted,) * ROWS, boundary)
        for row in world.live:
            assert_slot(world, pools, world.slots[row], row, accepted)
            if SPARE[row]:
                assert_slot(world, pools, SPARE[row], row, int(boundary[row]))
        others = np.setdiff1d(np.arange(SLOTS), [*world.slots[world.live], SPARE[0], SPARE[3]])
        assert np.isnan(pools.kda[:, others]).all() and np.isnan(pools.conv[:, others]).all()


def test_rows_accept_and_cross_as_they_come(rollback):
    """Ragged rows: one accepts nothing, one crosses no boundary, one crosses at its last token."""
    world = build(rollback, 5)
    _, records = verified(world, (5, 4, 3, 2))
    accepted, boundary = (3, 0, 3, 2), (0, 0, 2, 2)
    pools = committed(world, records, accepted, boundary)
    assert_slot(world, pools, 3, 0, 3)
    assert_slot(world, pools, 1, 3, 2)
    assert_slot(world, pools, 7, 3, 2)
    for slot in (0, 2, 4, 5, 6, 8):
        np.testing.assert_array_equal(pools.kda[:, slot], world.pools.kda[:, slot])
        np.testing.assert_array_equal(pools.conv[:, slot], world.pools.conv[:, slot])


def test_commit_takes_parameters_layer_by_layer(rollback):
    world = build(rollback, 4)
    _, records = verified(world, (4,) * ROWS)
    stacked = committed(world, records, (2, 3, 0, 4), (1, 0, 0, 3))
    unstacked = committed(world, records, (2, 3, 0, 4), (1, 0, 0, 3), {k: tuple(x) for k, x in world.params.items()})
    assert_same_bits(unstacked, stacked)


def test_a_row_gives_the_same_bits_in_any_company(rollback):
    world = build(rollback, 4)
    outputs, records = verified(world, (4, 2, 1, 3))
    pools = committed(world, records, (3, 2, 0, 1))
    world.tokens[1], world.tokens[DEAD] = (
        jax.tree.map(lambda x: 7 * x[::-1], tokens) for tokens in (world.tokens[1], world.tokens[DEAD])
    )
    other_outputs, other_records = verified(world, (4, 1, 4, 3))
    other = committed(world, other_records, (3, 0, 0, 1))
    for layer in range(LAYERS):
        np.testing.assert_array_equal(outputs[layer][:4], other_outputs[layer][:4])
        np.testing.assert_array_equal(outputs[layer][7:10], other_outputs[layer][9:12])
    for slot in (3, 1):
        np.testing.assert_array_equal(pools.kda[:, slot], other.kda[:, slot])
        np.testing.assert_array_equal(pools.conv[:, slot], other.conv[:, slot])


def test_both_rollbacks_give_the_same_outputs_bit_for_bit(x64):
    world = build("replay", 6)
    by_states = dataclasses.replace(world, ops=snapshot, records=build("snapshot", 6).records)
    assert_same_bits(verified(world, (6, 2, 3, 5))[0], verified(by_states, (6, 2, 3, 5))[0])


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_the_vectorised_reference_agrees(x64, limit):
    world = build("replay", limit)
    counts = (limit, 1, 0, max(1, limit - 1))
    outputs, records = verified(world, counts)
    reference = dataclasses.replace(world, ops=types.SimpleNamespace(verify=_reference_verify, commit=replay.commit))
    want_outputs, want_records = verified(reference, counts)
    live = slice(0, sum(counts))
    for layer in range(LAYERS):
        np.testing.assert_allclose(outputs[layer][live], want_outputs[layer][live], rtol=1e-9, atol=1e-9)
    for got, want in zip(records, want_records, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    accepted = (limit, 1, 0, 1)
    pools, want = committed(world, records, accepted), committed(reference, records, accepted)
    np.testing.assert_allclose(pools.kda, want.kda, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(pools.conv, want.conv)


def _reference_verify(params, projected, pools, records, layer, cu_seqlens, slots, out, config):
    del out
    return replay.verify(params, projected, pools, records, layer, cu_seqlens, slots, config)


# --- the compiled program ---------------------------------------------------------------------------------------------
TOKENS, BATCH, POOL_SLOTS = 352, 27, 4099  # sizes that nothing else has


@pytest.mark.parametrize("rollback", OPS)
def test_verify_beside_a_prefill_and_commit_copy_no_pool_and_move_no_tokens(rollback):
    ops, record_shapes = OPS[rollback]
    limit, f32 = 5, jnp.dtype(jnp.float32)
    records = record_shapes(CONFIG, BATCH, limit, f32)
    states = jax.ShapeDtypeStruct((LAYERS, POOL_SLOTS, HEADS, DIM, DIM), f32)
    tails = jax.ShapeDtypeStruct((LAYERS, POOL_SLOTS, 3, 3, WIDTH), f32)

    def run(params, projected, pools, cu_seqlens, slots, chunks, chosen):
        outs = []
        for layer in range(LAYERS):
            weights = {name: layers[layer] for name, layers in params.items()}
            with jax.named_scope(f"layer{layer}/mixer"):
                out = jnp.zeros_like(projected.gate)
                out, new = ops.verify(weights, projected, pools, pools.records, layer, cu_seqlens, slots, out, CONFIG)
                out, new, kda_pool, conv_pool = jax.lax.optimization_barrier((out, new, pools.kda, pools.conv))
                pools = pools._replace(records=new, kda=kda_pool, conv=conv_pool)
                out, pools = kda_serving.prefill(weights, projected, pools, layer, chunks, out, CONFIG)
            outs.append(out)
        return outs, ops.commit(params, pools.records, pools, chosen, CONFIG)

    def floats(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, f32)

    def integers(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    params = {
        "conv": (floats(3, WIDTH, CONFIG.conv_size),) * LAYERS,
        "a_log": (floats(HEADS),) * LAYERS,
        "dt_bias": (floats(WIDTH),) * LAYERS,
        "out_norm": (floats(DIM),) * LAYERS,
    }
    token_shapes = ((TOKENS, 3, WIDTH), (TOKENS, WIDTH), (TOKENS, HEADS, DIM), (TOKENS, HEADS))
    projected = kda.Projected(*(floats(*shape) for shape in token_shapes))
    lanes, bounds = integers(BATCH), integers(BATCH + 1)
    chunks = kda_serving.Chunks(integers(), bounds, *(lanes,) * 5)
    pools = Pools(floats(1), states, tails, records=records)
    operands = (params, projected, pools, bounds, lanes, chunks, Committed(*(lanes,) * 4))
    lowered: Any = jax.jit(run, donate_argnums=2).lower(*operands)
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    text = program_text.parse(compiled.as_text())
    large = [ArrayType("f32", x.shape) for x in (states, tails, *records)]
    assert program_text.pool_copies(text, large) == []
    assert program_text.row_movements(text, "mixer", (TOKENS, BATCH), large[:2]) == []
    one_layer = min(x.size * x.dtype.itemsize for x in (states, tails)) // LAYERS
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer
