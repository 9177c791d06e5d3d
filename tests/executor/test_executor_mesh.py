"""The device executor on several devices gives the tokens of one."""

import jax
import pytest

from serving.core.types import SamplingParams
from tests.executor.device import Borrowed, device_executor, request, run

FEATURES = SamplingParams(
    temperature=0.9,
    seed=11,
    top_p=0.9,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((1, 2.0), (500, 2.0)),
    logprobs=5,
)


def requests():
    greedy = SamplingParams(temperature=0.0, logprobs=3)
    return [request("a", 130, 8, greedy), request("b", 60, 12, FEATURES), request("c", 1, 10, FEATURES)]


@pytest.mark.parametrize(
    ("tp", "options"),
    [
        pytest.param(2, {"whole_experts": True}, marks=pytest.mark.slow),
        (8, {"shard_latents": True}),
    ],
    ids=["tp2-whole-experts", "tp8-sharded-latents"],
)
def test_every_degree_gives_the_tokens_and_logprobs_of_one_device(executor, tp, options):
    one = run(executor, requests())
    divided = device_executor(tp, num_rows=8, **options)
    try:
        assert divided.info()["num_devices"] == tp
        many = run(divided, requests())
        again = run(Borrowed(divided, num_pages=4, max_step_tokens=64), requests()[1:])
        assert divided.compiles_after_ready == 0
    finally:
        divided.close()
    divided.close()  # a second call does nothing
    assert all(array.is_deleted() for array in jax.tree.leaves((divided._pools, divided._rows)))
    assert many.tokens == one.tokens
    assert again.tokens == {name: one.tokens[name] for name in "bc"}
    for name, entries in one.logprobs.items():
        for expected, got in zip(entries, many.logprobs[name], strict=True):
            assert got.chosen == pytest.approx(expected.chosen, abs=1e-9)
            assert [token for token, _ in got.top] == [token for token, _ in expected.top]
