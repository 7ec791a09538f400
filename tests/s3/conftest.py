"""Tiers in a bucket of their own, through the fault proxy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fs.tiers import s3client
from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from tests.faultproxy import FaultProxy
from tests.rgw import REGION, Rgw, User
from tests.s3.cases import SHORT_S
from tests.s3.store import PREFIX, Store


@pytest.fixture
def store(rgw: Rgw) -> Store:
    return Store(rgw)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, rgw: Rgw) -> None:
    """Nothing of the user's own; the gateway's credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in rgw.credentials_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.0)


@pytest.fixture
def make_tier(environment: None, proxy: FaultProxy, store: Store) -> Callable[..., S3Tier]:
    """Makes tiers in the bucket of `store` (or *bucket*), through `proxy`; keywords are S3Options.

    They wait long, if not told.
    """

    def make(bucket: str = store.bucket, **changes: Any) -> S3Tier:
        defaults = {"endpoint_url": proxy.url, "region": REGION}
        timeouts = {"connect_timeout_s": 20.0, "read_timeout_s": 20.0}
        return S3Tier(bucket, PREFIX, S3Options(**(defaults | timeouts | changes)))

    return make


@pytest.fixture
def tier(make_tier: Callable[..., S3Tier]) -> S3Tier:
    return make_tier()


@pytest.fixture
def hasty(make_tier: Callable[..., S3Tier]) -> S3Tier:
    """One that does not wait long."""
    return make_tier(connect_timeout_s=SHORT_S, read_timeout_s=SHORT_S)


@pytest.fixture
def credentials_file(
    monkeypatch: pytest.MonkeyPatch, environment: None, tmp_path: Path
) -> Callable[[User], None]:
    """Writes the shared credentials file, from which boto3 takes them now; replaced in one step."""
    file = tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(user: User) -> None:
        new = tmp_path / "new"
        new.write_text(
            f"[default]\naws_access_key_id={user.access_key}\naws_secret_access_key={user.secret_key}\n"
        )
        new.replace(file)

    return write
