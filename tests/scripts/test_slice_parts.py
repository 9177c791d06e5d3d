"""The parts that the slice's benchmark times run, and leave pools of the same shapes."""

import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k3jax import cache, draft_state, params, presets
from k3jax.pallas.dispatch import Ops

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# The benchmark takes activations out of hidden rows, so these must be wider than all of them.
CONFIG = dataclasses.replace(
    presets.demo(), hidden_size=2048, num_hidden_layers=3, kda_layers=(0, 2), mla_layers=(1,), intermediate_size=128
)


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [name for name in sys.modules if name.split(".")[0] in ("slice_bench", "bench")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("rows", [4, 96])
def test_every_part_is_timed(rows):
    from slice_bench.parts import depth_bank, parts, time_part

    weights = params.init(params.abstract(CONFIG), jax.random.key(0), jnp.dtype(jnp.float32))
    shape = cache.CacheShape(num_rows=8, num_pages=65, num_slots=17, pages_per_row=8)
    shapes = draft_state.pool_shapes(CONFIG, shape, jnp.float32, None)
    pools = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    x = jax.random.normal(jax.random.key(1), (rows, CONFIG.hidden_size))
    found = parts(CONFIG, rows, 128, Ops())
    assert len({part.name for part in found}) == 8
    for part in found:
        took_us, pools = time_part(part, x, weights | {"bank": depth_bank(x)}, pools, repeats=1)
        assert 0 < part.floor_us < math.inf and 0 < took_us < math.inf
    assert jax.tree.map(jnp.shape, pools) == jax.tree.map(lambda s: s.shape, shapes)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(pools))
