"""ServeConfig, its flags, its environment variables and its table in the docs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.config import PATH_SETTINGS, ConfigError, ServeConfig, flag_name, value_type
from serving.flags import env_name, flag_table, parse_config

REPOSITORY = Path(__file__).parents[2]

# One value per setting that differs from its default.
OTHER_VALUES: dict[str, Any] = {
    "model": "/models/k3",
    "served_model_name": "kay",
    "load_format": "dummy",
    "dtype": "float64",
    "max_model_len": 77,
    "seed": 5,
    "tp": 2,
    "shard_latents": "on",
    "max_num_seqs": 3,
    "max_waiting": 5,
    "max_step_tokens": 128,
    "num_pages": 9,
    "num_slots": 8,
    "memory_fraction": 0.5,
    "compile_cache": "/tmp/cache",
    "host": "0.0.0.0",
    "port": 81,
    "api_key": "k",
    "max_body_mb": 2.5,
    "shutdown_timeout_s": 1.5,
    "log_level": "error",
    "token_budget": "static",
    "reserve_draft_slots": 7,
    "mixed_batch": "gather",
    "overlap": False,
    "prefix_cache": False,
    "checkpoint": "split",
    "checkpoint_stride": 1536,
    "checkpoint_every": 4096,
    "checkpoint_share": 0.1,
    "host_cache_gb": 1.5,
    "offload": "none",
    "draft": "/models/draft",
    "draft_tokens": 5,
    "state_rollback": "snapshot",
    "rejection_sampling": "block",
    "adaptive_verification": False,
    "kernels": "xla",
    "moe_finalize": "separate",
}


def test_the_defaults_need_no_flag():
    config = parse_config([], {})
    assert config == ServeConfig()
    assert (config.model, config.host, config.port) == ("demo", "127.0.0.1", 8000)


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_every_setting_can_be_given_as_flag_and_as_variable(name: str):
    value = OTHER_VALUES[name]
    flags = [flag_name("no_" + name)] if value is False else [flag_name(name), str(value)]
    beside = ["--host-cache-gb", "1.5"] if name == "offload" else []
    assert getattr(parse_config(flags + beside, {}), name) == value
    assert getattr(parse_config(beside, {env_name(name): str(value)}), name) == value


def test_every_setting_is_covered_here():
    # dcp has one legal value only
    assert {field.name for field in dataclasses.fields(ServeConfig)} == {*OTHER_VALUES, "dcp"}


def test_a_flag_beats_its_variable():
    assert parse_config(["--port", "81"], {"K3JAX_PORT": "82"}).port == 81


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-length", "5"], "Did you mean --max-model-len?"),
        (["--max-model", "5"], "Unknown flag --max-model."),
        (["demo"], "Unexpected argument 'demo'"),
        (["--dtype", "float16"], "float16"),
        (["--port", "65536"], "--port=65536"),
        (["--overlapping"], "Did you mean --overlap?"),
        (["--checkpoint-stride", "100"], "--checkpoint-stride=100"),
        (["--checkpoint-every", "-64"], "--checkpoint-every=-64"),
        (["--checkpoint-share", "1"], "--checkpoint-share=1"),
        (["--host-cache-gb", "-1"], "--host-cache-gb=-1"),
        (["--reserve-draft-slots", "-1"], "--reserve-draft-slots=-1"),
        (["--no-prefix-cache", "--host-cache-gb", "2"], "--host-cache-gb=2.0 has no effect beside --no-prefix-cache"),
        (["--no-prefix-cache", "--checkpoint", "split"], "--checkpoint=split has no effect beside --no-prefix-cache"),
        (["--checkpoint", "off", "--checkpoint-stride", "128"], "has no effect beside --checkpoint=off"),
        (["--checkpoint", "off", "--checkpoint-share", "0.5"], "has no effect beside --checkpoint=off"),
        (["--kernels", "xla", "--moe-finalize", "deferred"], "=deferred has no effect beside --kernels=xla"),
        (["--num-slots", "9", "--checkpoint-share", "0.1"], "has no effect beside --num-slots=9"),
        (["--offload", "none"], "--offload=none has no effect without --host-cache-gb"),
        (["--checkpoint-every", "320", "--checkpoint-stride", "1536"], "Use a multiple of 1536."),
        (["--draft", "none", "--token-budget", "additive"], "--token-budget=additive has no effect"),
        (["--load-format", "fake", "--token-budget", "static"], "--token-budget=static has no effect"),
        (["--token-budget", "additive", "--reserve-draft-slots", "0"], "--token-budget=additive has no effect"),
        (["--draft", ""], "--draft is empty"),
        (["--draft-tokens", "0"], "--draft-tokens=0"),
        (["--draft-tokens", "16"], "--draft-tokens=16"),
        (["--state-rollback", "undo"], "undo"),
        (["--tp", "0"], "--tp=0"),
        (["--max-num-seqs", "-1"], "--max-num-seqs=-1"),
        (["--max-waiting", "-1"], "--max-waiting=-1"),
        (["--memory-fraction", "nan"], "--memory-fraction=nan"),
        (["--memory-fraction", "1.5"], "--memory-fraction=1.5"),
        (["--max-body-mb", "0"], "--max-body-mb=0"),
        (["--shutdown-timeout-s", "inf"], "--shutdown-timeout-s=inf"),
        (["--seed", "-1"], "--seed=-1"),
        (["--num-pages", "10000000000000"], "--num-pages=10000000000000 is out of range. Use 2 to 16777216."),
        (["--num-slots", "10000000000000"], "--num-slots=10000000000000 is out of range. Use 2 to 1048576."),
        (["--max-num-seqs", "1000000000000"], "--max-num-seqs=1000000000000 is out of range. Use 1 to 16384."),
        (["--max-step-tokens", "9" * 20], f"--max-step-tokens={'9' * 20} is out of range. Use 1 to 131072."),
        (["--max-waiting", "9" * 20], f"--max-waiting={'9' * 20} is out of range."),
        (["--checkpoint-stride", "640000000"], "--checkpoint-stride=640000000 is out of range."),
        (["--model", ""], "--model"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_a_mistake_names_flag_value_and_fix(flags: list[str], words: str):
    with pytest.raises(ConfigError) as error:
        parse_config(flags, {})
    assert words in str(error.value)
    assert str(error.value).endswith((".", "?"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dcp", "2"], "not built"),
        (["--num-pages", "9", "--memory-fraction", "0.5"], "no effect beside"),
        (["--load-format", "fake", "--dtype", "float32"], "no effect beside --load-format=fake"),
        (["--load-format", "fake", "--tp", "2"], "no effect beside --load-format=fake"),
        (["--load-format", "fake", "--compile-cache", "x"], "no effect beside --load-format=fake"),
        (["--load-format", "fake", "--shard-latents", "on"], "no effect beside --load-format=fake"),
        (["--draft", "none", "--state-rollback", "replay"], "--state-rollback=replay has no effect beside"),
        (["--draft", "none", "--draft-tokens", "3"], "--draft-tokens=3 has no effect beside --draft=none"),
        (["--draft", "none", "--no-adaptive-verification"], "--no-adaptive-verification has no effect beside"),
        (["--model", "/m", "--rejection-sampling", "block"], "=block has no effect without a draft"),
        (["--mixed-batch", "gather", "--draft-tokens", "3"], "beside --mixed-batch=gather, which has no way"),
        (["--mixed-batch", "gather", "--draft", "/d"], "--draft=/d cannot be used beside --mixed-batch=gather"),
        (["--load-format", "fake", "--draft", "/d"], "--draft=/d cannot be used beside --load-format=fake"),
        (["--load-format", "dummy", "--draft-tokens", "3"], "beside --load-format=dummy"),
    ],
)
def test_a_flag_that_could_not_have_any_effect_is_refused_with_the_reason(flags: list[str], words: str):
    """D68."""
    with pytest.raises(ConfigError, match=words):
        parse_config(flags, {})


@pytest.mark.parametrize(
    ("settings", "is_used"),
    [
        ({}, True),
        ({"draft": "none"}, False),
        ({"model": "/m"}, False),
        ({"mixed_batch": "gather"}, False),
        ({"load_format": "dummy"}, False),
        ({"load_format": "fake"}, False),
    ],
)
def test_the_demo_takes_its_own_draft_unless_another_setting_excludes_it(settings: dict[str, Any], is_used: bool):
    assert ServeConfig(**settings).may_take_own_draft is is_used


@pytest.mark.parametrize(
    "flags",
    [
        ["--draft", "none", "--token-budget", "additive", "--reserve-draft-slots", "7"],
        ["--token-budget", "static"],
        ["--checkpoint-every", "3072", "--checkpoint-stride", "1536"],
    ],
)
def test_flags_that_need_each_other_are_accepted_together(flags: list[str]):
    parse_config(flags, {})


def test_without_offload_the_host_tier_is_off():
    assert ServeConfig(host_cache_gb=2.0).host_cache_bytes == 2 * 10**9
    assert ServeConfig(host_cache_gb=2.0, offload="none").host_cache_bytes == 0


def test_every_number_has_an_upper_bound():
    """D68: beyond it the flag, its value and the fix are named before anything is loaded or allocated."""
    numbers = [field.name for field in dataclasses.fields(ServeConfig) if value_type(field.name) in (int, float)]
    assert len(numbers) >= 15
    for name in numbers:
        for value in (2**1000, 10**18) if value_type(name) is int else (1e308,):
            if name == "seed" and value < 2**63:
                continue
            with pytest.raises(ConfigError, match=rf"{flag_name(name)}=\S+ is out of range\. Use .*\d"):
                parse_config([flag_name(name), str(value)], {})


FIELDS = {field.name: field for field in dataclasses.fields(ServeConfig)}
WRONG_VALUES: dict[type, tuple[Any, ...]] = {
    bool: (0, 1, 0.0, "no", "true", np.True_),
    int: (True, False, 2.5, 3.0, "3", np.float64(3), np.True_, np.array([1, 2])),
    float: (True, False, "0.5", 1j, np.True_),
    str: (5, 0, False, True, 2.5, ("a",)),
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_value_of_another_type_is_refused_by_name_with_what_to_give(name: str):
    """User case of `LLM(adaptive_verification=0)`: a Python caller's value is never taken for something else."""
    field = FIELDS[name]
    wrong = [*WRONG_VALUES[value_type(name)], object(), [], {}, b"x"]
    if field.default is not None:
        wrong.append(None)
    if name not in PATH_SETTINGS:
        wrong.append(Path("/models/k3"))
    for value in wrong:
        settings: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=rf"^{name}=.* is of type {type(value).__name__}\. Give \S.*\.$") as error:
            ServeConfig(**settings)
        if len(repr(value)) < 20:
            assert repr(value) in str(error.value)
        for choice in field.metadata["choices"]:
            assert choice in str(error.value)


@pytest.mark.parametrize("name", PATH_SETTINGS)
def test_a_folder_may_be_a_path(name: str):
    settings: dict[str, Any] = {name: Path("/models/k3")}
    assert getattr(ServeConfig(**settings), name) == "/models/k3"


def test_numbers_of_numpy_become_pythons_own():
    settings: dict[str, Any] = {"port": np.int64(81), "max_body_mb": np.float32(2.5), "shutdown_timeout_s": 3}
    config = ServeConfig(**settings)
    assert (type(config.port), type(config.max_body_mb), type(config.shutdown_timeout_s)) == (int, float, float)
    assert (config.port, config.max_body_mb, config.shutdown_timeout_s) == (81, 2.5, 3.0)


def test_a_number_beyond_the_largest_float_is_out_of_range():
    with pytest.raises(ConfigError, match="--host-cache-gb=inf is out of range"):
        ServeConfig(host_cache_gb=10**400)


def draft_settings() -> list[dict[str, Any]]:
    """Every way in which settings about drafts can meet."""
    ways: dict[str, tuple[Any, ...]] = {
        "model": ("demo", "/models/k3"),
        "load_format": ("auto", "dummy", "fake"),
        "mixed_batch": ("zero-copy", "gather"),
        "draft": (None, "none", "/models/draft"),
        "draft_tokens": (None, 3),
        "adaptive_verification": (None, False, True),
        "state_rollback": (None, "replay"),
        "token_budget": ("adaptive", "static"),
        "reserve_draft_slots": (None, 0, 2),
    }
    each = [dict(zip(ways, values, strict=True)) for values in itertools.product(*ways.values())]
    # Two such mistakes are told one after the other.
    return [way for way in each if not (way["load_format"] == "fake" and way["mixed_batch"] == "gather")]


def fixed(settings: dict[str, Any], fix: str) -> dict[str, Any]:
    """`settings` after one of the fixes of a message was followed."""
    changed, (left_out, *given) = dict(settings), fix.split("give ")
    flags = re.findall(r"--([a-z-]+)", left_out)
    for flag in flags:
        name = flag.removeprefix("no-").replace("-", "_")
        assert settings[name] != FIELDS[name].default, f"{flag} was not given: {settings}"
        changed[name] = FIELDS[name].default
    for what in given:
        if what.startswith("the folder of a draft with --draft"):
            changed["draft"] = "/models/other-draft"
        else:
            assert what.startswith("--reserve-draft-slots of 1 or more"), fix
            changed["reserve_draft_slots"] = 1
    assert changed != settings, fix
    return changed


def test_every_fix_that_a_refusal_of_draft_settings_names_works():
    """One after the other where a message tells of one mistake of two, and never more than that."""
    num_refused = 0
    for settings in draft_settings():
        try:
            ServeConfig(**settings)
            continue
        except ConfigError as error:
            message = str(error)
        num_refused += 1
        is_other_mistake = settings["token_budget"] == "static" and settings["reserve_draft_slots"] == 0
        is_other_mistake |= settings["load_format"] == "fake" and settings["draft"] == "none"
        if "Leave one of them out" in message:  # --draft=none beside --load-format=fake
            fixes = ["leave out --draft", "leave out --load-format"]
        else:
            sentence = message.rsplit(". ", 1)[1].removesuffix(".")
            fixes = re.split(r", or (?=leave|give)|, (?=leave|give)", sentence[0].lower() + sentence[1:])
            assert all(fix.startswith(("leave out ", "give ")) for fix in fixes), message
        for fix in fixes:
            try:
                ServeConfig(**fixed(settings, fix))
            except ConfigError as error:
                assert is_other_mistake, f"{settings}: {message} -> {fix}: {error}"
    assert num_refused > 100


def test_all_flags_that_need_a_draft_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        parse_config(["--draft", "none", "--draft-tokens", "3", "--no-adaptive-verification"], {})
    assert str(error.value) == (
        "--draft-tokens=3 and --no-adaptive-verification have no effect beside --draft=none: nothing is drafted. "
        "Leave out --draft-tokens and --no-adaptive-verification, leave out --draft, or give the folder of a draft "
        "with --draft."
    )


def test_no_draft_is_suggested_where_none_can_run():
    with pytest.raises(ConfigError) as error:
        parse_config(["--mixed-batch", "gather", "--draft-tokens", "3"], {})
    assert str(error.value).endswith(" Leave out --draft-tokens, or leave out --mixed-batch.")


SWITCHES = [name for name in FIELDS if value_type(name) is bool]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("form", ["{flag}={word}", "{flag} {word}"])
def test_a_value_behind_a_switch_is_answered_with_the_flag_that_means_it(name: str, form: str):
    yes, no = flag_name(name), flag_name(f"no_{name}")
    for flag, word, fix in (
        (yes, "False", no),
        (yes, "0", no),
        (yes, "true", yes),
        (no, "True", f"{yes} or {no}"),
        (no, "false", f"{yes} or {no}"),
    ):
        arguments = form.format(flag=flag, word=word).split()
        with pytest.raises(ConfigError) as error:
            parse_config(arguments, {})
        assert str(error.value) == f"{' '.join(arguments)}: {flag} takes no value. Give {fix}."
    with pytest.raises(ConfigError, match=f"Give {yes} or {no}"):
        parse_config([f"{yes}=maybe"], {})


def test_there_are_switches_and_they_may_be_followed_by_other_flags():
    assert {"overlap", "adaptive_verification"} <= set(SWITCHES)
    assert not parse_config(["--no-overlap", "--port", "0"], {}).overlap


def test_a_variable_that_is_nearly_a_setting_is_refused():
    with pytest.raises(ConfigError, match="Did you mean K3JAX_MODEL"):
        parse_config([], {"K3JAX_MODELL": "x"})


def test_variables_of_other_programs_are_left_alone():
    assert parse_config([], {"K3JAX_ZZZ": "x", "PORT": "1"}) == ServeConfig()


def test_a_variable_that_does_not_parse_is_named():
    with pytest.raises(ConfigError, match="K3JAX_PORT='eighty'"):
        parse_config([], {"K3JAX_PORT": "eighty"})


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, "demo"), ({"model": "/models/k3/"}, "k3"), ({"model": "/models/k3", "served_model_name": "kay"}, "kay")],
)
def test_the_served_name_is_the_given_one_or_the_folders(settings: dict[str, Any], name: str):
    assert ServeConfig(**settings).served_name == name


def test_the_secret_setting_is_not_public():
    assert "secret" not in str(ServeConfig(api_key="secret").public())


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"], {})
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag_name(field.name) in shown for field in dataclasses.fields(ServeConfig))


def test_the_table_in_the_docs_is_the_generated_one():
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    table = text.split("`python -m serving.flags` -->\n")[1].split("\n<!-- end of flags")[0]
    assert table == flag_table()
