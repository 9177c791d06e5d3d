"""What the benchmark of drafts works out: requests in a pool, and gaps in a trace."""

import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from k3jax import presets
from k3jax.draft_state import Drafting
from k3jax.sharding.collectives import Parallel
from k3jax.sharding.mesh import AXES

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in [name for name in sys.modules if name.split(".")[0] == "draft_bench"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_published_gain_of_replay_is_reproduced():
    """vLLM's +10.97 % at 46.48 GiB, with the settings that give it."""
    from draft_bench.capacity import UnifiedPages, published

    snapshot, replay = published()
    assert (round(snapshot, 4), round(replay, 4)) == (9.8182, 10.8954)
    assert round(100 * (replay / snapshot - 1), 2) == 10.97
    pages = [UnifiedPages(draft_tokens=7, has_records=has, token_bytes=576) for has in (False, True)]
    assert [page.state_bytes for page in pages] == [878_592, 976_896]
    assert [page.page_tokens for page in pages] == [1536, 1792]


def test_in_pools_of_their_own_a_request_saves_its_states():
    """K3 at TP8: seven states and the eighth's difference to the records, whatever its length."""
    from draft_bench.capacity import own_bytes
    from draft_bench.ways import published_draft

    k3, tp8 = presets.k3(), Parallel(axes=AXES, sizes=(8, 1))
    drafting = Drafting(config=published_draft(k3), tokens=7)
    saved = {
        own_bytes(k3, drafting, "snapshot", jnp.bfloat16, tp8, tokens)
        - own_bytes(k3, drafting, "replay", jnp.bfloat16, tp8, tokens)
        for tokens in (16384, 262144)
    }
    state, record = 12 * 128 * 128 * 4, 12 * 128 * (4 + 2 * 2)
    assert saved == {69 * 8 * (state - record)}


def test_a_gap_is_the_longest_of_its_step_marked_by_a_kernel_that_runs_once():
    from draft_bench.gpu_idle import Kernel, step_gaps

    def step(start):
        loop = [Kernel(start + turn * 600, start + turn * 600 + 500, "loop") for turn in range(3)]
        return [*loop, Kernel(start + 1700, start + 2000, "once")]

    kernels = [*step(0), *step(5000), *step(7050), *step(9000)]
    found = step_gaps(reversed(kernels), 4)
    assert [gap.idle_us for gap in found] == [3.0, 0.1, 0.1]
    assert [gap.period_us for gap in found] == [5.0, 2.05, 1.95]
    assert found[0].between == ("once", "loop") and found[1].between == ("loop", "loop")
    with pytest.raises(ValueError, match="no kernel ran once in each of 3 steps"):
        step_gaps(kernels, 3)
