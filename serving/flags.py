"""Command line, environment variables and documentation table, all derived from `ServeConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from serving.config import ConfigError, ServeConfig, flag_name, switch_name, value_type

ENV_PREFIX = "K3JAX_"
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def env_name(field_name: str) -> str:
    """`max_model_len` -> `K3JAX_MAX_MODEL_LEN`."""
    return ENV_PREFIX + field_name.upper()


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> ServeConfig:
    """Build the configuration; a flag beats its environment variable.

    Raises:
        ConfigError: unknown flag or variable, a value that does not parse, or one that `ServeConfig` refuses.
        SystemExit: `--help` was asked for.
    """
    settings = read_environment(environment)
    _refuse_values_of_switches(arguments)
    namespace, unknown = build_parser().parse_known_args(list(arguments))
    if unknown:
        raise ConfigError(_unknown_flag_message(unknown))
    settings.update(vars(namespace))
    return ServeConfig(**settings)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that K3JAX_* variables give.

    A name that is nearly a setting's is refused as a typing mistake; other K3JAX_* names belong to other programs.
    """
    fields = {env_name(field.name): field for field in dataclasses.fields(ServeConfig)}
    settings: dict[str, Any] = {}
    for name, text in environment.items():
        if not name.startswith(ENV_PREFIX):
            continue
        if name not in fields:
            if hint := _hint(name, fields):
                raise ConfigError(f"Environment variable {name} names no setting.{hint}")
            continue
        field = fields[name]
        try:
            settings[field.name] = _from_text(value_type(field.name), text)
        except ValueError:
            kind = value_type(field.name).__name__
            raise ConfigError(f"{name}={text!r} is not of type {kind}. Correct or unset it.") from None
    return settings


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; flags that are not given leave no trace in the namespace."""
    parser = _Parser(
        prog="python -m serving.run",
        description="Serve a Kimi K3 model over an OpenAI-compatible HTTP API.",
        epilog="Every flag is also an environment variable: --max-model-len is K3JAX_MAX_MODEL_LEN.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(ServeConfig):
        meta = field.metadata
        if meta["group"] not in groups:
            groups[meta["group"]] = parser.add_argument_group(meta["group"])
        default = "" if field.default is None else f" (default: {field.default})"
        options: dict[str, Any] = {"dest": field.name, "help": (meta["help"] + default).replace("%", "%%")}
        if value_type(field.name) is bool:
            options["action"] = argparse.BooleanOptionalAction  # --overlap and --no-overlap
        elif meta["choices"]:
            options["choices"] = meta["choices"]
        else:
            options |= {"type": value_type(field.name), "metavar": meta["metavar"]}
        groups[meta["group"]].add_argument(flag_name(field.name), **options)
    return parser


def _from_text(kind: type, text: str) -> Any:
    """Raises `ValueError`."""
    if kind is not bool:
        return kind(text)
    if text.lower() not in _WORDS:
        raise ValueError(text)
    return _WORDS[text.lower()]


def flag_table() -> str:
    """Return the Markdown table of docs/operations.md; a test compares the two."""
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(ServeConfig):
        choices = field.metadata["choices"]
        values = " \\| ".join(choices) if choices else field.metadata["metavar"].replace("|", " \\| ")
        default = "" if field.default is None else f"`{field.default}`"
        flag = f"`{flag_name(field.name)}` {values}".rstrip()
        if value_type(field.name) is bool:
            flag = f"`{flag_name(field.name)}` `{flag_name('no_' + field.name)}`"
        lines.append(f"| {flag} | `{env_name(field.name)}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Reports through `ConfigError`, so that every configuration mistake ends the same way: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}. See --help.")


def _refuse_values_of_switches(arguments: Sequence[str]) -> None:
    """`--overlap=False` and `--overlap False` get to know the flag that they mean."""
    names = [field.name for field in dataclasses.fields(ServeConfig) if value_type(field.name) is bool]
    switches = {switch_name(name, value): (name, value) for name in names for value in (True, False)}
    for argument, behind in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        flag, equals, text = argument.partition("=")
        if flag not in switches or not (equals or behind.lower() in _WORDS):
            continue
        name, value = switches[flag]
        meant = _WORDS.get((text or behind).lower()) if value else None  # --no-overlap=True may mean either
        fixes = (True, False) if meant is None else (meant,)
        shown = argument if equals else f"{argument} {behind}"
        fix = " or ".join(switch_name(name, fix) for fix in fixes)
        raise ConfigError(f"{shown}: {flag} takes no value. Give {fix}.")


def _unknown_flag_message(unknown: list[str]) -> str:
    names = [field.name for field in dataclasses.fields(ServeConfig)]
    known = [flag_name(name) for name in names]
    known += [flag_name("no_" + name) for name in names if value_type(name) is bool]
    first = unknown[0].split("=")[0]
    if not first.startswith("-"):
        return f"Unexpected argument {first!r}. Settings are given as flags, such as --model PATH. See --help."
    return f"Unknown flag {first}.{_hint(first, known)} See --help."


def _hint(name: str, known: Any) -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" Did you mean {nearest[0]}?" if nearest else ""


if __name__ == "__main__":
    print(flag_table())
