"""The folder that a conversion works in, so that it can be killed at any point and go on later.

`TARGET.partial` holds the work, `TARGET.partial.journal` beside it one line per unit that is complete and on the disk.
The last step renames the folder, so a folder named TARGET is always whole.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from k3jax.checkpoint_reader import PARTIAL_SUFFIX
from k3jax.conversion.orbax_writer import sync

JOURNAL_SUFFIX = ".journal"


class ConversionError(ValueError):
    """A conversion that cannot start, or whose result is not right. The message says what to do."""


def refuse_inside(source: Path, target: Path) -> None:
    """Raise `ConversionError` for a target inside the source: the source would change, and hold its own result."""
    if target.resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"{target} lies inside {source}, which must stay as it is. Choose a target beside it.")


class PartialFolder:
    """`with` takes the folder for this process; leaving it keeps what is done."""

    def __init__(self, target: Path, identity: dict[str, Any]):
        self.target = target
        self.folder = target.with_name(target.name + PARTIAL_SUFFIX)
        self.journal = self.folder.with_name(self.folder.name + JOURNAL_SUFFIX)
        self.done: dict[str, Any] = {}
        self._identity = identity
        self._descriptor = -1

    def __enter__(self) -> PartialFolder:
        if self.target.exists():
            raise ConversionError(f"{self.target} exists already. Choose another target or remove it first.")
        if self.folder.exists() and not self.journal.exists():
            raise ConversionError(
                f"{self.folder} exists and is of no conversion. Move it away or choose another target."
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.journal, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConversionError(
                f"another process is converting into {self.folder}. Wait for it or stop it."
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        os.close(self._descriptor)

    def _take_over(self) -> None:
        """Read what an earlier run finished. A line that was cut off was never complete."""
        content = self.journal.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = [orjson.loads(line) for line in whole.splitlines()]
        if not self.folder.exists() or not lines:  # a journal alone is what a finished conversion may leave behind
            shutil.rmtree(self.folder, ignore_errors=True)
            os.ftruncate(self._descriptor, 0)
            self.folder.mkdir()
            sync(self.folder.parent)
            self._append(self._identity)
            return
        if lines[0] != self._identity:
            raise ConversionError(
                f"{self.folder} is the unfinished conversion of {lines[0].get('source')} as it was then, with other "
                f"contents or options. Remove it and {self.journal.name} to start again, or choose another target."
            )
        os.ftruncate(self._descriptor, len(whole))
        self.done = {line["unit"]: line["record"] for line in lines[1:]}

    def record(self, unit: str, record: Any) -> None:
        """Note a unit as complete; its files must be on the disk."""
        self._append({"unit": unit, "record": record})
        self.done[unit] = orjson.loads(orjson.dumps(record))

    def _append(self, line: dict[str, Any]) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        content = orjson.dumps(line) + b"\n"
        while content:
            content = content[os.write(self._descriptor, content) :]
        os.fsync(self._descriptor)

    def finish(self) -> None:
        """Give the folder its name. A kill between the two steps leaves a journal that means nothing."""
        sync(self.folder)
        self.folder.rename(self.target)
        sync(self.target.parent)
        self.journal.unlink()

    def discard(self) -> None:
        """Remove everything: no later run could use what is there."""
        shutil.rmtree(self.folder)
        self.journal.unlink()
