"""What S3's refusals mean: from the code and status of an answer to the kind of TierError, and what to do. Pure.

What it keeps true:
- "There is no such object" is said only when the server said exactly that (NoSuchKey). A bare 404 may be a missing
  bucket, a wrong endpoint or a proxy's page; whoever gets one has to ask further.
- A code that is not known here counts by its status: 5xx, 408, 425 and 429 may pass; any other 4xx is an answer to
  what we sent, and sending the same again gives the same, so a person is told (and it is tried again now and then).
"""

from __future__ import annotations

from typing import NamedTuple

from fs.tiers.tier import (
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)

# Credentials that are over: new ones must be looked for, then it goes on by itself.
EXPIRED = frozenset(
    "ExpiredToken ExpiredTokenException InvalidToken RequestExpired TokenRefreshRequired".split()
)
# Credentials that are wrong: refused, but a person may have put right ones in place, so they are looked for as well.
WRONG_CREDENTIALS = frozenset(
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidClientTokenId".split()
)
SKEWED = "RequestTimeTooSkewed"

_KINDS: dict[str, type[TierError]] = {
    **dict.fromkeys(EXPIRED, TierError),
    **dict.fromkeys(WRONG_CREDENTIALS, TierRefused),
    SKEWED: TierError,
    # asked to wait, or to come again
    "SlowDown": TierError,
    "Throttling": TierError,
    "ThrottlingException": TierError,
    "ThrottledException": TierError,
    "RequestThrottled": TierError,
    "RequestThrottledException": TierError,
    "TooManyRequests": TierError,
    "TooManyRequestsException": TierError,
    "RequestLimitExceeded": TierError,
    "BandwidthLimitExceeded": TierError,
    "KMS.ThrottlingException": TierError,
    "PriorRequestNotComplete": TierError,
    "ConditionalRequestConflict": TierError,
    "OperationAborted": TierError,
    "RequestTimeout": TierError,
    "RequestTimeoutException": TierError,
    "InternalError": TierError,
    "ServiceUnavailable": TierError,
    "TemporaryRedirect": TierError,
    # other bytes than announced
    "BadDigest": TierBadBytes,
    "IncompleteBody": TierBadBytes,
    "InvalidDigest": TierBadBytes,
    "InvalidRange": TierBadBytes,
    "XAmzContentChecksumMismatch": TierBadBytes,
    "XAmzContentSHA256Mismatch": TierBadBytes,
    # answers about what is there
    "NoSuchKey": TierObjectMissing,
    "NoSuchVersion": TierObjectMissing,
    "NoSuchUpload": TierUploadMissing,
    # the parts that the ledger knows are not the parts that are there: the upload is of no use
    "InvalidPart": TierUploadMissing,
    "InvalidPartOrder": TierUploadMissing,
    "PreconditionFailed": TierObjectChanged,
    # will not pass by itself, whatever the status
    "NotImplemented": TierRefused,
    "QuotaExceeded": TierRefused,
}
_TRANSIENT_4XX = frozenset((408, 425, 429))

_CREDENTIALS_HINT = (
    "boto3 looks for credentials in the environment, in ~/.aws/credentials and ~/.aws/config"
    " (profile) and in the instance's role"
)
_HINTS = {
    "AccessDenied": "the credentials in use may not do this: check the policies of the user and the bucket",
    "AllAccessDisabled": "the bucket's owner has to enable it",
    "AccountProblem": "the account's owner has to put it right",
    "NoSuchBucket": "create the bucket or correct the tier's URL (and region or endpoint_url)",
    "InvalidBucketName": "correct the tier's URL",
    "PermanentRedirect": "the bucket is in another region: set region (or endpoint_url)",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set region",
    "IllegalLocationConstraintException": "the bucket is in another region: set region",
    "InvalidObjectState": "the object is archived: restore it first",
    "MissingContentLength": "the store does not take trailing checksums:"
    " set request_checksum_calculation to when_required",
    "NotImplemented": "the store does not know this; perhaps sse, storage_class or a checksum option is set",
    "QuotaExceeded": "make room in the bucket or raise its quota",
    "InvalidStorageClass": "correct storage_class",
    "KeyTooLongError": "the path with the tier's prefix is too long for a key",
    SKEWED: "this machine's clock and the store's differ; the store's is used from now on",
    **dict.fromkeys(EXPIRED, "the credentials are over; new ones are looked for"),
    **dict.fromkeys(WRONG_CREDENTIALS, _CREDENTIALS_HINT),
}


class Answer(NamedTuple):
    """A refusal as it came: *code* is digits or empty when the body did not say."""

    status: int
    code: str
    message: str


def kind_of(answer: Answer) -> type[TierError]:
    """The kind of error that an answer is."""
    known = _KINDS.get(answer.code)
    if known is not None:
        return known
    if answer.status == 412:
        return TierObjectChanged
    if answer.status == 416:
        return TierBadBytes
    if answer.status >= 500 or answer.status < 300 or answer.status in _TRANSIENT_4XX:
        # below 300: an error inside of a success
        return TierError if answer.status != 501 else TierRefused
    return TierRefused


def is_unsure(answer: Answer) -> bool:
    """Whether the body was missing that would have said why, and asking in another way may tell.

    Answers to HEAD have none.
    """
    said = not answer.code.isdigit() and answer.code not in ("", "Unknown")
    return not said and 400 <= answer.status < 500 and answer.status not in _TRANSIENT_4XX


def wants_credentials(code: str) -> bool:
    """Whether new credentials, if there are any, may put it right."""
    return code in EXPIRED or code in WRONG_CREDENTIALS


def explain(what: str, url: str, answer: Answer) -> str:
    """For a person: what was tried on which object, what came back, what to do."""
    said = " ".join(text for text in (answer.code, answer.message) if text) or "no reason"
    text = f"{what} {url}: the store said {said} (HTTP {answer.status})"
    hint = _HINTS.get(answer.code if answer.status != 301 else "PermanentRedirect")
    if hint is None and answer.code.startswith("KMS."):
        hint = "check sse_kms_key_id and the key's policy"
    if hint is None and answer.status == 404 and kind_of(answer) is TierRefused:
        hint = "it does not answer as S3 does; check endpoint_url"
    return f"{text}; {hint}" if hint else text
