"""The tiers that the contract is held to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fs.tiers.directory import DirectoryTier
from fs.tiers.memory import MemoryTier
from fs.tiers.tier import Tier
from tests.tiers.lib import s3_tier

KINDS = ("memory", "directory", "sidecars", "s3")


@pytest.fixture
def credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's credentials, where boto3 looks first, and nothing of the user's own."""
    rgw = request.getfixturevalue("rgw")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.secret_key)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Tier]:
    """Makes a tier of a kind, empty."""

    def make(kind: str) -> Tier:
        if kind == "memory":
            return MemoryTier(page_size=7)
        if kind == "s3":
            request.getfixturevalue("credentials")
            return s3_tier(request.getfixturevalue("rgw"))
        (tmp_path / "tier").mkdir(exist_ok=True)
        return DirectoryTier(str(tmp_path / "tier"), attributes=kind == "directory")

    return make


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.services] if kind == "s3" else []) for kind in KINDS
    ]
)
def tier(request: pytest.FixtureRequest, make_tier: Callable[[str], Tier]) -> Tier:
    """One tier of each kind, empty."""
    return make_tier(request.param)
