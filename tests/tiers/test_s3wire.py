"""Through boto3 as it is, to a server that answers as it is told: what comes off the wire, told apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fs.tiers import s3client
from fs.tiers.options import S3Options
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import (
    TierBadBytes,
    TierError,
    TierObjectMissing,
    TierRefused,
)


class Reply(NamedTuple):
    """*length*: what is announced, when it is not what is sent."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)
    length: int | None = None
    delay_s: float = 0.0


def error(status: int, code: str, message: str = "it says so") -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(status, body.encode())


class Told:
    """A server on loopback. *replies*: in order, the last one for ever after; *requests*: what was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                told.requests.append((self.command, self.path, dict(self.headers)))
                reply = told.replies.pop(0) if len(told.replies) > 1 else told.replies[0]
                time.sleep(reply.delay_s)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                length = len(reply.body) if reply.length is None else reply.length
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)
                self.close_connection = length != len(reply.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    server = Told()
    yield server
    server.close()


@pytest.fixture
def tier(told: Told) -> S3Tier:
    options = S3Options(
        endpoint_url=told.url, addressing_style="path", connect_timeout_s=2, read_timeout_s=0.5
    )
    return S3Tier("bucket", "ckpt", options)


HEAD = Reply(headers={"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, length=1)
INSIDE = error(200, "InternalError", "We encountered an internal error")


@pytest.mark.parametrize("operation", ["complete", "copy", "part", "start"])
def test_an_error_inside_of_a_success_is_an_error(told: Told, tier: S3Tier, operation: str) -> None:
    with pytest.raises(TierError, match="internal error") as caught:
        if operation == "complete":
            told.replies = [INSIDE, Reply(body=b"<ListPartsResult></ListPartsResult>")]
            tier.complete("file", "1", [(1, "e")])
        elif operation == "copy":
            told.replies = [HEAD, INSIDE]
            tier.copy("file", "copy", {}, None)
        elif operation == "start":
            told.replies = [INSIDE]
            tier.start("file", {})
        else:
            tier.limits = tier.limits._replace(max_copy_bytes=0)
            begun = b"<R><UploadId>1</UploadId></R>"
            told.replies = [HEAD, Reply(body=begun), INSIDE, Reply(204)]
            tier.copy("file", "copy", {}, None)
    assert type(caught.value) is TierError
    if operation == "part":
        assert told.requests[-1][0] == "DELETE"  # the upload is aborted


@pytest.mark.parametrize("body", [b"<CopyObjectResult><ETag>e</ET", b"   ", b""])
def test_a_success_that_was_cut_off_is_no_success(told: Told, tier: S3Tier, body: bytes) -> None:
    told.replies = [HEAD, Reply(body=body)]
    with pytest.raises(TierError) as caught:
        tier.copy("file", "copy", {}, None)
    assert type(caught.value) is TierError


@pytest.mark.parametrize("sent", [0, 1, 70_000])
def test_a_body_that_is_cut_off(told: Told, tier: S3Tier, sent: int) -> None:
    headers = {"ETag": '"e"', "Content-Range": "bytes 0-99999/100000"}
    told.replies = [Reply(206, b"x" * sent, headers, length=100_000)]
    with pytest.raises(TierError, match=r"s3://bucket/ckpt/file"):
        tier.read_into("file", 0, memoryview(bytearray(100_000)), "e")


def test_a_body_that_stalls_and_a_server_that_does_not_answer(told: Told, tier: S3Tier) -> None:
    told.replies = [Reply(delay_s=2.0)]
    started_s = time.monotonic()
    with pytest.raises(TierError, match=r"[Tt]ime") as caught:
        tier.list("")
    assert type(caught.value) is TierError
    assert time.monotonic() - started_s < 1.5
    assert len(told.requests) == 1


@pytest.mark.parametrize("status", [404, 403, 400])
def test_a_page_of_somebody_between_is_not_that_an_object_is_missing(
    told: Told, tier: S3Tier, status: int
) -> None:
    told.replies = [Reply(status, b"<html><body>Not Found</body></html>")]
    for call in (
        lambda: tier.head("file"),
        lambda: tier.read("file", 10),
        lambda: tier.read_into("file", 0, memoryview(bytearray(1)), None),
        lambda: tier.copy("file", "copy", {}, None),
        lambda: tier.list(""),
    ):
        with pytest.raises(TierRefused, match=f"HTTP {status}"):
            call()


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_page_of_a_proxy_that_is_down_may_pass(told: Told, tier: S3Tier, status: int) -> None:
    told.replies = [Reply(status, b"<html><body><hr>Bad Gateway</body></html>")]
    for call in (
        lambda: tier.put("file", b"x", {}),
        lambda: tier.head("file"),
        lambda: tier.read("file", 10),
        lambda: tier.delete("file"),
        lambda: tier.list(""),
        lambda: list(tier.uploads()),
    ):
        before = len(told.requests)
        with pytest.raises(TierError, match=f"HTTP {status}") as caught:
            call()
        assert type(caught.value) is TierError
        assert len(told.requests) == before + 1  # whoever calls decides how often


def test_head_and_then_get_tell_a_missing_object(told: Told, tier: S3Tier) -> None:
    told.replies = [Reply(404), error(404, "NoSuchKey")]
    with pytest.raises(TierObjectMissing):
        tier.head("file")
    told.replies = [Reply(404), error(404, "NoSuchBucket")]
    with pytest.raises(TierRefused, match="NoSuchBucket"):
        tier.head("file")
    told.replies = [Reply(404), error(416, "InvalidRange"), HEAD]  # empty, and made just now
    assert tier.head("file").etag == "e"


def test_credentials_that_expire_are_replaced(
    told: Told, tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.0)
    for code, status in (("ExpiredToken", 400), ("InvalidToken", 400), ("RequestExpired", 403)):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{code}")
        told.replies = [error(status, code), Reply(headers={"ETag": '"e"'})]
        with pytest.raises(TierError, match=code) as caught:
            tier.put_part("file", "1", 1, b"x")
        assert type(caught.value) is TierError
        assert tier.put_part("file", "1", 1, b"x") == "e"
        assert f"Credential=AKIA{code}/" in told.requests[-1][2]["Authorization"]


def test_credentials_that_expire_are_found_out_at_head_too(
    told: Told, tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3client, "RENEW_EVERY_S", 0.0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEW")
    # botocore asks the bucket for its region in between
    told.replies = [Reply(400), Reply(400), error(400, "ExpiredToken"), HEAD]
    with pytest.raises(TierError, match="ExpiredToken"):
        tier.head("file")
    assert tier.head("file").etag == "e"
    assert "Credential=AKIANEW/" in told.requests[-1][2]["Authorization"]


def test_a_damaged_upload_is_told_as_such(told: Told, tier: S3Tier) -> None:
    told.replies = [error(400, "BadDigest")]
    with pytest.raises(TierBadBytes, match="BadDigest"):
        tier.put("file", b"x", {})


def test_no_secret_is_ever_told(
    told: Told, tier: S3Tier, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    told.replies = [error(403, "SignatureDoesNotMatch"), error(403, "AccessDenied")]
    for _ in range(2):
        with pytest.raises(TierRefused) as caught:
            tier.put("file", b"x", {})
        assert "secret" not in str(caught.value)
    assert "secret" not in caplog.text
