"""The step's KDA prefill on kernels: in the Mosaic GPU interpreter, races detected, against a float64 oracle."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_interpreter import interpreter

from k3jax import kda, kda_serving, presets, program_text
from k3jax.cache import Pools
from k3jax.pallas import kda_prefill_op
from k3jax.pallas.kda_cases import relative_error
from k3jax.pallas.kda_prefill_op_cases import CASES, GPU_CASES, OpCase, OpInputs, draw, judge, oracle, pieces
from k3jax.pallas.kda_prefill_op_runs import CONFIG, changes_no_bit, params_of, run, run_case

LENGTH = 130
CUTS = (1, 2, 3, 4, 63, 64, 65, 127, 129)  # D03
LIMIT = CASES[0].limit


@pytest.fixture
def make_op(monkeypatch):
    """The op; the convolution's rows that nothing writes are NaN."""
    monkeypatch.setattr(
        kda_prefill_op, "lax", types.SimpleNamespace(empty=lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    )
    return lambda **options: functools.partial(kda_prefill_op.prefill, interpret=interpreter(**options))


@pytest.fixture
def op(make_op):
    return make_op()


@functools.cache
def whole() -> OpInputs:
    """One fresh sequence of 130 tokens, and slots for as many chunks as there are cuts."""
    case = OpCase(name="whole", lengths=(LENGTH,), starts=(0,), num_dead=len(CUTS))
    return draw(case, np.random.default_rng())


def expected() -> tuple[np.ndarray, np.ndarray]:
    """Outputs [L, 130, W] and final states [L, H, V, K] of the sequence in float64."""
    source = whole()
    found = [oracle(source, layer, 0, CONFIG.rms_norm_eps) for layer in range(2)]
    return np.stack([out[:LENGTH] for out, _, _ in found]), np.stack([s[source.slots[0]] for _, s, _ in found])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_passes_the_judge_with_little_error(case):
    """Outputs are rounded to bfloat16 once. States are off by 1e-6, unless the oracle rounds a tie of the convolution
    the other way: 2^-9 of one value, and where gates leave only that token, up to three times 1 / sqrt(128) of the
    norm."""
    strict = dataclasses.replace(case, limit=2.5e-3)
    verdict = run_case(kda_serving.prefill, strict, np.random.default_rng())
    assert verdict.passed and verdict.state < 2**-9 * 3 / 128**0.5, verdict


@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:])],
    ids=lambda case: case.name,
)
def test_the_op_equals_the_oracle_without_races(op, case, capsys):
    verdict = run_case(op, case, np.random.default_rng())
    assert verdict.passed, verdict
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
def test_one_key_over_and_over_stays_as_accurate_however_long(make_op):
    """D02, ten tiles of it; the GPU check has 16,384 tokens."""
    (case,) = (case for case in GPU_CASES if case.keys == "same")
    verdict = run_case(make_op(detect_races=False), dataclasses.replace(case, lengths=(640,)), np.random.default_rng())
    assert verdict.passed, verdict


@pytest.mark.slow
@pytest.mark.parametrize("launches", [1, 2])
def test_cuts_on_the_grid_company_and_exports_change_no_bit(op, launches):
    found = changes_no_bit(functools.partial(op, launches=launches), np.random.default_rng())
    assert all(found.values()), found


@pytest.mark.slow
def test_a_prompt_may_be_cut_anywhere(make_op):
    """D03: conv tail and state are carried, whatever the cut; a chunk of several tokens is not a new prompt."""
    op, slots = make_op(detect_races=False), list(range(1, len(CUTS) + 1))
    source = whole()
    pools = source.state_pool, source.conv_pool
    heads, *pools = run(op, pieces(source, [(0, cut) for cut in CUTS], slots, pools), 0)
    tails, states, _ = run(op, pieces(source, [(cut, LENGTH) for cut in CUTS], slots, (pools[0], pools[1])), 0)
    out, final = expected()
    head, tail = 0, 0
    for cut, slot in zip(CUTS, slots, strict=True):
        joined = np.concatenate([heads[:, head : head + cut], tails[:, tail : tail + LENGTH - cut]], axis=1)
        assert relative_error(joined.astype(np.float64), out) < LIMIT, cut
        assert relative_error(states[:, slot], final) < LIMIT, cut
        head, tail = head + cut, tail + LENGTH - cut


@pytest.mark.slow
def test_decode_goes_on_where_a_prefill_ended(op):
    """D04, with K as wide as V: the kernels take no other widths."""
    source, cut, out = whole(), LENGTH - 5, expected()[0]
    prefilled = pieces(source, [(0, cut)], [2], (source.state_pool, source.conv_pool))
    _, states, tails = run(op, prefilled, 0)
    for layer in range(2):
        pools, params = Pools(mla=(), kda=jnp.asarray(states), conv=jnp.asarray(tails)), params_of(source, layer)
        for t in range(cut, LENGTH):
            row = kda.Projected(*(jnp.asarray(x[t : t + 1]) for x in source[:4]))
            slots, live = jnp.array([2], jnp.int32), jnp.ones(1, bool)
            decoded, pools = kda_serving.decode(params, row, pools, layer, slots, live, CONFIG)
            assert relative_error(np.asarray(decoded[0], np.float64), out[layer, t]) < 2 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(5, 0, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("start", [0, 64])
def test_an_empty_chunk_leaves_its_slot(op, lengths, start):
    """D07, with and without a state to begin with."""
    # Few tokens: their error is twice that of many by chance.
    case = OpCase(name="empty", lengths=lengths, starts=(start,) * len(lengths), limit=2 * LIMIT)
    verdict = run_case(op, case, np.random.default_rng())
    assert verdict.passed, verdict


@pytest.mark.slow
def test_a_token_axis_of_any_length_is_served(op):
    """As the gathered batch has, which leaves out the decode lanes."""
    case = OpCase(name="short axis", lengths=(3,), starts=(0,), num_dead=0, limit=2 * LIMIT)
    inputs = draw(case, np.random.default_rng())
    cut = {name: getattr(inputs, name)[:-1] for name in ("qkv", "gate", "decay", "beta", "out")}
    inputs = inputs._replace(**cut)
    verdict = judge(case, inputs, *run(op, inputs, 0), CONFIG.rms_norm_eps)
    assert verdict.passed, verdict


def test_layers_share_one_schedule():
    """XLA merges what each layer asks for: four layers take no more instructions than one."""

    def build(num_layers: int, cu_seqlens, lanes):
        chunks = kda_serving.Chunks(8, cu_seqlens, lanes, lanes, lanes, lanes, lanes)
        return [kda_prefill_op.schedule(chunks, 584, 16) for _ in range(num_layers)]

    def count(num_layers: int) -> collections.Counter:
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        compiled = jax.jit(build, static_argnums=0).lower(num_layers, shape((5,)), shape((4,))).compile()
        found = program_text.parse(compiled.as_text()).instructions()
        return collections.Counter(i.opcode for _, i in found if i.opcode != "copy")  # one for each output

    assert count(4) == count(1)


@pytest.mark.parametrize("launches", [1, 2])
def test_the_op_lowers_for_hopper_in_place(launches):
    """One launch, which it takes unasked, also updates its counters in place."""
    case = OpCase(name="lowered", lengths=(70, 9), starts=(0, 64), heads=2, first_token=3)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), draw(case, np.random.default_rng()))

    def step(inputs: OpInputs, state_pool, conv_pool, out):
        chunks = kda_serving.Chunks(
            3,
            inputs.cu_seqlens,
            inputs.starts,
            inputs.slots,
            inputs.slots,
            inputs.export_offsets,
            inputs.export_slots,
        )
        pools = Pools(mla=(), kda=state_pool, conv=conv_pool)
        projected = kda.Projected(inputs.qkv, inputs.gate, inputs.decay, inputs.beta)
        asked = None if launches == 1 else launches
        return kda_prefill_op.prefill(params_of(inputs, 1), projected, pools, 1, chunks, out, CONFIG, launches=asked)

    arguments = inputs, inputs.state_pool, inputs.conv_pool, inputs.out
    lowered = jax.jit(step, donate_argnums=(1, 2, 3)).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 + launches
    assert text.count("tf.aliasing_output") == 3
    # Tails and convolved rows, states and the mixer's output.
    assert text.count("output_operand_alias<") == (5 if launches == 1 else 4)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"gate_lower_bound": None}, {}, "lower bound is None"),
        ({"kda_head_dim": 64}, {}, "64 x 64"),
        ({"conv_size": 3}, {}, "3 taps"),
        ({}, {"dtype": jnp.float32}, "float32"),
        ({}, {"dtype": jnp.float64}, "float64"),
        ({}, {"platform": "cpu", "compute_capability": 0.0}, "not cpu"),
        ({}, {"compute_capability": 12.0}, "12.0"),
    ],
)
def test_what_is_not_covered_is_refused_with_its_reason(changes, device, reason):
    """D06 among them: a gate without the bound never takes a kernel that needs one."""
    hopper = {"dtype": jnp.bfloat16, "platform": "gpu", "compute_capability": 9.0}
    assert kda_prefill_op.supported(presets.k3(), **hopper) is None
    refusal = kda_prefill_op.supported(dataclasses.replace(presets.k3(), **changes), **(hopper | device))
    assert refusal is not None and reason in refusal
