"""Types for numbers on a command line: a bad one is refused in one line that names the option, the value and the fix.

For the programs around the server; its own flags are those of `serving.config`.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, without the usage before it; exit status 2."""

    def error(self, message: str) -> NoReturn:
        if given := re.fullmatch(r"argument (\S+)/(--no-\S+): ignored explicit argument (.*)", message):
            message = f"argument {given[1]} takes no value, such as {given[3]}. Give {given[1]} or {given[2]}."
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number. {_give(least, most)}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} is out of range. {_give(least, most)}")
        return value

    return parse


def real(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Callable[[str], float]:
    """The type of a finite number that is above, at least or at most what is given."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", least), ("at most", most))
        if bound is not None
    ]
    wanted = "Give a number" + (f" {' and '.join(bounds)}." if bounds else ".")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number. {wanted}") from None
        is_low = (above is not None and value <= above) or (least is not None and value < least)
        if not math.isfinite(value) or is_low or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} is out of range. {wanted}")
        return value

    return parse


def several[Value](
    parse_one: Callable[[str], Value], *, count: int | None = None, separator: str = ","
) -> Callable[[str], tuple[Value, ...]]:
    """The type of one or more such values, or of exactly `count`, with a separator between them."""

    def parse(text: str) -> tuple[Value, ...]:
        parts = text.split(separator)
        if count is not None and len(parts) != count:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {count} values. Give {count} with {separator!r} between."
            )
        return tuple(parse_one(part) for part in parts)

    return parse


def json_lines(text: str) -> list[dict[str, Any]]:
    """The type of a file of JSON lines: the objects in it. Lines that start with anything else are left out."""
    try:
        lines = pathlib.Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}. Name a file of JSON lines.") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise argparse.ArgumentTypeError(
                    f"{text!r} is no file of JSON lines: line {number}: {error}. Write it again."
                ) from None
    return found


def _give(least: int, most: int | None) -> str:
    return f"Give one that is at least {least}." if most is None else f"Give one from {least} to {most}."
