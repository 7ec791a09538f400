"""From the URL that a person writes to the tier it names.

What it keeps true: a URL that passes `parse_url` names one bucket and prefix, or one directory, in one way; boto3 is
imported only when a tier in S3 is opened.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fs.tiers.options import BadTierSetting, S3Options
from fs.tiers.tier import Tier

ALLOWED = "write s3://BUCKET/PREFIX, s3://BUCKET or file:///DIRECTORY"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


class S3Url(NamedTuple):
    """*prefix*: without "/" at its ends; empty for the whole bucket."""

    bucket: str
    prefix: str


class DirectoryUrl(NamedTuple):
    """*path*: absolute; taken as it is written, "%" included."""

    path: str


def parse_url(url: str) -> S3Url | DirectoryUrl:
    """What *url* names. Raises BadTierSetting. Nothing is asked of anybody."""
    if any(not character.isprintable() for character in url):
        raise BadTierSetting(f"{url!r}: holds characters that cannot be printed")
    scheme, colon, rest = url.partition("://")
    if not colon:
        raise BadTierSetting(f"{url!r} is no URL of a durable tier: {ALLOWED}")
    if scheme == "s3":
        return _s3(url, rest)
    if scheme == "file":
        return _directory(url, rest)
    raise BadTierSetting(f"{url!r}: {scheme!r} is not known: {ALLOWED}")


def check_url(url: str) -> None:
    """Raise BadTierSetting unless *url* can name a tier."""
    parse_url(url)


def open_tier(url: str, options: S3Options) -> Tier:
    """The tier that *url* names; not yet asked whether it is there (`Tier.check` does that).

    *options* matter to s3:// alone. Raises BadTierSetting, TierRefused.
    """
    place = parse_url(url)
    if isinstance(place, S3Url):
        from fs.tiers.s3 import S3Tier

        return S3Tier(place.bucket, place.prefix, options)
    from fs.tiers.directory import DirectoryTier

    return DirectoryTier(place.path)


def _s3(url: str, rest: str) -> S3Url:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise BadTierSetting(
            "s3:// is followed by the bucket's name alone: give the endpoint by the option endpoint_url,"
            " and credentials where boto3 looks for them (environment, ~/.aws/credentials, instance role)"
        )
    if not _BUCKET.fullmatch(bucket):
        raise BadTierSetting(
            f"{url!r}: {bucket!r} cannot be a bucket's name"
            f" (3 to 255 letters, digits, '.', '_' and '-'): {ALLOWED}"
        )
    return S3Url(bucket, _clean(url, prefix.strip("/")) if prefix.strip("/") else "")


def _directory(url: str, rest: str) -> DirectoryUrl:
    if not rest.startswith("/"):
        raise BadTierSetting(
            f"{url!r}: a directory is given by its absolute path, after three slashes: file:///DIRECTORY"
        )
    path = rest.strip("/")
    if not path:
        raise BadTierSetting(
            f"{url!r}: the root directory cannot be a durable tier; name a directory in it"
        )
    return DirectoryUrl("/" + _clean(url, path))


def _clean(url: str, path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise BadTierSetting(f"{url!r}: the path must not hold empty parts, '.' or '..'")
    return path
