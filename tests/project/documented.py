"""Reading the commands out of the documentation."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^[ \t]*```bash[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")
_SEPARATORS = {"&&", "||", ";", "&", "|"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One documented command: its words without environment assignments and redirections, and where it stands."""

    words: tuple[str, ...]
    where: str

    @property
    def program(self) -> tuple[str, ...]:
        """The words that name the program: one, or `python -m module` and `python file`."""
        if not self.words[0].startswith("python"):
            return self.words[:1]
        return self.words[:3] if self.words[1:2] == ("-m",) else self.words[:2]

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[len(self.program) :]

    @property
    def flags(self) -> tuple[str, ...]:
        """Every option, values after `=` left off."""
        return tuple(word.split("=")[0] for word in self.arguments if re.match(r"--?[A-Za-z]", word))


def commands_in(markdown: str, name: str) -> list[Command]:
    """List the commands in the fenced bash blocks of one document.

    Continued lines are joined, comments dropped, and `a && b` or `a | b` is two commands.
    """
    found = []
    for block in _FENCE.findall(markdown):
        lexer = shlex.shlex(block.replace("\\\n", " ").replace("\n", "\n; "), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        current: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _SEPARATORS:
                current.append(word)
                continue
            words = _without_redirections(current)
            while words and _ASSIGNMENT.fullmatch(words[0]):
                words.pop(0)
            if words:
                found.append(Command(words=tuple(words), where=f"{name}: {' '.join(words)}"))
            current = []
    return found


def documents(root: Path) -> list[Path]:
    """List the documents whose commands are checked."""
    top = [root / "README.md", root / "CONTRIBUTING.md"]
    return [path for path in [*top, *sorted((root / "docs").glob("**/*.md"))] if path.is_file()]


def _without_redirections(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif set(word) <= set("<>&"):
            skip = True
        else:
            kept.append(word)
    return kept
