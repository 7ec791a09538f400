"""One call of S3 through boto3, failing in the tier's own terms. The only module that knows boto3.

What it keeps true:
- One attempt per call: whoever calls knows how long to go on, boto3 does not. What the store said is told apart in
  fs.tiers.s3errors; what the network said may pass; all else is a setting that is wrong.
- Credentials that are over, or wrong, are looked for anew with a client of its own, so that what a person or a
  process put in their place is found without a restart. A clock that differs from the store's is not believed:
  requests are signed with the store's time from the first refusal on (botocore does not correct it).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

import boto3
import botocore.auth
import botocore.exceptions as boto_errors
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from fs.tiers.options import S3Options
from fs.tiers.s3errors import SKEWED, Answer, explain, is_unsure, kind_of, wants_credentials
from fs.tiers.s3text import clean_xml
from fs.tiers.tier import TierBadBytes, TierError, TierRefused

log = logging.getLogger("ckptfs.tier")

RECEIVE_BYTES = 1 << 20
CLEANED = "CkptfsCleaned"  # set in an answer that held what XML cannot
# Looking for credentials may run a program or ask the instance's metadata: not for each of many failing calls.
RENEW_EVERY_S = 2.0

_MAY_PASS = (
    boto_errors.HTTPClientError,
    boto_errors.ConnectionError,
    boto_errors.IncompleteReadError,
    boto_errors.CredentialRetrievalError,
    boto_errors.MetadataRetrievalError,
    boto_errors.TokenRetrievalError,
    ResponseParserError,
    HTTPException,
    HTTPError,  # botocore passes it on when a refusal of a GET is cut off
    OSError,
)
_BAD_BYTES = (boto_errors.ChecksumError, boto_errors.FlexibleChecksumError)
_NO_CREDENTIALS = (
    boto_errors.NoCredentialsError,
    boto_errors.PartialCredentialsError,
    boto_errors.SSOError,
    *((boto_errors.LoginError,) if hasattr(boto_errors, "LoginError") else ()),  # since 1.41
)
_FAILURES = (
    boto_errors.ClientError,
    boto_errors.BotoCoreError,
    ResponseParserError,
    HTTPException,
    HTTPError,
    OSError,
    ValueError,
    # botocore on answers that it did not expect
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
)
_NOT_UNDERSTOOD = (KeyError, TypeError, AttributeError, IndexError)


class _StoresTimeAuth(botocore.auth.S3SigV4Auth):  # type: ignore[misc]
    """Signs with the store's time: this machine's, and how far they are apart."""

    def _modify_request_before_signing(self, request: Any) -> None:
        theirs_s = time.time() + request.context["ckptfs_skew_s"]
        request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(theirs_s))
        super()._modify_request_before_signing(request)


# botocore finds signers by name in this table; ours has a name of its own.
botocore.auth.AUTH_TYPE_MAPS["ckptfs-s3v4"] = _StoresTimeAuth


class S3Client:
    """Calls on one bucket, from any thread. Raises TierRefused when boto3 cannot be set up (no such profile).

    *url* says how a person names an object: for messages alone.
    """

    def __init__(self, bucket: str, url: str, options: S3Options) -> None:
        self._bucket = bucket
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._made_s = 0.0
        self._skew_s = 0.0
        self._client = self._make()

    def call(self, what: str, operation: str, key: str, **parameters: Any) -> Any:
        """The answer to one request. *what* (before the object's url) and *key* are for the message."""
        client = self._client
        try:
            return getattr(client, operation)(Bucket=self._bucket, **parameters)
        except TierError as error:  # the body's own, while it was read for the signature
            raise type(error)(f"{what} {self._url}{key}: {error}") from error
        except _FAILURES as error:
            if (
                operation == "head_object"
                and isinstance(error, boto_errors.ClientError)
                and is_unsure(_answer(error))
            ):
                return self._head_again(what, key, parameters["Key"])
            raise self._failed(what, key, error, client) from error

    def receive(self, key: str, body: Any, view: memoryview) -> None:
        """Read all of *view* from an answer's body. Raises TierError, TierBadBytes."""
        position = 0
        try:
            while position < len(view):
                count = body.readinto(view[position : position + RECEIVE_BYTES])
                if not count:
                    raise TierBadBytes(
                        f"reading {self._url}{key}: the connection ended after {position}"
                        f" of {len(view)} bytes"
                    )
                position += count
        except _FAILURES as error:
            raise self._failed("reading", key, error, None) from error

    def _head_again(self, what: str, key: str, whole_key: str) -> Any:
        """An answer to HEAD has no body that would tell a missing bucket from a missing key; one to GET has."""
        client = self._client
        try:
            answer = client.get_object(Bucket=self._bucket, Key=whole_key, Range="bytes=0-0")
            answer["Body"].close()
        except _FAILURES as error:
            failed = self._failed(what, key, error, client)
            if not isinstance(failed, TierBadBytes):
                raise failed from error
        # it is there after all (or empty, and has no byte 0): it came between the two
        try:
            return client.head_object(Bucket=self._bucket, Key=whole_key)
        except _FAILURES as error:
            raise TierError(
                f"{what} {self._url}{key}: the store contradicts itself: {error}"
            ) from error

    # what a failure means

    def _failed(self, what: str, key: str, error: Exception, client: Any) -> TierError:
        """What to raise for *error*; looks for credentials, or the time, when that may help."""
        url = self._url + key
        if isinstance(error, boto_errors.ClientError):
            answer = _answer(error)
            if wants_credentials(answer.code):
                self._renew(client)
            if answer.code == SKEWED:
                self._learn_time(error)
            return kind_of(answer)(explain(what, url, answer))
        inner = getattr(error, "kwargs", {}).get("error")
        if isinstance(inner, TierError):  # the body's own, passed through by botocore
            return type(inner)(f"{what} {url}: {inner}")
        if isinstance(error, _BAD_BYTES):
            return TierBadBytes(f"{what} {url}: {error}")
        if isinstance(error, _NO_CREDENTIALS):
            self._renew(client)
            return TierRefused(
                f"{what} {url}: {error}; give credentials where boto3 looks for them: environment,"
                " ~/.aws/credentials (profile), or the instance's role"
            )
        if isinstance(error, _NOT_UNDERSTOOD):
            return TierError(f"{what} {url}: the store's answer was not understood: {error!r}")
        if isinstance(error, boto_errors.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return TierRefused(
                f"{what} {url}: {error}; if the store's certificate is one of your own, name the file of those to"
                " trust by the option ca_bundle"
            )
        if isinstance(error, _MAY_PASS):
            return TierError(f"{what} {url}: {error}")
        return TierRefused(f"{what} {url}: {error}")

    def _learn_time(self, error: Any) -> None:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        try:
            theirs_s = parsedate_to_datetime(headers["date"]).timestamp()
        except (KeyError, ValueError, TypeError):
            return
        self._skew_s = theirs_s - time.time()
        log.warning(
            "this machine's clock is %+.0f s off that of %s; requests are signed with the latter's time",
            -self._skew_s,
            self._url,
        )

    # clients

    def _renew(self, failed: Any) -> None:
        """Make a client that looks for credentials again. *failed*: the one that was refused."""
        with self._lock:
            if self._client is not failed or time.monotonic() - self._made_s < RENEW_EVERY_S:
                return
            try:
                self._client = self._make()
            except TierError as error:  # files that are half written: the next failure tries again
                log.warning("looking for credentials: %s", error)
                self._made_s = time.monotonic()

    def _make(self) -> Any:
        options = self._options
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.max_connections,
            request_checksum_calculation=options.request_checksum_calculation,
            response_checksum_validation=options.response_checksum_validation,
            tcp_keepalive=True,
            s3={"addressing_style": options.addressing_style},
        )
        try:
            session = boto3.Session(
                profile_name=options.profile or None,
                region_name=options.region or None,
                botocore_session=_session(),
            )
            client = session.client(
                "s3",
                endpoint_url=options.endpoint_url or None,
                verify=options.ca_bundle or None,
                config=config,
            )
        except (boto_errors.BotoCoreError, ValueError, OSError) as error:
            raise TierRefused(f"boto3 cannot be set up for {self._url}: {error}") from error
        client.meta.events.register_first("choose-signer.s3", self._choose_signer)
        # by this name, since botocore calls those with a "*" first, and its own reader of XML is "before-parse.s3.*"
        client.meta.events.register("before-parse.*.*", _clean_answer)
        self._made_s = time.monotonic()
        return client

    def _choose_signer(self, signature_version: Any, context: Any, **_: Any) -> str | None:
        if not self._skew_s or signature_version not in ("v4", "s3v4"):
            return None
        context["ckptfs_skew_s"] = self._skew_s
        return "ckptfs-s3v4"


@functools.cache
def _loader(paths: str | None) -> Any:
    return botocore.loaders.create_loader(paths)


def _session() -> Any:
    """A session of its own, with the description of S3's calls (megabytes of JSON) read once for all."""
    session = botocore.session.Session()
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    return session


def _clean_answer(
    operation_model: Any, response_dict: Any, customized_response_dict: Any, **_: Any
) -> None:
    body = response_dict["body"]
    if operation_model.http.get("method") != "HEAD":
        _check_whole(response_dict["headers"], body)
    # Answers repeat keys as they are, and some characters of them make them unreadable as XML. Listings encode the
    # keys that matter; what else they repeat is not to be used then.
    cleaned = clean_xml(body) if isinstance(body, bytes) else body
    if cleaned != body:
        response_dict["body"] = cleaned
        customized_response_dict[CLEANED] = True


def _check_whole(headers: Any, body: Any) -> None:
    # Neither urllib3 nor botocore does, and half of "no such key" would be the page of somebody else.
    announced = headers.get("content-length", "")
    if not isinstance(body, bytes) or headers.get("content-encoding") or not announced.isdigit():
        return
    if len(body) < int(announced):
        raise boto_errors.IncompleteReadError(actual_bytes=len(body), expected_bytes=int(announced))


def _answer(error: Any) -> Answer:
    said = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return Answer(int(status), str(said.get("Code") or ""), str(said.get("Message") or ""))
