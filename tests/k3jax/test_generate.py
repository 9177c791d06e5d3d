"""`Model.generate`: the cached path gives what the uncached logits say."""

import numpy as np
import pytest

import k3jax
from k3jax import generate
from k3jax.step_inputs import StepShape
from tests.k3jax.golden_data import TINY8, golden_model, mini_config, random_tensors, write_checkpoint

CONFIG = mini_config()
PROMPT = np.random.default_rng(0).integers(0, 90, 60).tolist()


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return k3jax.load(write_checkpoint(tmp_path_factory.mktemp("mini"), CONFIG, random_tensors(CONFIG)))


def test_greedy_tokens_are_the_best_of_the_uncached_logits(mini):
    """60 tokens and 20 new ones: the decode crosses a page."""
    new = mini.generate(PROMPT, 20, stop_token_ids=())
    assert len(new.token_ids) == 20 and new.finish_reason == "length"
    logits = np.asarray(mini.logits([*PROMPT, *new.token_ids]))[len(PROMPT) - 1 : -1]
    chosen = logits[np.arange(20), list(new.token_ids)]
    assert np.all(chosen >= logits.max(axis=-1) - 5e-4)


def test_generation_ends_with_the_stop_token(mini):
    free = mini.generate(PROMPT, 20, stop_token_ids=())
    stop = free.token_ids[7]
    stopped = mini.generate(PROMPT, 20, stop_token_ids=[stop])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_one_token_needs_no_decode_step(mini):
    assert mini.generate(PROMPT, 1, stop_token_ids=()).token_ids == mini.generate(PROMPT, 20).token_ids[:1]


def test_samples_depend_on_the_seed_alone(mini):
    def sample(seed):
        return mini.generate(PROMPT, 20, temperature=5.0, seed=seed, stop_token_ids=()).token_ids

    assert sample(2**63 + 1) == sample(2**63 + 1)
    assert len({sample(seed) for seed in range(3)}) == 3


@pytest.mark.parametrize("prompt_length", [1, 63, 64, 512, 513, 1300])
def test_the_plan_covers_every_token_and_adds_every_page_once(prompt_length):
    prompt, max_tokens = list(range(prompt_length)), 130
    chunk = StepShape(rows=1, prefill_tokens=512)
    steps = list(generate._plan(prompt, max_tokens, chunk, 0.0, 0))
    prefill, decode = [i for shape, i in steps if shape is chunk], [i for shape, i in steps if shape is generate.DECODE]
    fed = np.concatenate([inputs.tokens[: inputs.cu_seqlens[-1]] for inputs in prefill])
    assert fed.tolist() == prompt
    assert [bool(inputs.chunk_is_last[0]) for inputs in prefill] == [False] * (len(prefill) - 1) + [True]
    assert len(decode) == max_tokens - 1
    pages = [index for _, i in steps for row, index in zip(i.page_rows, i.page_index, strict=True) if row == 0]
    assert pages == list(range(-(-(prompt_length + max_tokens - 1) // 64)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], 3), "one sequence"),
        (([1, 2], 0), "max_tokens=0 does not fit: pass 1 to 510"),
        (([1] * 500, 13), "max_tokens=13 does not fit: pass 1 to 12"),
        (([96], 3), "outside the vocabulary"),
    ],
)
def test_what_cannot_be_generated_is_refused(mini, arguments, message):
    with pytest.raises(ValueError) as error:
        mini.generate(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"seed": -1}, {"seed": 2**64}])
def test_wrong_sampling_arguments_are_refused_by_name(mini, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mini.generate([1], 1, **wrong)


@pytest.mark.slow
def test_the_golden_model_continues_as_published():
    golden = golden_model()
    prompt = golden["input_ids"][0, : int(golden["greedy_prompt_len"])]
    new = k3jax.load(TINY8).generate(prompt, 16, stop_token_ids=())
    assert list(new.token_ids) == golden["greedy_tokens"].tolist()
