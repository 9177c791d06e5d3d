import dataclasses
import json

import pytest

from k3jax import presets
from k3jax.config import ConfigError, K3Config
from tests.k3jax.golden_data import DATA, TINY8, mini_config

RELEASED = json.loads((DATA / "k3_config.json").read_text())


def released(**changes):
    """The released configuration with changes to its text part."""
    return {**RELEASED, "text_config": {**RELEASED["text_config"], **changes}}


def with_layers(kda: list[int], mla: list[int], num_layers: int):
    linear = {**RELEASED["text_config"]["linear_attn_config"], "kda_layers": kda, "full_attn_layers": mla}
    return released(linear_attn_config=linear, num_hidden_layers=num_layers)


def test_the_released_file_is_the_k3_preset():
    assert K3Config.from_hf(RELEASED) == presets.k3()


def test_a_bare_text_config_reads_like_the_outer_one():
    assert K3Config.from_hf(RELEASED["text_config"]) == presets.k3()


def test_the_golden_model_reads_from_its_folder():
    config = K3Config.from_file(TINY8)
    assert config.mla_layers == (3, 7)
    assert (config.num_snapshots, config.num_moe_layers) == (2, 7)


@pytest.mark.parametrize("preset", [presets.k3, presets.demo, presets.tiny_mesh, mini_config])
def test_writing_and_reading_gives_the_same_record(preset):
    config = preset()
    assert K3Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_a_config_without_a_bound_has_the_softplus_gate():
    linear = {k: v for k, v in RELEASED["text_config"]["linear_attn_config"].items() if k != "gate_lower_bound"}
    config = K3Config.from_hf(released(linear_attn_config=linear))
    assert config.gate_lower_bound is None
    assert K3Config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("kda", "mla", "wrong"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [4, 8], "in both [4]"),
        ([1, 2, 3, 5, 6], [4, 8], "in neither [7]"),
        ([0, 1, 2, 4, 5, 6], [3, 7], "out of range [0]"),
        ([1, 2, 3, 5, 6, 7], [4, 9], "out of range [9]"),
        ([1, 2, 3, 3, 5, 6, 7], [4, 8], "listed twice"),
        ([2, 1, 3, 5, 6, 7], [4, 8], "ascending"),
    ],
)
def test_layer_lists_that_do_not_cover_the_model_once_are_refused(kda, mla, wrong):
    """D54."""
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf(with_layers(kda, mla, 8))
    assert wrong in str(error.value)


@pytest.mark.parametrize(("num_kda", "num_mla"), [(6, 2), (20, 6), (69, 24)])
def test_layer_lists_that_cover_the_model_once_are_accepted(num_kda, num_mla):
    """D54."""
    total = num_kda + num_mla
    mla = [4 * (i + 1) for i in range(num_mla - 1)] + [total]
    kda = [i for i in range(1, total + 1) if i not in mla]
    config = K3Config.from_hf(with_layers(kda, mla, total))
    assert (len(config.kda_layers), len(config.mla_layers)) == (num_kda, num_mla)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported; only 'situ'"),
        ({"moe_renormalize": False}, "moe_renormalize=False is not supported"),
        ({"num_experts_per_token": 1000}, "num_experts_per_token=1000 exceeds num_experts=896"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must equal num_attention_heads=96"),
        ({"hidden_size": "7168"}, "hidden_size='7168' must be an integer"),
        ({"hidden_size": True}, "hidden_size=True must be an integer"),
        ({"hidden_size": 0}, "hidden_size=0 must be positive"),
        ({"moe_intermediate_size": 3000}, "moe_intermediate_size=3000 must be a multiple of 32"),
        ({"eos_token_id": 163_840}, "eos_token_id=163840 is outside the vocabulary of 163840"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
    ],
)
def test_a_value_that_would_be_served_wrongly_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError) as error:
        K3Config.from_hf(released(**changes))
    assert message in str(error.value)


@pytest.mark.parametrize("bound", [-5.5, 0.0, 1.0])
def test_a_gate_bound_outside_the_safe_range_is_refused(bound):
    with pytest.raises(ConfigError, match="must lie in"):
        mini_config(gate_lower_bound=bound)


def test_missing_fields_are_named_together():
    text = {k: v for k, v in RELEASED["text_config"].items() if k not in ("hidden_size", "kv_lora_rank")}
    with pytest.raises(ConfigError, match="lacks hidden_size, kv_lora_rank"):
        K3Config.from_hf(text)


def test_another_model_family_is_recognised_as_such():
    with pytest.raises(ConfigError, match="not a Kimi K3 configuration"):
        K3Config.from_hf({"model_type": "llama", "hidden_size": 4096})


def test_a_folder_without_a_configuration_and_a_broken_one_say_so(tmp_path):
    with pytest.raises(ConfigError, match="needs a config.json"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        K3Config.from_file(tmp_path)


def test_layers_know_their_place_in_their_stacks():
    config = presets.k3()
    assert [config.mixer(i) for i in (0, 3, 90, 91, 92)] == ["kda", "mla", "kda", "mla", "mla"]
    assert (config.mixer_index(91), config.mixer_index(92), config.mixer_index(90)) == (22, 23, 68)
    assert (config.ffn(0), config.ffn(1), config.ffn_index(92)) == ("dense", "moe", 91)
    assert [i for i in range(93) if config.is_snapshot(i)] == [0, 12, 24, 36, 48, 60, 72, 84]


def test_the_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.k3().hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
