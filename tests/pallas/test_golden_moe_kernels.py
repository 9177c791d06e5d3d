"""Every MoE layer of the golden checkpoint on the router, expert and tail kernels, in the Mosaic GPU interpreter."""

import pytest
from mosaic_interpreter import interpreter
from test_expert_kernels import FEW

from k3jax.pallas import router_cases, router_counts
from k3jax.pallas.router_counts import MapTiles
from scripts.checks import golden_moe

TOKENS = 4  # the GPU check has all of them
QUICK = (1, 7)


@pytest.mark.parametrize(
    "place", [pytest.param(n - 1, marks=[] if n in QUICK else pytest.mark.slow) for n in range(1, 8)]
)
def test_a_golden_layer_on_the_kernels_is_float64_to_bfloat16_rounding(place, monkeypatch):
    monkeypatch.setattr(router_counts, "tiles_for", lambda tokens: MapTiles(tokens=4, min_blocks=1))
    config, layers = golden_moe.golden_layers()
    tiles = {"router_tiles": router_cases.SMALL, "expert_tiles": FEW}
    verdict = golden_moe.run_kernels(config, layers[place], TOKENS, **tiles, interpret=interpreter(detect_races=False))
    assert verdict.passed, verdict
