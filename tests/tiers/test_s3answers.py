"""Answers that no store should give, and some do: nothing hangs, nothing is made up."""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable
from typing import Any

import botocore.exceptions
import pytest

from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.s3client import S3Client
from fs.tiers.tier import (
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierRefused,
    TierUploadMissing,
)

NOW = datetime.datetime(2026, 1, 1, 0, 0, 0, 123000, tzinfo=datetime.UTC)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., S3Tier]:
    """A tier below "ckpt" whose calls are answered by a function of (operation, parameters)."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")

    def make(answer: Callable[[str, dict[str, Any]], Any]) -> S3Tier:
        def call(self: Any, what: str, operation: str, key: str, **parameters: Any) -> Any:
            return answer(operation, parameters)

        monkeypatch.setattr(S3Client, "call", call)
        return S3Tier("bucket", "ckpt", S3Options(endpoint_url="http://127.0.0.1:1"))

    return make


def body(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"Body": io.BytesIO(data), "ContentLength": len(data), **fields}


def test_uploads_without_an_end(answered: Callable[..., S3Tier]) -> None:
    page = {"IsTruncated": True, "Uploads": [{"Key": "ckpt/a", "UploadId": "1"}]}
    found = []
    with pytest.raises(TierError, match="repeats itself"):
        for upload in answered(lambda *_: page).uploads():
            found.append(upload)
            assert len(found) < 10
    with pytest.raises(TierError, match="repeats itself"):
        list(answered(lambda *_: {"IsTruncated": True}).uploads())


def test_uploads_with_missing_fields_and_of_others(answered: Callable[..., S3Tier]) -> None:
    tier = answered(
        lambda *_: {
            "Uploads": [
                {"Key": "ckpt/a"},
                {"UploadId": "1"},
                {},
                {"Key": "ckpt2/a", "UploadId": "2"},
                {"Key": "ckpt", "UploadId": "3"},
                {"Key": "ckpt/", "UploadId": "4"},
                {"Key": "ckpt/b", "UploadId": "5"},
                {"Key": "ckpt/c", "UploadId": "6", "Initiated": NOW},
            ]
        }
    )
    assert [tuple(found) for found in tier.uploads()] == [
        ("b", "5", None),
        ("c", "6", 1767225600_123000000),
    ]


def test_uploads_are_asked_for_behind_the_last_one(answered: Callable[..., S3Tier]) -> None:
    asked = []

    def answer(operation: str, parameters: dict[str, Any]) -> Any:
        asked.append((parameters.get("KeyMarker"), parameters.get("UploadIdMarker")))
        if len(asked) == 1:
            upload = {"Key": "ckpt/a%2Bb+c", "UploadId": "1"}
            marks = {"NextKeyMarker": "ckpt/a%2Bb+c", "NextUploadIdMarker": "1"}
            return {"EncodingType": "url", "IsTruncated": True, "Uploads": [upload], **marks}
        if len(asked) == 2:  # a page of nothing: only the marker tells
            return {"EncodingType": "url", "IsTruncated": True, "NextKeyMarker": "ckpt/b%20b"}
        return {}

    assert [found.key for found in answered(answer).uploads()] == ["a+b c"]
    assert asked == [(None, None), ("ckpt/a+b c", "1"), ("ckpt/b b", None)]


def test_a_listing_that_does_not_go_on(answered: Callable[..., S3Tier]) -> None:
    for token in (None, "", "same"):
        page = {"IsTruncated": True, "NextContinuationToken": token}
        with pytest.raises(TierError, match="s3://bucket/ckpt/a/"):
            answered(lambda *_, page=page: page).list("a/", token="same")


def test_a_listing_with_missing_fields_and_of_others(answered: Callable[..., S3Tier]) -> None:
    page = {
        "Contents": [
            {"Key": "ckpt/", "Size": 0},
            {"Key": "ckpt2", "Size": 1},
            {"Key": "ckpt/no size"},
            {"Size": 1},
            {"Key": "ckpt/a", "Size": 1},
        ],
        "CommonPrefixes": [{"Prefix": "ckpt/"}, {}, {"Prefix": "ckpt2/"}, {"Prefix": "ckpt/d/"}],
    }
    found = answered(lambda *_: page).list("")
    assert [tuple(each) for each in found.objects] == [("a", 1, "", 0)]
    assert found.prefixes == ["d/"]


def test_parts_without_an_end(answered: Callable[..., S3Tier]) -> None:
    part = {"PartNumber": 1, "Size": 5, "ETag": '"e"'}
    tier = answered(lambda *_: {"IsTruncated": True, "Parts": [part, {"PartNumber": 2}]})
    assert [tuple(found) for found in tier.parts("a", "1")] == [(1, 5, "e")]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (body(b"12345", ContentRange="bytes 10-14/20", ETag='"other"'), TierObjectChanged),
        (body(b"12345", ContentRange="bytes 10-14/20"), TierObjectChanged),
        (body(b"12345", ContentRange="bytes 9-13/20", ETag='"e"'), TierBadBytes),
        (body(b"1234", ContentRange="bytes 10-13/14", ETag='"e"'), TierBadBytes),
        (body(b"123456", ContentRange="bytes 10-15/20", ETag='"e"'), TierBadBytes),
        (body(b"x" * 20, ETag='"e"'), TierBadBytes),  # the range was ignored
        (
            {
                "Body": io.BytesIO(b"123"),
                "ContentLength": 5,
                "ContentRange": "bytes 10-14/20",
                "ETag": '"e"',
            },
            TierBadBytes,
        ),
    ],
)
def test_bytes_that_were_not_asked_for(
    answered: Callable[..., S3Tier], answer: Any, error: type[TierError]
) -> None:
    tier = answered(lambda *_: answer)
    with pytest.raises(error, match=r"s3://bucket/ckpt/file"):
        tier.read_into("file", 10, memoryview(bytearray(5)), "e")
    assert answer["Body"].closed


def test_answers_without_what_matters(answered: Callable[..., S3Tier]) -> None:
    tier = answered(
        lambda operation, _: {"ContentLength": 1, "ETag": "e"} if "head" in operation else {}
    )
    for call in (
        lambda: tier.put("file", b"x", {}),
        lambda: tier.start("file", {}),
        lambda: tier.put_part("file", "1", 1, b"x"),
        lambda: tier.copy("file", "copy", {}, None),
    ):
        with pytest.raises(TierError, match=r"s3://bucket/ckpt/.* names no"):
            call()
    assert tier.complete("file", "1", [(1, "e")]) == "e"  # asked for, then


def test_complete_says_500_because_the_upload_is_gone(answered: Callable[..., S3Tier]) -> None:
    def answer(operation: str, _: dict[str, Any]) -> Any:
        if operation == "list_parts":
            raise TierUploadMissing("no such upload")
        raise TierError("500")

    with pytest.raises(TierUploadMissing):
        answered(answer).complete("file", "1", [(1, "e")])


def test_complete_says_500_and_the_upload_is_there(answered: Callable[..., S3Tier]) -> None:
    def answer(operation: str, _: dict[str, Any]) -> Any:
        if operation == "list_parts":
            return {}
        raise TierError("500")

    with pytest.raises(TierError, match="500") as caught:
        answered(answer).complete("file", "1", [(1, "e")])
    assert type(caught.value) is TierError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            botocore.exceptions.EndpointConnectionError(endpoint_url="http://x", error="e"),
            TierError,
        ),
        (botocore.exceptions.ConnectTimeoutError(endpoint_url="http://x", error="e"), TierError),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://x", error="e"), TierError),
        (botocore.exceptions.ConnectionClosedError(endpoint_url="http://x"), TierError),
        (botocore.exceptions.ProxyConnectionError(proxy_url="http://x", error="e"), TierError),
        (botocore.exceptions.SSLError(endpoint_url="http://x", error="e"), TierError),
        (botocore.exceptions.ResponseStreamingError(error="e"), TierError),
        (botocore.exceptions.HTTPClientError(error="e"), TierError),
        (botocore.exceptions.CredentialRetrievalError(provider="p", error_msg="e"), TierError),
        (botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), TierError),
        (ConnectionResetError("reset"), TierError),
        (TypeError("string indices must be integers"), TierError),
        (botocore.exceptions.FlexibleChecksumError(error_msg="e"), TierBadBytes),
        (botocore.exceptions.HTTPClientError(error=TierBadBytes("ended")), TierBadBytes),
        (TierBadBytes("ended"), TierBadBytes),
        (botocore.exceptions.NoCredentialsError(), TierRefused),
        (botocore.exceptions.PartialCredentialsError(provider="p", cred_var="v"), TierRefused),
        (botocore.exceptions.SSOTokenLoadError(error_msg="e"), TierRefused),
        (botocore.exceptions.ParamValidationError(report="r"), TierRefused),
        (botocore.exceptions.NoRegionError(), TierRefused),
    ],
)
def test_what_botocore_raises(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[TierError]
) -> None:
    client = S3Client("bucket", "s3://bucket/", S3Options(endpoint_url="http://127.0.0.1:1"))

    class Failing:
        def put_object(self, **_: Any) -> None:
            raise error

    monkeypatch.setattr(client, "_client", Failing())
    with pytest.raises(TierError, match=r"storing s3://bucket/a/file") as caught:
        client.call("storing", "put_object", "a/file", Key="a/file")
    assert type(caught.value) is kind


def test_encryption_and_storage_class_go_with_what_makes_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: dict[str, dict[str, Any]] = {}

    def call(self: Any, what: str, operation: str, key: str, **parameters: Any) -> Any:
        sent[operation] = parameters
        return {
            "ETag": '"e"',
            "UploadId": "1",
            "ContentLength": 1,
            "CopyObjectResult": {"ETag": '"e"'},
        }

    monkeypatch.setattr(S3Client, "call", call)
    options = S3Options(
        endpoint_url="http://127.0.0.1:1",
        sse="aws:kms",
        sse_kms_key_id="key",
        storage_class="STANDARD_IA",
    )
    tier = S3Tier("bucket", "ckpt", options)
    tier.put("file", b"x", {})
    tier.copy("file", "copy", {}, None)
    tier.start("file", {})
    for operation in ("put_object", "copy_object", "create_multipart_upload"):
        kept = {n: v for n, v in sent[operation].items() if isinstance(v, str)}
        assert kept.items() >= {
            ("ServerSideEncryption", "aws:kms"),
            ("SSEKMSKeyId", "key"),
            ("StorageClass", "STANDARD_IA"),
        }, operation
