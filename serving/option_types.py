"""Types for numbers on a command line: a bad one is refused in one line that names the option, the value and the fix.

For the programs around the server; its own flags are those of `serving.config`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, without the usage before it; exit status 2."""

    def error(self, message: str) -> NoReturn:
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


def several[Number: (int, float)](parse_one: Callable[[str], Number]) -> Callable[[str], tuple[Number, ...]]:
    """The type of one or more such numbers, with commas between them."""

    def parse(text: str) -> tuple[Number, ...]:
        return tuple(parse_one(part) for part in text.split(","))

    return parse


def _give(least: int, most: int | None) -> str:
    return f"Give one that is at least {least}." if most is None else f"Give one from {least} to {most}."
