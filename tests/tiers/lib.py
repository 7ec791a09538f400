"""What the tests of the tiers share."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import Tier

MIB = 1 << 20


def s3_options(rgw: object, **changes: object) -> S3Options:
    """Options for the gateway of the tests."""
    return S3Options(endpoint_url=rgw.endpoint_url, region="us-east-1", **changes)  # type: ignore


def s3_tier(rgw: object, prefix: str = "ckpt/run 1", bucket: str | None = None) -> S3Tier:
    """A tier in a bucket of its own."""
    return S3Tier(bucket or rgw.new_bucket(), prefix, s3_options(rgw))  # type: ignore


def read(tier: Tier, key: str, offset: int = 0, length: int | None = None) -> bytes:
    """Bytes of an object, by its ETag."""
    info = tier.head(key)
    buffer = bytearray(info.size - offset if length is None else length)
    tier.read_into(key, offset, memoryview(buffer), info.etag)
    return bytes(buffer)


def listed(tier: Tier, prefix: str = "", *, deep: bool = False) -> tuple[list[str], list[str]]:
    """(keys, prefixes) of all pages; asserts that the pages have an end."""
    keys: list[str] = []
    prefixes: list[str] = []
    for page in pages(tier, prefix, deep):
        keys += page[0]
        prefixes += page[1]
    return keys, prefixes


def pages(tier: Tier, prefix: str, deep: bool) -> Iterator[tuple[list[str], list[str]]]:
    """The pages of a listing, as (keys, prefixes)."""
    token: str | None = None
    for _ in range(1000):
        page = tier.list(prefix, deep=deep, token=token)
        yield [found.key for found in page.objects], page.prefixes
        token = page.next_token
        if token is None:
            return
    raise AssertionError("the listing has no end")


def random_bytes(size: int) -> bytes:
    """Bytes that no compression or mistake makes equal."""
    return os.urandom(size)
