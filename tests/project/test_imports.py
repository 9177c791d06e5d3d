"""Imports point one way: serving.api -> serving.engine -> serving.core, and serving.executor -> k3jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tracked import REPOSITORY, python_files

ARRAY_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "jax_triton", "triton"}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """List every absolute module name that the source imports, at any depth of nesting, relative imports resolved.

    `from a import b` yields both `a` and `a.b`, since b may be a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*parents, *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def belongs_to(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def is_executor(module: str) -> bool:
    return module.startswith("serving.executor")


def violation(importer: str, imported: str) -> str | None:
    """Say which rule an import breaks, or None."""
    top = imported.split(".")[0]
    if belongs_to(importer, "k3jax") and top == "serving":
        return "k3jax never imports serving"
    if belongs_to(importer, "serving.core"):
        allowed = top in sys.stdlib_module_names or belongs_to(imported, "serving.core") or imported == "serving"
        # The rule shared with the kernel wrappers, which may not import the server; it is plain Python.
        allowed = allowed or belongs_to(imported, "k3jax.export_rule")
        return None if allowed else "serving.core imports only the standard library, itself and k3jax.export_rule"
    if not belongs_to(importer, "serving") or is_executor(importer):
        return None
    if top in ARRAY_LIBRARIES:
        return "in serving, only serving.executor imports JAX"
    if belongs_to(importer, "serving.api", "serving.text") and is_executor(imported):
        return "the front end reaches the device through the engine, never through the executor"
    if belongs_to(importer, "serving.engine") and belongs_to(imported, "serving.api", "serving.text"):
        return "the engine knows nothing about HTTP or text"
    if belongs_to(importer, "serving.engine") and is_executor(imported):
        return "the engine gets its executor handed in"
    return None


def test_imports_point_one_way():
    broken = []
    for path in python_files("k3jax", "serving"):
        importer = module_name(path)
        for imported in sorted(imported_modules(path.read_text(), importer, path.name == "__init__.py")):
            if rule := violation(importer, imported):
                broken.append(f"{path.relative_to(REPOSITORY)} imports {imported}: {rule}")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("importer", "source", "culprit"),
    [
        ("k3jax.load", "def f():\n    from serving.core import types", "serving.core"),
        ("serving.core.pools", "import numpy as np", "numpy"),
        ("serving.core.pools", "from ..engine import Engine", "serving.engine"),
        ("serving.metrics", "import jax.numpy as jnp", "jax.numpy"),
        ("serving.api.app", "from serving import executor", "serving.executor"),
        ("serving.engine", "from .text import stops", "serving.text"),
    ],
)
def test_each_forbidden_import_is_found(importer, source, culprit):
    assert culprit in {name for name in imported_modules(source, importer, False) if violation(importer, name)}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("serving.core.pools", "import heapq\nfrom serving.core.types import Limits"),
        ("serving.executor", "import jax\nimport k3jax"),
        ("serving.api.app", "from serving.engine import Engine\nimport starlette"),
    ],
)
def test_allowed_imports_are_left_alone(importer, source):
    assert not [name for name in imported_modules(source, importer, False) if violation(importer, name)]


def test_the_front_end_and_the_scheduler_import_where_jax_is_absent():
    """What the HTTP process and the scheduler need must not pull JAX in through another module either."""
    modules = [
        module
        for path in python_files("serving")
        if belongs_to(module := module_name(path), "serving.core", "serving.api", "serving.text", "serving.engine")
    ]
    program = "\n".join(
        [
            "import importlib, sys",
            f"sys.modules.update(dict.fromkeys({sorted(ARRAY_LIBRARIES)!r}))",
            f"for name in {modules!r}:",
            "    importlib.import_module(name)",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
