"""The tree stays small, readable and free of things that mean something on one machine only."""

import re
import statistics

from tests.project.tracked import REPOSITORY, python_files, tracked_files

MEBIBYTE = 2**20


def megabytes(folder: str = "") -> float:
    root = REPOSITORY / folder
    return sum(path.stat().st_size for path in tracked_files() if path.is_relative_to(root)) / MEBIBYTE


def line_counts() -> dict[str, int]:
    return {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in python_files()}


def test_the_tracked_files_stay_small_enough_to_travel():
    assert megabytes() < 56
    assert megabytes("demo") < 42
    assert megabytes("tests/data") < 12


def test_no_python_file_is_longer_than_700_lines():
    assert {name: count for name, count in line_counts().items() if count > 700} == {}


def test_the_median_module_fits_on_a_few_screens():
    counts = [count for name, count in line_counts().items() if count and not name.startswith("tests/")]
    assert statistics.median(counts) <= 150


def test_file_names_of_tests_are_unique():
    """Test folders are no packages, so two test files of one name would be one module."""
    names = [path.name for path in python_files("tests") if path.name.startswith("test_")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_tracked_files_name_no_machine_path_and_no_registry_host():
    # Written in pieces, or this file would be the first offender. Plain words first: they are quick to search
    # in megabytes of weights, and what follows them tells `/x/` the folder from `a/x/` the end of another path.
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org", "deb.debian" + ".org", "proxy.golang" + ".org"]
    others = ["/" + "work/", "../" + "shared", "/" + "root/", "uv" + "-real"]
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        for word in [*hosts, *others]:
            exact = rb"(?<![\w.}$])" + re.escape(word.encode())
            if word.encode() in content and (word in hosts or re.search(exact, content)):
                found.append(f"{path.relative_to(REPOSITORY)}: {word}")
    assert found == []
