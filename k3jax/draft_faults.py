"""What is wrong with a draft's folder, in one line that names it, and a check of its values for NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from k3jax.checkpoint_reader import Checkpoint
from k3jax.draft_fields import DraftError

MAX_LISTED = 3
_CHUNK = 1 << 20  # values at a time, so that they stay in the cache
_FIXES = {  # in the order in which they are told
    "files": "Copy the file again, or restore it",
    "index": "Restore the index that was exported with the files",
    "missing tensors": "Use the config.json and the weights of one export",
    "unknown tensors": "Use the config.json and the weights of one export",
    "wrong shapes": "Use the config.json and the weights of one export",
    "wrong dtypes": "Export the draft unquantized, in bfloat16",
    "values that are no numbers": "Copy the file again; if it is the same, the draft is broken: use another",
}
_OF_FILES = ("files", "index")


def faulty(folder: Path, problems: Mapping[str, list[str]]) -> DraftError:
    """The error for faults by kind. A file that cannot be read explains tensors that are missing, so it hides them."""
    found = {kind: list(faults) for kind, faults in problems.items() if faults}
    of_files = {kind: faults for kind, faults in found.items() if kind in _OF_FILES}
    found = of_files or found
    listed = "; ".join(_listed(kind, faults) for kind, faults in found.items())
    fixes = dict.fromkeys(fix for kind, fix in _FIXES.items() if kind in found)
    return DraftError(f"{folder}: {listed}. {'. '.join(fixes) or 'Use another draft'}.", found)


def _listed(kind: str, faults: list[str]) -> str:
    count = len(faults)
    more = f" and {count - MAX_LISTED} more" if count > MAX_LISTED else ""
    return f"{kind} ({count}): {', '.join(faults[:MAX_LISTED])}{more}"


def values_that_are_no_numbers(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Every one of these bf16 or fp32 tensors that has NaN or infinity in it, with its file.

    Reads them once, as loading does right after; a multiplication by one such value spoils every token of a block.
    """
    found = []
    for name in names:
        stored = checkpoint.tensors[name]
        values = checkpoint.read(name).reshape(-1)
        count = sum(_num_bad(values[start : start + _CHUNK]) for start in range(0, values.size, _CHUNK))
        if count:
            found.append(f"{name} in {stored.file.name} has {count} NaN or infinite of {values.size} values")
    return found


def _num_bad(values: np.ndarray) -> int:
    # Exponents of all ones: on the bits, since numpy's own test of bf16 goes through fp32.
    bits, exponent = (np.uint16, 0x7F80) if values.dtype.itemsize == 2 else (np.uint32, 0x7F800000)
    exponents = values.view(bits) & bits(exponent)
    return int(np.count_nonzero(exponents == exponent)) if exponents.max() == exponent else 0
