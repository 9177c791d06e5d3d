"""One vector carries every output of a step to the host, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import step_inputs, step_outputs
from k3jax.draft_state import Drafting
from k3jax.step_inputs import StepShape
from tests.k3jax.draft_models import draft_config
from tests.k3jax.golden_data import mini_config

ROWS, DRAFTS = 3, 2
CONFIG = mini_config()


def fields_of(drafts, dtype):
    drafting = None if drafts is None else Drafting(config=draft_config("gqa"), tokens=DRAFTS)
    return step_outputs.layout(StepShape(rows=ROWS, prefill_tokens=0, drafts=drafts or 0), CONFIG, dtype, drafting)


def values_of(fields):
    random = np.random.default_rng(0)

    def draw(field):
        if field.dtype == jnp.bool_:
            return random.integers(0, 2, field.shape).astype(bool)
        if jnp.issubdtype(field.dtype, jnp.floating):
            return np.where(random.random(field.shape) < 0.3, np.nan, random.normal(size=field.shape)).astype(
                field.dtype
            )
        return random.integers(-(2**31), 2**31, field.shape).astype(np.int32)

    return jax.tree.map(draw, fields)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("drafts", [None, 0, DRAFTS])
def test_every_field_comes_back_bit_for_bit(drafts, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        fields = fields_of(drafts, dtype)
        values = values_of(fields)
        vector = np.asarray(jax.jit(lambda outputs: step_outputs.pack(outputs, fields))(values))
    found = step_outputs.unpack(vector, fields)
    assert vector.ndim == 1 and vector.dtype == np.int32
    for name, value, got in zip(fields._fields, values, found, strict=True):
        assert got.dtype == value.dtype and got.tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("name", "change"),
    [("token", lambda x: x[:-1]), ("logprob", lambda x: x.astype(np.float16)), ("survival", lambda x: x[:, :1])],
)
def test_what_the_host_would_misread_is_refused_when_the_program_is_made(name, change):
    fields = fields_of(DRAFTS, jnp.bfloat16)
    values = values_of(fields)
    with pytest.raises(ValueError, match=name):
        step_outputs.pack(values._replace(**{name: change(getattr(values, name))}), fields)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_vector_longer_than_its_fields_carries_them(size):
    fields = fields_of(DRAFTS, jnp.bfloat16)
    values = values_of(fields)
    shape = StepShape(rows=ROWS, prefill_tokens=16, drafts=DRAFTS)
    inputs = step_inputs.neutral(shape, null_row=ROWS)
    inputs.tokens[...] = np.arange(16)

    @jax.jit
    def run(packed, outputs):
        vector = step_outputs.pack(outputs, fields, size)
        return step_inputs.unpack(packed, shape), step_outputs.in_place_of(vector + 1, vector, never=packed[0] == 1)

    packed = step_inputs.pack(inputs, max(size, step_outputs.packed_size(fields)))
    seen, vector = run(packed, values)
    assert vector.shape == (max(size, step_outputs.packed_size(fields)),)
    for name, value, got in zip(fields._fields, values, step_outputs.unpack(np.asarray(vector), fields), strict=True):
        assert got.tobytes() == value.tobytes(), name
    for name, value, got in zip(inputs._fields, inputs, seen, strict=True):
        np.testing.assert_array_equal(got, value, err_msg=name)
