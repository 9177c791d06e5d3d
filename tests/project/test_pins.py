"""The tested versions: one list, written twice (for uv and for pip), covering everything that is installed."""

import importlib.metadata
import os
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.tracked import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONSTRAINTS = [
    line
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


def direct_requirements() -> list[Requirement]:
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *sum(extras.values(), []), *sum(groups.values(), [])]
    return [Requirement(text) for text in texts]


def pinned_versions() -> dict[str, str]:
    pins = [Requirement(line) for line in CONSTRAINTS]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


def test_pyproject_and_constraints_txt_pin_the_same_versions():
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == CONSTRAINTS


def test_the_list_is_sorted_exact_and_without_addresses():
    assert sorted(CONSTRAINTS) == CONSTRAINTS
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    assert "://" not in (REPOSITORY / "pyproject.toml").read_text()


def test_the_supported_jax_range_starts_at_the_pinned_version():
    jax = next(requirement for requirement in direct_requirements() if requirement.name == "jax")
    assert str(jax.specifier) == "<0.13,>=0.11.2"
    pins = pinned_versions()
    assert {name: pins[name] for name in ("jax", "jaxlib", "flax", "orbax-checkpoint")} == {
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "flax": "0.12.10",
        "orbax-checkpoint": "0.12.4",
    }


def test_every_direct_dependency_is_pinned_inside_the_range_it_asks_for():
    pins = pinned_versions()
    outside = [
        str(requirement)
        for requirement in direct_requirements()
        if (name := canonicalize_name(requirement.name)) not in pins or not requirement.specifier.contains(pins[name])
    ]
    assert outside == []


@pytest.mark.skipif("K3JAX_PYTHON" in os.environ, reason="K3JAX_PYTHON: the environment is the user's own")
def test_everything_installed_for_the_project_has_the_pinned_version():
    pins, wrong, seen = pinned_versions(), [], set()
    queue = direct_requirements()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, *sorted(requirement.extras))
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra or group that is not installed here
        if pins.get(name) != distribution.version:
            wrong.append(f"{name} is {distribution.version}, pinned {pins.get(name, 'nowhere')}")
        for text in distribution.requires or []:
            child = Requirement(text)
            if any(child.marker is None or child.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                child.marker = None
                queue.append(child)
    assert wrong == []


def test_the_interpreter_is_one_the_project_supports():
    assert PROJECT["project"]["requires-python"] == ">=3.12"
    assert (REPOSITORY / ".python-version").read_text().strip() == "3.12"
    assert sys.version_info >= (3, 12)
