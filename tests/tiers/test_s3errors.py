"""What an answer of S3 means: the table, told for each kind of answer that stores give."""

from __future__ import annotations

import pytest

from fs.tiers.s3errors import Answer, explain, is_unsure, kind_of, wants_credentials
from fs.tiers.s3text import clean_xml, content_range, etag_text, key_decoder
from fs.tiers.tier import (
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)

PASSES = [
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (500, "InternalError"),
    (500, ""),
    (502, "502"),
    (504, "504"),
    (507, "XMinioStorageFull"),
    (503, "XMinioServerNotInitialized"),
    (429, "TooManyRequests"),
    (429, "429"),
    (408, "408"),
    (400, "RequestTimeout"),
    (409, "OperationAborted"),
    (409, "ConditionalRequestConflict"),
    (400, "ExpiredToken"),
    (403, "ExpiredToken"),
    (400, "InvalidToken"),
    (400, "TokenRefreshRequired"),
    (403, "RequestExpired"),
    (403, "RequestTimeTooSkewed"),
    (400, "ThrottlingException"),
    (200, "InternalError"),  # an error inside of a success
    (200, "SlowDown"),
    (307, "TemporaryRedirect"),
]
REFUSED = [
    (403, "AccessDenied"),
    (403, "403"),
    (403, "AllAccessDisabled"),
    (403, "InvalidAccessKeyId"),
    (403, "SignatureDoesNotMatch"),
    (403, "InvalidObjectState"),
    (403, "QuotaExceeded"),
    (404, "NoSuchBucket"),
    (404, "404"),  # no body: a bucket, an endpoint, a proxy's page
    (404, ""),
    (404, "NotFound"),
    (301, "PermanentRedirect"),
    (301, "301"),
    (400, "InvalidBucketName"),
    (400, "AuthorizationHeaderMalformed"),
    (400, "KMS.DisabledException"),
    (400, "KeyTooLongError"),
    (400, "EntityTooLarge"),
    (400, "EntityTooSmall"),
    (400, "MetadataTooLarge"),
    (400, "SomethingNew"),
    (405, "MethodNotAllowed"),
    (411, "MissingContentLength"),
    (501, "NotImplemented"),
    (501, "501"),
    (507, "QuotaExceeded"),
]
OTHERS = [
    (404, "NoSuchKey", TierObjectMissing),
    (404, "NoSuchVersion", TierObjectMissing),
    (404, "NoSuchUpload", TierUploadMissing),
    (400, "InvalidPart", TierUploadMissing),
    (400, "InvalidPartOrder", TierUploadMissing),
    (412, "PreconditionFailed", TierObjectChanged),
    (412, "412", TierObjectChanged),
    (416, "InvalidRange", TierBadBytes),
    (416, "416", TierBadBytes),
    (400, "BadDigest", TierBadBytes),
    (400, "XAmzContentSHA256Mismatch", TierBadBytes),
    (400, "IncompleteBody", TierBadBytes),
]


@pytest.mark.parametrize(("status", "code"), PASSES)
def test_what_may_pass(status: int, code: str) -> None:
    assert kind_of(Answer(status, code, "")) is TierError


@pytest.mark.parametrize(("status", "code"), REFUSED)
def test_what_will_not(status: int, code: str) -> None:
    assert kind_of(Answer(status, code, "")) is TierRefused


@pytest.mark.parametrize(("status", "code", "kind"), OTHERS)
def test_what_is_an_answer(status: int, code: str, kind: type[TierError]) -> None:
    assert kind_of(Answer(status, code, "")) is kind


def test_only_the_store_itself_can_say_that_an_object_is_missing() -> None:
    for status in range(200, 600):
        for code in ("", str(status), "Unknown", "NotFound", "NoSuchBucket", "NoSuchHost"):
            assert kind_of(Answer(status, code, "")) is not TierObjectMissing


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(403, "AccessDenied", "Access Denied."), ["Access Denied.", "HTTP 403", "policies"]),
        (Answer(404, "NoSuchBucket", ""), ["create the bucket", "endpoint_url"]),
        (Answer(301, "301", "Moved Permanently"), ["region"]),
        (Answer(404, "404", "Not Found"), ["endpoint_url"]),
        (Answer(400, "KMS.NotFoundException", "Key 'x' does not exist"), ["sse_kms_key_id"]),
        (Answer(411, "MissingContentLength", ""), ["request_checksum_calculation"]),
        (Answer(503, "SlowDown", "Reduce your request rate"), ["Reduce your request rate"]),
        (Answer(500, "", ""), ["no reason"]),
    ],
)
def test_what_a_person_reads(answer: Answer, words: list[str]) -> None:
    text = explain("storing", "s3://bucket/a/file", answer)
    for word in ["storing s3://bucket/a/file", *words]:
        assert word in text
    assert "None" not in text


def test_answers_without_a_reason_are_asked_again() -> None:
    for status in (400, 403, 404):
        assert is_unsure(Answer(status, str(status), "Not Found"))
    for answer in (Answer(404, "NoSuchKey", ""), Answer(503, "503", ""), Answer(429, "429", "")):
        assert not is_unsure(answer)


def test_which_refusals_new_credentials_may_put_right() -> None:
    for code in ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
        assert wants_credentials(code)
    for code in ("AccessDenied", "NoSuchBucket", "SlowDown", ""):
        assert not wants_credentials(code)


@pytest.mark.parametrize(
    ("header", "length", "expected"),
    [
        ("bytes 5-9/20", 5, (5, 5)),
        ("bytes 5-9/*", 5, (5, 5)),
        ("bytes 0-0/1", None, (0, 1)),
        ("bytes 5-9/20", 7, (5, -1)),  # it contradicts itself
        (None, 20, (0, 20)),
        (None, None, (0, -1)),
        ("nonsense", 20, (0, 20)),
    ],
)
def test_what_range_an_answer_carries(
    header: str | None, length: int | None, expected: tuple[int, int]
) -> None:
    assert content_range(header, length) == expected


def test_etags() -> None:
    assert {etag_text(text) for text in ('"abc-2"', "abc-2", 'W/"abc-2"')} == {"abc-2"}


@pytest.mark.parametrize(
    ("body", "cleaned"),
    [
        (b"<a>\t\r\n x&amp;&#13;&#x0D;&#10;&#9;&#x20;</a>", None),
        ("<a>ü\ue000\U0001f642</a>".encode(), None),
        (b"<a>\x01\x1f</a>", b"<a>??</a>"),
        (b"<a>&#x01;&#x1F;&#1;&#31;&#x0;&#0;&#xFFFE;&#65535;</a>", b"<a>????????</a>"),
        ("<a>\ufffe\uffff</a>".encode(), b"<a>??</a>"),
        (b"<a>\xff</a>", "<a>\ufffd</a>".encode()),
    ],
)
def test_xml_that_cannot_be(body: bytes, cleaned: bytes | None) -> None:
    assert clean_xml(body) == (body if cleaned is None else cleaned)


def test_how_keys_come() -> None:
    assert key_decoder(True, ["a+b%2Bc%20d"])("a+b%2Bc%20d") == "a b+c d"
    assert key_decoder(False, ["x/a%20b%2B%25"])("x/a%20b%2B%25") == "x/a b+%"
    for raw in ("a b%20c", "ü%20", "<%20", "\x01%20"):
        assert key_decoder(False, ["plain", raw])(raw) == raw
