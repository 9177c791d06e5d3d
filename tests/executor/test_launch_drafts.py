"""From flags to an engine with a draft: what is loaded, what it changes, and what is refused at start and why."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest
from safetensors.numpy import save_file

from k3jax import replay_serving, snapshot
from k3jax.draft_config import DraftConfig
from k3jax.draft_loading import open_draft
from serving import launch
from serving.config import ConfigError, ServeConfig
from serving.run import main
from tests.conversion_names.draft_data import changed, draft_tensors, tiny
from tests.executor.device import CONFIG
from tests.executor.test_launch import build, restored_settings  # noqa: F401  (a fixture for every test here)
from tests.k3jax.golden_data import random_tensors, write_checkpoint


def write(folder: Path, form: str = "specforge", **changes) -> Path:
    """A draft for `CONFIG`; `changes` are of its configuration."""
    folder.mkdir(parents=True)
    depth = {"num_target_layers": 3} if form == "specforge" else {}
    raw = changed(tiny(form), **({"target_layer_ids": [0, 1, 2]} | depth | changes))
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(draft_tensors(DraftConfig.from_hf(raw)), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("draft") / "tiny")


def test_a_draft_brings_weights_pools_and_limits(monkeypatch, model, draft):
    built, plain = build(monkeypatch, model, draft=str(draft)), build(monkeypatch, model)
    config = open_draft(draft, CONFIG).config
    assert built.program.drafting.config == config
    assert built.limits.draft_tokens == built.program.drafting.tokens == config.block_size
    assert plain.limits.draft_tokens == 0 and plain.program.drafting is None
    assert built.limits.page_bytes > plain.limits.page_bytes
    assert built.limits.slot_bytes == plain.limits.slot_bytes
    assert jax.tree.leaves(built.weights["draft"]) and "draft" not in plain.weights
    assert built.measures_costs


def test_every_setting_of_speculation_changes_what_is_built(monkeypatch, model, draft):
    flags = {"draft_tokens": 3, "state_rollback": "snapshot", "rejection_sampling": "block"}
    built = build(monkeypatch, model, draft=str(draft), adaptive_verification=False, **flags)
    assert built.program.drafting.tokens == built.limits.draft_tokens == 3
    assert (built.program.drafting.rollback, built.program.drafting.rule) == ("snapshot", "block")
    assert built.program.ops.kda_verify is snapshot.verify
    assert not built.measures_costs
    default = build(monkeypatch, model, draft=str(draft)).program
    assert default.ops.kda_verify is replay_serving.verify
    assert (default.drafting.rollback, default.drafting.rule) == ("replay", "standard")


def test_the_identity_of_states_tells_drafts_apart(monkeypatch, model, draft, tmp_path):
    """D61: pages hold the draft's keys and values too."""
    other = write(tmp_path / "other", markov_rank=8)
    built = [build(monkeypatch, model, draft=name) for name in (str(draft), str(other), "none")]
    assert len({each.limits.identity for each in built}) == 3


def test_the_policy_has_what_the_flags_say():
    policy = launch.scheduler_policy(ServeConfig(adaptive_verification=False, reserve_draft_slots=2))
    assert (policy.adaptive_verification, policy.reserve_draft_slots) == (False, 2)
    assert launch.scheduler_policy(ServeConfig()).adaptive_verification


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 500, "mask_token_id": 499}, "its vocab_size is 500, the target's 512"),
        ({"hidden_size": 64, "target_hidden_size": 128}, "its hidden_size is 64, the target's 128"),
        ({"num_target_layers": 8, "target_layer_ids": [1, 3, 6]}, "it was made for 8 layers, the target has 3"),
        ({"num_target_layers": ..., "target_layer_ids": [1, 3]}, r"it taps layers \[3\], the target's last is 2"),
        ({"block_size": 16}, "drafts blocks of 16 tokens; a step verifies at most 15"),
    ],
)
def test_a_draft_for_something_else_is_refused_with_the_reason(monkeypatch, model, tmp_path, changes, words):
    """D13."""
    folder = write(tmp_path / "draft", **changes)
    with pytest.raises(ValueError, match=words):
        build(monkeypatch, model, draft=str(folder))


def test_more_drafts_than_the_block_has_are_refused(monkeypatch, model, draft):
    with pytest.raises(ConfigError, match="--draft-tokens=9 is more than the draft's block of 7. Use 1 to 7"):
        build(monkeypatch, model, draft=str(draft), draft_tokens=9)


def test_a_folder_that_is_not_there_is_named(monkeypatch, model, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        build(monkeypatch, model, draft=str(tmp_path / "nowhere"))


def test_a_model_is_no_draft(monkeypatch, model):
    with pytest.raises(ValueError, match="this is not a draft"):
        build(monkeypatch, model, draft=str(model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0}, " --draft {draft}: {draft}/config.json: rms_norm_eps=0 must lie between 0 and 1"),
        ({"block_size": 16}, ": --draft={draft} drafts blocks of 16 tokens; a step verifies at most 15"),
    ],
)
def test_a_bad_draft_is_one_line_that_names_its_flag_and_exit_2(tmp_path, caplog, model, draft, changes, words):
    folder = shutil.copytree(draft, tmp_path / "bad")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    flags = ("--port", "0", "--compile-cache", str(tmp_path / "cache"))
    assert main(["--model", str(model), "--draft", str(folder), *flags]) == 2
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert error.startswith("Cannot serve" + words.format(draft=folder)) and "\n" not in error


def test_lengths_beyond_those_of_the_draft_are_warned_of(caplog, monkeypatch, model, tmp_path):
    folder = write(tmp_path / "short", max_position_embeddings=64)
    limits = build(monkeypatch, model, draft=str(folder)).limits
    (warning,) = [record.getMessage() for record in caplog.records if "max_position_embeddings" in record.getMessage()]
    assert f"is 64, requests may have {limits.max_model_len} tokens" in warning and str(folder) in warning


def test_what_the_flags_of_speculation_came_to_is_told(monkeypatch, model, draft):
    """D68."""
    names = ("draft", "draft_tokens", "state_rollback", "rejection_sampling", "adaptive_verification")

    def told(**flags) -> tuple:
        settings = build(monkeypatch, model, **flags).settings
        return tuple(settings[name] for name in names)

    assert told() == told(draft="none") == ("none", None, None, None, None)
    assert told(draft=str(draft)) == (str(draft), 7, "replay", "standard", True)
    flags = {"draft_tokens": 3, "state_rollback": "snapshot", "rejection_sampling": "block"}
    given = told(draft=str(draft), adaptive_verification=False, **flags)
    assert given == (str(draft), 3, "snapshot", "block", False)


def test_every_setting_that_is_left_open_is_told(monkeypatch, model, draft, tmp_path):
    """D68: but for those that the limits tell, and those that nothing on a CPU depends on."""
    told = build(monkeypatch, model, draft=str(draft), compile_cache=str(tmp_path)).settings
    of_limits = {"max_model_len", "max_num_seqs", "max_step_tokens", "num_pages", "num_slots", "reserve_draft_slots"}
    of_http = {"served_model_name", "api_key"}
    open_settings = {f.name for f in dataclasses.fields(ServeConfig) if f.default in (None, "auto")}
    assert open_settings - of_limits - of_http - {"load_format"} == set(told)
    assert {name for name, value in told.items() if value in (None, "auto")} == {"memory_fraction", "moe_finalize"}
    assert (told["dtype"], told["kernels"], told["shard_latents"]) == ("float32", "xla", "off")
    assert told["compile_cache"] == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({"draft_tokens": 3}, "--draft-tokens=3"),
        ({"state_rollback": "replay", "adaptive_verification": False}, "--state-rollback=replay and --no-adaptive-ver"),
        ({"token_budget": "static"}, "--token-budget=static"),
    ],
)
def test_flags_about_drafts_are_refused_when_the_demos_own_is_missing(monkeypatch, tmp_path, flags, shown):
    """D68: before any weight is read, with the folder and what can be done."""
    monkeypatch.setattr(launch, "DEMO_DRAFT_FOLDER", tmp_path / "gone")
    with pytest.raises(ConfigError) as error:
        launch.build_engine(ServeConfig(**flags))
    message = str(error.value)
    assert message.startswith(shown) and str(tmp_path / "gone" / "config.json") in message
    assert "with --draft, or leave out --" in message


def test_the_log_tells_that_the_demos_own_draft_is_missing(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(launch, "DEMO_DRAFT_FOLDER", tmp_path / "gone")
    assert launch.draft_folder(ServeConfig()) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(tmp_path / "gone") in record.message
    assert launch.draft_folder(ServeConfig(draft="none")) is None
    assert launch.draft_folder(ServeConfig(model="/m")) is None
    assert len(caplog.records) == 1


def test_the_demos_own_draft_is_taken_when_it_is_there(caplog):
    assert launch.draft_folder(ServeConfig(draft_tokens=3)) == launch.DEMO_DRAFT_FOLDER
    assert not caplog.records
