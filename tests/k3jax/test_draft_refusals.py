"""Bad drafts: every refusal names the folder, the field, its value and what to do, in one line."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax.config import ConfigError
from k3jax.draft_config import DraftConfig, length_warning
from k3jax.draft_fields import DraftError
from k3jax.draft_loading import load_draft, open_draft
from tests.conversion_names.draft_data import PUBLISHED, changed, tiny, write_draft
from tests.k3jax.golden_data import mini_config

TARGET = mini_config(
    vocab_size=512, hidden_size=128, num_hidden_layers=8, kda_layers=(0, 1, 2, 4, 5, 6), mla_layers=(3, 7)
)
# What Hugging Face and trainers write beside the fields that are read.
BOOKKEEPING = {
    "_name_or_path": "x",
    "_torchspec_version": "0.1.0",
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "initializer_range": 0.02,
    "max_window_layers": 5,
    "pad_token_id": 163839,
    "quantization_config": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.13.1",
    "use_cache": True,
}
RECORDED = {
    "algorithm": "dspark",
    "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8, "verifier_accept_k": 1}],
    "verifier": {"name_or_path": "moonshotai/Kimi-K3", "architectures": ["KimiK3ForConditionalGeneration"]},
}


def yarn(form: str, **changes) -> dict:
    """Rotary positions with YaRN, with changed or removed (`...`) fields."""
    scaling = PUBLISHED["torchspec" if form == "torchspec" else "specforge"]["rope_parameters"] | changes
    return {"rope_parameters": {name: value for name, value in scaling.items() if value is not ...}}


def refusal(folder: Path) -> str:
    """What opening and loading the draft says, which must name its folder in one line."""
    with pytest.raises(DraftError) as error:
        load_draft(open_draft(folder, TARGET), jnp.float32)
    text = str(error.value)
    assert str(folder) in text and "\n" not in text and len(text) < 900
    return text


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_trainers_write_beside_the_fields_changes_nothing(form):
    config, raw = DraftConfig.from_hf(PUBLISHED[form]), changed(PUBLISHED[form])
    extra = {"speculators_config": RECORDED, "speculators_version": "0.7.0"} if form == "speculators" else {}
    for place in (raw, raw.get("transformer_layer_config", {}), raw.get("dflash_config", {})):
        place |= BOOKKEEPING
    assert DraftConfig.from_hf(raw | extra | {"confidence_head_alpha": 1.0}) == config


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        # Sizes and numbers.
        ("specforge", {"block_size": 0}, "block_size=0"),
        ("specforge", {"block_size": -7}, "block_size=-7"),
        ("specforge", {"block_size": "7"}, "block_size='7' of the draft must be an integer"),
        ("specforge", {"rms_norm_eps": 0}, "rms_norm_eps=0 must lie between 0 and 1; released drafts have 1e-05"),
        ("specforge", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan of the draft must be a finite number"),
        ("specforge", {"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ("specforge", {"vocab_size": 500}, "mask_token_id=506 is outside the vocabulary of 500"),
        # Fitting the target.
        ("specforge", {"vocab_size": 1024}, "its vocab_size is 1024, the target's 512"),
        ("specforge", {"hidden_size": 64}, "its hidden_size is 64, the target's 128"),
        ("torchspec", {"target_hidden_size": 64}, "its target_hidden_size is 64, the target's hidden_size 128"),
        ("specforge", {"num_target_layers": 9}, "it was made for 9 layers, the target has 8"),
        ("specforge", {"target_layer_ids": [1, 3, 8]}, "target_layer_ids=[1, 3, 8] (0-based) must lie in"),
        ("speculators", {"aux_hidden_state_layer_ids": [2, 9]}, "taps layers [8], the target's last is 7"),
        # Formulas that are not computed.
        ("specforge", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported in a draft; only 'silu' is"),
        ("torchspec", {"attention_bias": True}, "attention_bias=True"),
        ("speculators", {"mlp_bias": True}, "mlp_bias=True"),
        ("torchspec", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("specforge", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("specforge", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ("specforge", {"projector_type": "domino"}, "projector_type='domino'"),
        ("torchspec", {"projector_type": "domino"}, "projector_type='domino'"),
        ("specforge", {"attention_mode": "kda"}, "attention_mode='kda'"),
        ("torchspec", {"causal": True}, "causal=True"),
        ("speculators", {"causal": False}, "causal=False contradicts"),
        ("specforge", {"logit_softcap": 30.0}, "logit_softcap=30.0 is not known"),
        ("speculators", {"n_routed_experts": 8}, "n_routed_experts=8 is not known"),
        # What contradicts something else.
        ("specforge", {"architectures": ["LlamaForCausalLM"]}, "architectures=['LlamaForCausalLM'] must name"),
        ("specforge", {"architectures": ["K3DSparkModel"]}, "model_type='qwen3' must be k3_dspark"),
        ("torchspec", {"architectures": ["DSparkDraftModel"]}, "architectures=['DSparkDraftModel'] must name K3DSpark"),
        ("specforge", {"model_type": "llama"}, "model_type='llama' must be qwen3"),
        ("specforge", {"layer_types": ["full_attention"] * 3}, "has 3 layers, num_hidden_layers=2"),
        ("torchspec", {"layer_types": ["full_attention"]}, "has 1 layers, num_hidden_layers=2"),
        ("torchspec", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}, "sliding_window=32 is not"),
        ("specforge", {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9}, "layer_types=None with"),
        ("specforge", {"target_num_hidden_layers": 9}, "num_target_layers=8 contradicts target_num_hidden_layers=9"),
        ("specforge", {"dflash_config": {"block_size": 8}}, "dflash_config.block_size=8 contradicts block_size=7"),
        ("specforge", {"q_lora_rank": 48}, "q_lora_rank=48 has no meaning in a GQA draft"),
        ("specforge", {"sliding_window_non_causal": True}, "sliding_window_non_causal=True has no meaning"),
        ("speculators", {"num_target_layers": 8}, "num_target_layers=8 has no meaning"),
        ("speculators", {"speculators_config": {"algorithm": "eagle3"}}, "speculators_config.algorithm='eagle3'"),
        ("torchspec", {"head_dim": 100}, "head_dim=100 must be the width of the keys, 24"),
        # Rotary positions.
        ("specforge", yarn("specforge", rope_type="longrope"), "rope_type='longrope' is not supported"),
        ("specforge", yarn("specforge", type="linear"), "rope_type='yarn' and type='linear' is not supported"),
        ("specforge", yarn("specforge", rope_type=...), "rope_parameters.factor=16.0 has no meaning beside"),
        ("specforge", yarn("specforge", truncate=False), "truncate=False is not supported"),
        ("specforge", yarn("specforge", partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
        ("specforge", yarn("specforge", mrope_section=[1]), "rope_parameters.mrope_section=[1] is not known"),
        ("specforge", yarn("specforge", factor="16"), "rope_parameters.factor='16' of the draft must be a number"),
        ("specforge", yarn("specforge", factor=0.5), "factor=0.5 of YaRN must be at least 1"),
        ("specforge", yarn("specforge", factor=...), "lacks factor"),
        ("specforge", yarn("specforge", mscale=0.7), "mscale=0.7 without mscale_all_dim"),
        ("torchspec", yarn("torchspec", attention_factor=1.5), "attention_factor=1.5 contradicts mscale"),
        ("specforge", {"rope_scaling": {"factor": 2.0}}, "contradicts rope_scaling={'factor': 2.0}"),
        ("specforge", {"factor": 2.0}, "factor=2.0 is not known"),
        ("specforge", {"rope_interleave": True}, "rope_interleave=True is not supported in a draft; only False is"),
        ("torchspec", {"rope_interleave": False}, "rope_interleave=False is not supported in a draft; only True is"),
        # What is missing.
        ("specforge", {"rms_norm_eps": ..., "vocab_size": ...}, "lacks vocab_size, rms_norm_eps"),
        ("torchspec", {"kv_lora_rank": ...}, "lacks kv_lora_rank"),
    ],
)
def test_a_bad_configuration_is_refused_by_field_and_value(tmp_path, form, changes, words):
    raw = tiny(form)
    nested = changes.get("dflash_config", {}) if form == "specforge" else {}
    raw = changed(raw, **{name: value for name, value in changes.items() if name != "dflash_config"})
    raw.get("dflash_config", {}).update(nested)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    text = refusal(tmp_path)
    assert words in text
    assert re.search(r"\. (Use|Correct|Remove|Give|Set|Keep) [^.]+.*\.$", text), text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "config.json does not exist"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold an object, not list"),
        (b"\xff", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json cannot be read: maximum recursion depth"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "config.json cannot be read: Exceeds the limit"),
        (
            '{"model_type": "llama"}',
            "model_type='llama': neither names DSpark, and no projector_type does: this is not",
        ),
        (json.dumps(TARGET.to_hf()), "this is not a draft. Use the folder of a DSpark draft."),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refusal(tmp_path)
    assert words in text and re.search(r"\. (Use|Restore)[^.]+\.$", text), text


# --- tensors ---------------------------------------------------------------------------------------------------------
def edited(folder: Path, edit) -> Path:
    """A tiny draft whose tensors `edit` changed in place."""
    file = write_draft(folder, "specforge") / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return folder


def put(name: str, value, dtype=ml_dtypes.bfloat16):
    """Puts one value into the middle of a tensor."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensor = tensors[name].astype(dtype)
        tensor.reshape(-1)[tensor.size // 2] = value
        tensors[name] = tensor

    return edit


@pytest.mark.parametrize("size", [0, 7, 200, -1])
def test_a_file_that_is_cut_off_is_said_to_be_so_with_its_size_and_no_tensors(tmp_path, size):
    file = write_draft(tmp_path, "specforge") / "model.safetensors"
    content = file.read_bytes()[:size]
    file.write_bytes(content)
    text = refusal(tmp_path)
    assert f"model.safetensors is cut off or {'too long' if size == -1 else 'no safetensors file'}" in text
    assert f"{len(content)} bytes" in text and text.endswith("Copy the file again, or restore it.")
    assert "missing" not in text and "layers." not in text


def test_weights_that_are_not_there_are_one_fault(tmp_path):
    (write_draft(tmp_path, "specforge") / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json is there" in refusal(tmp_path)


def test_many_missing_tensors_are_counted_and_a_few_named(tmp_path):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith("layers.")]:
            tensors["block." + name] = tensors.pop(name)

    text = refusal(edited(tmp_path, rename))
    assert re.search(
        r"missing tensors \(22\): (layers\.\S+ ){2}layers\.\S+ and 19 more; unknown tensors \(22\): ", text
    )
    assert text.endswith(" and 19 more. Use the config.json and the weights of one export.")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1].copy()}),
            "wrong shapes (1): fc.weight is [128, 383], expected [128, 384]. Use the config.json and the weights",
        ),
        (
            lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].astype(np.int8)}),
            "wrong dtypes (1): norm.weight is I8, expected BF16 or F32. Export the draft unquantized",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["norm.weight"].copy()}),
            "mean the same: {'norm.weight': ['model.norm.weight', 'norm.weight']}. Remove one of each.",
        ),
        (
            put("fc.weight", np.nan),
            "fc.weight in model.safetensors has 1 NaN or infinite of 49152 values. Copy the file",
        ),
        (put("markov_head.markov_w2.weight", -np.inf), "markov_head.markov_w2.weight in model.safetensors has 1 NaN"),
        (put("confidence_head.proj.bias", np.nan, np.float32), "confidence_head.proj.bias in model.safetensors has 1 "),
    ],
)
def test_bad_tensors_are_named(tmp_path, edit, words):
    assert words in refusal(edited(tmp_path, edit))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_the_largest_numbers_are_numbers(tmp_path, dtype):
    folder = edited(tmp_path, put("fc.weight", ml_dtypes.finfo(dtype).max, dtype))
    assert load_draft(open_draft(folder, TARGET), jnp.float32)


def test_values_are_checked_behind_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("k3jax.draft_faults._CHUNK", 1000)
    text = refusal(edited(tmp_path, put("fc.weight", np.nan)))
    assert "has 1 NaN or infinite of 49152 values" in text


# --- contexts --------------------------------------------------------------------------------------------------------
def test_a_draft_for_shorter_contexts_is_told_with_both_lengths():
    draft = DraftConfig.from_hf(changed(tiny("specforge"), max_position_embeddings=1024))
    assert length_warning(draft, 1024) is None
    warning = length_warning(draft, 4096)
    assert warning and "max_position_embeddings is 1024, requests may have 4096 tokens" in warning


def test_a_draft_error_is_a_configuration_error():
    assert issubclass(DraftError, ConfigError)
