"""Draft configurations: what the three published forms mean, and what is refused."""

import contextlib
import copy
import json
import math

import pytest

from k3jax import presets
from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig, check_against, is_draft
from tests.conversion_names.draft_data import PUBLISHED, SPECFORGE, SPECULATORS, TORCHSPEC, changed, tiny
from tests.k3jax.golden_data import DATA, TINY8

DRAFT_TINY = DATA / "dspark_gqa_tiny"


@pytest.mark.parametrize(
    ("form", "taps", "stream", "depth"),
    [
        ("specforge", (7, 23, 51, 67, 83), "attn_res", 93),
        ("speculators", (23, 47, 71, 87, 91), "prefix", None),
        ("torchspec", (2, 23, 47, 71, 89), "prefix", 93),
    ],
)
def test_taps_of_all_forms_are_0_based_layers_and_name_their_stream(form, taps, stream, depth):
    config = DraftConfig.from_hf(PUBLISHED[form])
    assert (config.taps, config.stream, config.target_num_hidden_layers) == (taps, stream, depth)


@pytest.mark.parametrize(
    ("form", "block", "mask", "causal", "window"),
    [
        ("specforge", 7, 163824, False, None),
        ("speculators", 8, 163837, True, 2048),
        ("torchspec", 7, 163837, False, None),
    ],
)
def test_block_mask_and_window_are_the_published_ones(form, block, mask, causal, window):
    """D13."""
    config = DraftConfig.from_hf(PUBLISHED[form])
    assert (config.block_size, config.mask_token_id) == (block, mask)
    assert (config.causal, config.sliding_window) == (causal, window)


@pytest.mark.parametrize(
    ("form", "pairs", "theta", "amplitude", "score"),
    [
        ("specforge", "half", 1e4, 1.27726, 1.0),
        ("speculators", "half", 1e4, 1.0, 1.0),
        ("torchspec", "interleaved", 5e4, 1.0, 1.8133),
    ],
)
def test_rotary_positions_and_yarn_factors_are_the_published_ones(form, pairs, theta, amplitude, score):
    """D13."""
    rope = DraftConfig.from_hf(PUBLISHED[form]).rope
    assert (rope.pairs, rope.theta) == (pairs, theta)
    assert math.isclose(rope.amplitude, amplitude, abs_tol=1e-5)
    assert math.isclose(rope.score_factor, score, abs_tol=1e-4)


def test_yarn_fields_come_from_the_file():
    """D13."""
    yarn = DraftConfig.from_hf(TORCHSPEC).rope.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_max_position_embeddings, yarn.beta_fast, yarn.beta_slow) == (32, 32768, 32, 1)
    other = changed(SPECFORGE, rope_parameters=SPECFORGE["rope_parameters"] | {"beta_fast": 16, "factor": 4.0})
    yarn = DraftConfig.from_hf(other).rope.yarn
    assert yarn is not None and (yarn.factor, yarn.beta_fast) == (4.0, 16.0)


def test_the_epsilon_comes_from_the_file():
    """D13."""
    assert DraftConfig.from_hf(changed(SPECULATORS, rms_norm_eps=3e-6)).rms_norm_eps == 3e-6


def test_the_older_spelling_of_rotary_scaling_reads_the_same():
    old = changed(SPECFORGE, rope_parameters=...)
    old |= {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 16.0}}
    old["rope_scaling"]["original_max_position_embeddings"] = 65536
    assert DraftConfig.from_hf(old).rope == DraftConfig.from_hf(SPECFORGE).rope


def test_a_window_without_causality_stays_bidirectional():
    assert not DraftConfig.from_hf(changed(SPECULATORS, sliding_window_non_causal=True)).causal


def test_a_declared_stream_wins_over_the_forms_own():
    assert DraftConfig.from_hf(changed(TORCHSPEC, aux_hidden_stream="attn_res", fc_norm=True)).stream == "attn_res"
    nested = changed(SPECFORGE)
    nested["dflash_config"]["aux_hidden_stream"] = "prefix"
    assert DraftConfig.from_hf(nested).stream == "prefix"


def test_taps_counted_as_completed_layers_are_shifted():
    """An engine's own copy of an MLA draft spells 2, 23, 47, 71, 89 as 3, 24, 48, 72, 90."""
    counted = changed(TORCHSPEC, target_layer_ids=..., eagle_aux_hidden_state_layer_ids=[3, 24, 48, 72, 90])
    assert DraftConfig.from_hf(counted).taps == (2, 23, 47, 71, 89)
    counted["target_layer_ids"] = [2, 23, 47, 71, 89]
    assert DraftConfig.from_hf(counted).taps == (2, 23, 47, 71, 89)


def test_the_golden_draft_reads_from_its_folder():
    config = DraftConfig.from_file(DRAFT_TINY)
    assert (config.taps, config.block_size, config.markov_rank) == ((1, 3, 6), 7, 16)
    assert math.isclose(config.rope.amplitude, 1.27726, abs_tol=1e-5)


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_draft_is_recognised_and_a_target_is_not(form):
    assert is_draft(PUBLISHED[form])
    assert not is_draft(json.loads((DATA / "k3_config.json").read_text()))
    assert not is_draft(json.loads((TINY8 / "config.json").read_text()))


def test_a_draft_is_recognised_by_its_tensors_too():
    assert is_draft({"model_type": "qwen3"}, ["model.markov_head.markov_w1.weight"])
    assert not is_draft({"model_type": "qwen3"}, ["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("torchspec", {"target_layer_ids": [2, 47, 23, 71, 89]}, "distinct and ascending"),
        ("torchspec", {"target_layer_ids": [2, 2, 47, 71, 89]}, "distinct and ascending"),
        ("torchspec", {"target_layer_ids": [2, 23, 47, 71, 93]}, "must lie in the target's layers, 0 to 92"),
        (
            "torchspec",
            {"target_layer_ids": [2, 23, 47]},
            "num_target_layers=5 must be the number of target_layer_ids, 3",
        ),
        ("torchspec", {"target_layer_ids": "2"}, "must be a list"),
        ("torchspec", {"target_layer_ids": [2, 23, 47, 71, "89"]}, "must be a list of integers"),
        ("torchspec", {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported in a draft; only 64 is"),
        ("torchspec", {"rope_theta": 1e6}, "rope_theta must be given once"),
        ("torchspec", {"eagle_aux_hidden_state_layer_ids": [2, 23, 47, 71, 89]}, "lists of taps disagree"),
        ("torchspec", {"mla_use_nope": True}, "mla_use_nope=True is not supported"),
        ("torchspec", {"mla_use_output_gate": True}, "mla_use_output_gate=True is not supported"),
        ("torchspec", {"aux_hidden_stream": "attnres"}, "aux_hidden_stream='attnres' is unknown"),
        ("torchspec", {"kv_lora_rank": 0}, "kv_lora_rank=0 of the draft must be positive"),
        ("torchspec", {"qk_rope_head_dim": 63}, "qk_rope_head_dim=63, the rotated width, must be even"),
        ("speculators", {"aux_hidden_state_layer_ids": [0, 48, 72, 88, 92]}, "must lie in the target's layers"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3' is not supported"),
        ("speculators", {"sample_from_anchor": False}, "sample_from_anchor=False is not supported"),
        ("speculators", {"draft_vocab_size": 32000}, "draft_vocab_size=32000 must equal vocab_size=163840"),
        ("speculators", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "all layers must be"),
        ("speculators", {"sliding_window": None}, "all layers must be"),
        ("speculators", {"use_sliding_window": False}, "all layers must be"),
        ("speculators", {"num_key_value_heads": 7}, "must be a multiple of num_key_value_heads=7"),
        ("speculators", {"block_size": ...}, "lacks block_size"),
        ("specforge", {"mask_token_id": 163840}, "mask_token_id=163840 is outside the vocabulary"),
        ("specforge", {"markov_head_type": "rnn"}, "markov_head_type='rnn' is not supported"),
        ("specforge", {"markov_rank": 0}, "markov_rank=0 of the draft must be positive"),
        ("specforge", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("specforge", {"target_layer_ids": ...}, "target_layer_ids is missing"),
        ("specforge", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type='llama3'"),
        (
            "specforge",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_theta must be given once, above 1; found none",
        ),
        ("specforge", {"rms_norm_eps": 1.5}, "rms_norm_eps=1.5 must lie between 0 and 1"),
        ("specforge", {"hidden_size": True}, "hidden_size=True of the draft must be an integer"),
    ],
)
def test_a_draft_that_would_run_wrongly_is_refused_by_name(form, changes, message):
    with pytest.raises(ConfigError) as error:
        DraftConfig.from_hf(changed(PUBLISHED[form], **changes))
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, -1, 0, 1.5, True, "x", [], ["x"], {}, {"x": 1}], ids=repr)
@pytest.mark.parametrize("form", PUBLISHED)
def test_a_field_of_any_other_type_is_read_or_refused_but_never_crashes(form, value):
    def places(config, path=()):
        for name, inner in config.items():
            yield (*path, name)
            if isinstance(inner, dict):
                yield from places(inner, (*path, name))

    for *path, name in places(PUBLISHED[form]):
        config = holder = copy.deepcopy(PUBLISHED[form])
        for step in path:
            holder = holder[step]
        holder[name] = value
        with contextlib.suppress(ConfigError):
            draft = DraftConfig.from_hf(config)
            assert all(type(tap) is int for tap in draft.taps) and draft.confidence_width > 0


def test_another_model_is_no_draft(tmp_path):
    with pytest.raises(ConfigError, match="this is not a draft"):
        DraftConfig.from_hf({"model_type": "llama"})
    with pytest.raises(ConfigError, match="needs a config.json"):
        DraftConfig.from_file(tmp_path)


@pytest.mark.parametrize("form", PUBLISHED)
def test_published_drafts_fit_the_released_target(form):
    check_against(DraftConfig.from_hf(PUBLISHED[form]), presets.k3())


def test_every_reason_against_a_target_is_named():
    draft = DraftConfig.from_hf(tiny("specforge"))
    with pytest.raises(ConfigError) as error:
        check_against(draft, presets.demo())
    for reason in ("its vocab_size is 512, the target's 4096", "made for 8 layers, the target has 9"):
        assert reason in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_draft_of_another_width_or_depth_does_not_fit():
    draft = DraftConfig.from_hf(PUBLISHED["speculators"])
    with pytest.raises(ConfigError) as error:
        check_against(draft, presets.tiny_mesh())
    for reason in (
        "its hidden_size is 7168, the target's 128",
        "its target_hidden_size is 7168, the target's hidden_size 128",
        "it taps layers [23, 47, 71, 87, 91], the target's last is 5",
    ):
        assert reason in str(error.value)
