"""Every file that the documentation names, in text or in a link, exists."""

import re

import pytest

from tests.project.documented import documents
from tests.project.tracked import REPOSITORY

_PATH = re.compile(r"(?<![\w/.~-])(?:demo|docs|k3jax|scripts|serving|tests|\.ci)/[\w/.-]*\w")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]*)?\)")


def missing(markdown: str, folder) -> list[str]:
    named = [REPOSITORY / match for match in _PATH.findall(_LINK.sub("]", markdown))]
    linked = [folder / match for match in _LINK.findall(markdown)]
    return [str(path) for path in (*named, *linked) if not path.exists()]


@pytest.mark.parametrize("document", documents(REPOSITORY), ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document):
    assert missing(document.read_text(), document.parent) == []


def test_a_name_or_link_that_leads_nowhere_is_noticed():
    text = "`k3jax/nothing.py`, [x](none.md), [y](README.md#figures), ~/.cache/k3jax/programs, [z](http://127.0.0.1)"
    assert missing(text, REPOSITORY) == [str(REPOSITORY / name) for name in ("k3jax/nothing.py", "none.md")]
