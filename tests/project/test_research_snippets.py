"""The Python in the documentation runs: each document's blocks, in order, in one fresh process."""

import os
import re
import subprocess
import sys

import pytest

from tests.project.tracked import REPOSITORY

_BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
# Compiling is nearly all of the time; skimping on LLVM's part changes no result that the documents show.
_QUICK_COMPILE = "--xla_backend_optimization_level=0"
_RUN_BLOCKS = """
import sys
exec(compile(sys.stdin.read(), sys.argv[1], "exec"), {"__name__": "__main__"})
"""


def python_of(markdown: str) -> str:
    """Blank everything but the Python blocks, so that a traceback has the document's own line numbers."""
    lines = [""] * (markdown.count("\n") + 1)
    for block in _BLOCK.finditer(markdown):
        first = markdown.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def run(source: str, name: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_QUICK_COMPILE}".strip(),
    }
    return subprocess.run(
        [sys.executable, "-c", _RUN_BLOCKS, name],
        cwd=REPOSITORY,
        env=environment,
        input=source,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    "document",
    [pytest.param("README.md", marks=pytest.mark.slow), "docs/research.md"],  # the README loads and runs the demo
)
def test_the_python_of_a_document_runs(document):
    source = python_of((REPOSITORY / document).read_text())
    assert source.strip(), f"{document} has no Python block"
    result = run(source, document)
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_block_that_fails_names_its_line_in_the_document():
    markdown = "# Title\n\n```bash\nexit 1\n```\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n"
    result = run(python_of(markdown), "some.md")
    assert result.returncode == 1
    assert 'File "some.md", line 14' in result.stderr and "AssertionError" in result.stderr
