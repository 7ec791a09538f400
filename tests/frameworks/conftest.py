"""Marks these tests, and sets the environment before a framework is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import lib

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture(scope="session")
def _environment() -> None:
    os.environ.update(lib.ENVIRONMENT)


@pytest.fixture(scope="session")
def torch(_environment: None) -> Any:
    """The module, imported when the first test needs it."""
    torch = lib.need("torch")
    torch.set_num_threads(1)
    return torch
