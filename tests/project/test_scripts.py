"""The shell scripts: clear one-line errors, nothing to do when set up, arguments passed on."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.project.tracked import REPOSITORY


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts with an interpreter that only tells how it was called, in place of a real .venv."""
    for name in ("scripts", "pyproject.toml", "constraints.txt", ".python-version"):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_setup_explains_itself():
    result = run(str(REPOSITORY / "scripts/setup"), "--help")
    assert result.returncode == 0
    assert "cuda13" in result.stdout and "aot" in result.stdout and "K3JAX_PYTHON" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unknown argument '--fast'; see scripts/setup --help"),
        (["--extra"], "--extra needs a name, as in: scripts/setup --extra cuda13"),
    ],
)
def test_setup_refuses_what_it_does_not_know_in_one_line(arguments, message):
    result = run(str(REPOSITORY / "scripts/setup"), *arguments)
    assert result.returncode == 1
    assert result.stderr == f"scripts/setup: error: {message}\n"


def test_setup_says_when_the_chosen_interpreter_does_not_work():
    result = run(str(REPOSITORY / "scripts/setup"), K3JAX_PYTHON="/nowhere/python")
    assert result.returncode == 1
    assert result.stderr == (
        "scripts/setup: error: K3JAX_PYTHON=/nowhere/python is not a working Python 3.12 or newer\n"
    )


def test_a_chosen_interpreter_is_used_without_any_set_up(checkout):
    result = run(str(checkout / "scripts/serve"), "--port", "9", K3JAX_PYTHON=str(checkout / "python"))
    assert (result.returncode, result.stdout) == (0, "-m serving.run --model demo --port 9\n")
    assert not (checkout / ".venv").exists() and not (checkout / ".tools").exists()


def test_arguments_of_the_test_command_go_to_pytest_alone(checkout):
    result = run(str(checkout / "scripts/test"), "tests/core", "-x", K3JAX_PYTHON=str(checkout / "python"))
    assert (result.returncode, result.stdout) == (0, "-m pytest tests/core -x\n")


def test_the_test_command_runs_every_check_even_after_one_failed(checkout):
    python = checkout / "python"
    python.write_text(python.read_text() + '[ "$2" != ruff ]\n')
    result = run(str(checkout / "scripts/test"), K3JAX_PYTHON=str(python), CI="")
    assert result.returncode == 1
    assert "-m pyright" in result.stdout and result.stdout.endswith("-m pytest -n 2 --dist loadfile\n")
    assert result.stderr == "scripts/test: failed: ruff check,ruff format\n"


def test_checks_that_a_chosen_interpreter_cannot_run_are_reported_as_not_run(checkout):
    python = checkout / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *"import pyright") exit 1 ;; *pyright*) exit 2 ;; esac\n')
    result = run(str(checkout / "scripts/test"), K3JAX_PYTHON=str(python), CI="")
    assert result.returncode == 0, result.stderr
    assert f"== pyright: not run, {python} has no pyright\n" in result.stdout


def test_in_ci_the_slow_tests_run_too(checkout):
    result = run(str(checkout / "scripts/test"), K3JAX_PYTHON=str(checkout / "python"), CI="true")
    assert result.returncode == 0
    assert result.stdout.endswith("-m pytest -n 2 --dist loadfile -m not gpu\n")


def fake_uv(folder, script: str) -> str:
    """Put a uv before every other one and return the PATH for it."""
    folder.mkdir()
    (folder / "uv").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "uv").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


MAKES_A_VENV = """[ "$1" = sync ] || exit 0
echo "$@" >> calls
mkdir -p .venv/bin && ln -sf "$(command -v sh)" .venv/bin/python"""


def test_a_second_set_up_does_nothing_and_what_was_added_stays(checkout):
    path = fake_uv(checkout / "bin", MAKES_A_VENV)
    setup = str(checkout / "scripts/setup")

    def calls() -> list[str]:
        return (checkout / "calls").read_text().splitlines()

    assert run(setup, PATH=path, K3JAX_PYTHON="").returncode == 0
    assert run(setup, "--group", "aot", PATH=path, K3JAX_PYTHON="").returncode == 0
    assert ["--group aot" in call for call in calls()] == [False, True]
    started = time.monotonic()
    assert run(setup, PATH=path, K3JAX_PYTHON="").stderr == ""
    assert run(setup, "--group", "aot", PATH=path, K3JAX_PYTHON="").stderr == ""
    assert time.monotonic() - started < 5
    assert len(calls()) == 2

    (checkout / "constraints.txt").write_text("changed")
    assert run(setup, PATH=path, K3JAX_PYTHON="").returncode == 0
    assert "--group aot" in calls()[2]


def test_a_uv_that_does_not_run_is_passed_over(checkout):
    """A version manager's shim is on PATH and fails; the next uv is taken."""
    path = fake_uv(checkout / "bin", MAKES_A_VENV)
    path = f"{fake_uv(checkout / 'shims', 'echo uv: command not found >&2; exit 127').split(os.pathsep)[0]}:{path}"
    result = run(str(checkout / "scripts/setup"), PATH=path, K3JAX_PYTHON="")
    assert result.returncode == 0, result.stderr
    assert f"{checkout}/bin/uv sync" in result.stderr


def test_a_failed_set_up_tries_the_local_cache_then_says_what_to_do(checkout):
    path = fake_uv(checkout / "bin", '[ "$1" = sync ] || exit 0\necho "$@" >> calls\nexit 2')
    result = run(str(checkout / "scripts/setup"), PATH=path, K3JAX_PYTHON="")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "scripts/setup: error: uv sync failed, its message is above; "
        "without a network, set K3JAX_PYTHON to a Python that has JAX"
    )
    assert ["--offline" in call for call in (checkout / "calls").read_text().splitlines()] == [False, True]
    assert not (checkout / ".venv/.k3jax-setup").exists()
