"""Options and URLs of tiers: what is allowed, and what a person is told otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fs.errors import CkptfsError
from fs.tiers.directory import DirectoryTier
from fs.tiers.opening import DirectoryUrl, S3Url, check_url, open_tier, parse_url
from fs.tiers.options import BadTierSetting, S3Options


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"endpoint_url": "http://127.0.0.1:9000"},
        {"endpoint_url": "https://s3.example.org/", "addressing_style": "path"},
        {"region": "eu-central-1", "profile": "train ing", "storage_class": "STANDARD_IA"},
        {"sse": "AES256"},
        {"sse": "aws:kms", "sse_kms_key_id": "arn:aws:kms:eu-central-1:1:key/2"},
        {"request_checksum_calculation": "when_supported", "connect_timeout_s": 0.5},
        {"read_timeout_s": 3600, "max_connections": 512},
    ],
)
def test_options_that_are_allowed(fields: dict[str, Any]) -> None:
    assert msgspec.convert(fields, S3Options) == S3Options(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoint_url": "s3.example.org"}, "endpoint_url.*https://HOST"),
        ({"endpoint_url": "http://host/bucket"}, "endpoint_url.*http://HOST"),
        ({"addressing_style": "host"}, "addressing_style 'host'.*'auto', 'path', 'virtual'"),
        ({"sse": "kms"}, "sse 'kms'.*AES256"),
        ({"sse_kms_key_id": "x"}, "sse_kms_key_id.*aws:kms"),
        ({"sse": "AES256", "sse_kms_key_id": "x"}, "sse_kms_key_id.*aws:kms"),
        ({"request_checksum_calculation": "never"}, "request_checksum_calculation.*when_required"),
        ({"response_checksum_validation": ""}, "response_checksum_validation.*when_required"),
        ({"connect_timeout_s": 0}, r"connect_timeout_s = 0.*0\.1 to 3600 seconds"),
        ({"read_timeout_s": float("nan")}, r"read_timeout_s.*0\.1 to 3600 seconds"),
        ({"max_connections": 0}, "max_connections = 0.*1 to 512"),
        ({"region": "eu central"}, "region 'eu central'"),
        ({"storage_class": "glacier"}, "storage_class 'glacier'"),
        ({"profile": "a\nb"}, "profile"),
    ],
)
def test_options_that_are_not(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadTierSetting, match=words) as caught:
        S3Options(**fields)
    assert isinstance(caught.value, CkptfsError) and isinstance(caught.value, ValueError)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, S3Options)


def test_a_password_in_an_endpoint_is_not_repeated() -> None:
    with pytest.raises(BadTierSetting, match="credentials") as caught:
        S3Options(endpoint_url="https://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(BadTierSetting, match="credentials") as caught:
        check_url("s3://key:hunter2@bucket/prefix")
    assert "hunter2" not in str(caught.value)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(msgspec.ValidationError, match="endpoint"):
        msgspec.convert({"endpoint": "http://host"}, S3Options)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", S3Url("bucket", "")),
        ("s3://bucket/", S3Url("bucket", "")),
        ("s3://my.bucket-1/ckpt/run 1/", S3Url("my.bucket-1", "ckpt/run 1")),
        ("s3://Bucket_2/a%20b?c#d", S3Url("Bucket_2", "a%20b?c#d")),
        ("file:///mnt/ckpt", DirectoryUrl("/mnt/ckpt")),
        ("file:///mnt/ckpt/", DirectoryUrl("/mnt/ckpt")),
        ("file:///mnt/ü %20", DirectoryUrl("/mnt/ü %20")),
    ],
)
def test_urls_that_are_allowed(url: str, place: object) -> None:
    check_url(url)
    assert parse_url(url) == place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "s3://BUCKET"),
        ("bucket/prefix", "s3://BUCKET"),
        ("/mnt/ckpt", "file:///DIRECTORY"),
        ("gs://bucket", "'gs' is not known"),
        ("s3://", "cannot be a bucket's name"),
        ("s3://b", "cannot be a bucket's name"),
        ("s3:///prefix", "cannot be a bucket's name"),
        ("s3://bu cket", "cannot be a bucket's name"),
        ("s3://host:9000/bucket", "endpoint_url"),
        ("s3://bucket/a//b", "empty parts"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a\nb", "cannot be printed"),
        ("file://mnt/ckpt", "three slashes"),
        ("file:///", "root directory"),
        ("file:///a/../../etc", "'..'"),
    ],
)
def test_urls_that_are_not(url: str, words: str) -> None:
    with pytest.raises(BadTierSetting, match=words):
        check_url(url)


def test_a_directory_is_opened_without_boto3(tmp_path: Path) -> None:
    tier = open_tier(f"file://{tmp_path}", S3Options())
    assert isinstance(tier, DirectoryTier)
    assert tier.describe() == f"file://{tmp_path}"
    script = (
        "import sys; from fs.tiers.opening import open_tier; from fs.tiers.options import S3Options;"
        f"open_tier('file://{tmp_path}', S3Options()).put('a', b'x', {{}});"
        "assert not {m for m in sys.modules if m.startswith('boto')}"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, cwd=root)
