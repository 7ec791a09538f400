"""SEMANTICS.md names the test of every promise: the tests exist, and no POSIX test is missing there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "SEMANTICS.md"


def names_below(directory: Path) -> set[str]:
    """Names of test functions and classes in the sources below a directory."""
    return {
        node.name
        for path in directory.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.startswith(("test_", "Test"))
    }


def named() -> set[str]:
    return set(re.findall(r"`((?:test_|Test)\w+)`", DOCUMENT.read_text()))


def test_every_named_test_exists():
    missing = named() - names_below(TESTS)
    assert not missing, f"named in SEMANTICS.md, but there is no such test: {sorted(missing)}"


def test_every_posix_test_is_named():
    missing = names_below(TESTS / "posix") - named()
    assert not missing, f"not named in SEMANTICS.md: {sorted(missing)}"


def test_every_row_of_a_table_names_a_test():
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| promise", "| where")):
            assert re.search(r"`(test_|Test)\w+`", line.split("|")[2]), line
