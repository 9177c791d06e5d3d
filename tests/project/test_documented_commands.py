"""Every command in the documentation names something that exists and only options that it takes."""

import functools
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.project.documented import Command, commands_in, documents
from tests.project.tracked import REPOSITORY, python_files

COMMANDS = [
    command
    for path in documents(REPOSITORY)
    for command in commands_in(path.read_text(), str(path.relative_to(REPOSITORY)))
]
# Words that only move around or fetch the project itself: nothing of ours can be wrong in them.
SHELL = {"cd", "export", "git"}


@functools.cache
def help_text(words: tuple[str, ...]) -> str:
    environment = os.environ | {"COLUMNS": "200"}
    result = subprocess.run(
        [*words, "--help"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, f"{' '.join(words)} --help failed:\n{result.stderr[-2000:]}"
    return result.stdout + result.stderr


def runnable(command: Command) -> tuple[str, ...]:
    """Return the words that start the documented program with this interpreter, subcommand included."""
    program = command.program
    if program == ("scripts/serve",):
        return (sys.executable, "-m", "serving.run")  # the script would check the set-up first
    if program == ("scripts/test",):
        return (sys.executable, "-m", "pytest")
    if program[0].startswith("python"):
        program = (sys.executable, *program[1:])
    elif program[0].endswith(".py"):
        program = (sys.executable, *program)
    words = command.arguments
    has_subcommand = bool(words) and re.fullmatch(r"[a-z][a-z-]*", words[0]) is not None
    return (*program, words[0]) if has_subcommand else program


def problem_with(command: Command) -> str | None:
    """Say what is wrong with a documented command, or None."""
    program, first = command.program, command.words[0]
    if first in SHELL:
        return None
    if first == "curl":
        return problem_with_curl(command)
    if first == "uv" or command.words[:2] == ("pip", "install"):
        return problem_with_install(command)
    if first.startswith("scripts/") or first == ".ci/run":
        if not os.access(REPOSITORY / first, os.X_OK):
            return f"{first} is not an executable file"
    elif program[:2] == ("python", "-m"):
        location = REPOSITORY / program[2].replace(".", "/")
        if not location.with_suffix(".py").is_file() and not (location / "__main__.py").is_file():
            return f"there is no module {program[2]} to run"
    elif first == "python" and len(program) == 2:
        if not (REPOSITORY / program[1]).is_file():
            return f"there is no file {program[1]}"
    else:
        return f"no rule here checks {first!r}: add one, or do not document it"
    if not command.flags:
        return None
    text = help_text(runnable(command))
    unknown = [flag for flag in command.flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
    return f"unknown options {unknown}" if unknown else None


def problem_with_curl(command: Command) -> str | None:
    """A documented request goes to this machine and to a path that the server has."""
    for word in command.arguments:
        if match := re.fullmatch(r"(?:http://)?([^/:]+):\d+(/[^?]*)?(\?.*)?", word):
            host, path = match.group(1), match.group(2) or "/"
            if host not in {"127.0.0.1", "localhost"}:
                return f"a request to {host}, which is not this machine"
            sources = (file.read_text() for file in python_files("serving"))
            return None if any(f'"{path}"' in source for source in sources) else f"the server has no path {path}"
    return "no address"


def problem_with_install(command: Command) -> str | None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    known = {
        "--extra": set(project["project"]["optional-dependencies"]),
        "--group": set(project["dependency-groups"]),
        "-c": {"constraints.txt"},
    }
    for option, value in zip(command.arguments, command.arguments[1:], strict=False):
        if option in known and value not in known[option]:
            return f"{option} {value}: there is only {sorted(known[option])}"
    return None


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_a_documented_command_works(command):
    assert problem_with(command) is None


def test_the_readme_names_the_commands_that_do_everything():
    text = (REPOSITORY / "README.md").read_text()
    programs = {command.program for command in commands_in(text, "README.md")}
    assert {("scripts/serve",), ("scripts/test",)} <= programs
    assert "--group aot" in text
    assert "--extra cuda13" in text


def test_commands_are_read_as_a_shell_would():
    text = """
```bash
# a comment
JAX_PLATFORMS=cpu scripts/serve --port 8001 \\
  --seed=3 > log &
cd here && python -m serving.run --model demo | tee out
```
```python
not_a_command()
```
"""
    found = commands_in(text, "x.md")
    assert [command.words for command in found] == [
        ("scripts/serve", "--port", "8001", "--seed=3"),
        ("cd", "here"),
        ("python", "-m", "serving.run", "--model", "demo"),
        ("tee", "out"),
    ]
    assert found[0].flags == ("--port", "--seed")
    assert found[2].program == ("python", "-m", "serving.run")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("scripts/nothing", "not an executable"),
        ("scripts/setup --extra cuda13 --fast", "unknown options ['--fast']"),
        ("scripts/test --no-such-flag", "unknown options"),
        ("python -m serving.nothing", "no module"),
        ("python scripts/nothing.py", "no file"),
        ("make all", "no rule here"),
        ("uv sync --extra cuda12", "cuda12"),
        ("curl http://example.com:80/v1/models", "not this machine"),
        ("curl http://127.0.0.1:8000/v9/nothing", "no path /v9/nothing"),
    ],
)
def test_a_wrong_command_is_noticed(line, complaint):
    (command,) = commands_in(f"```bash\n{line}\n```\n", "x.md")
    assert complaint in (problem_with(command) or "")
