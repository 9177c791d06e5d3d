"""The files that belong to the project: what git tracks, or what an unpacked archive holds."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_NOT_PART_OF_AN_ARCHIVE = {"__pycache__", "build", "dist"}


def tracked_files() -> list[Path]:
    """List the project's files.

    Untracked files that are not ignored count too, so that a new file is checked before its commit.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = {name.decode() for name in listing.stdout.split(b"\0") if name}
        return sorted(path for name in names if (path := REPOSITORY / name).is_file())
    return sorted(path for path in REPOSITORY.rglob("*") if path.is_file() and not _is_ignored(path))


def python_files(*folders: str) -> list[Path]:
    """List the Python files, all of them or those under the named top-level folders."""
    files = [path for path in tracked_files() if path.suffix == ".py"]
    return [path for path in files if not folders or path.relative_to(REPOSITORY).parts[0] in folders]


def _is_ignored(path: Path) -> bool:
    parts = path.relative_to(REPOSITORY).parts
    hidden = parts[0].startswith(".") and parts[0] not in {".ci", ".editorconfig", ".gitignore", ".python-version"}
    return hidden or parts == ("uv.lock",) or any(part in _NOT_PART_OF_AN_ARCHIVE for part in parts)
