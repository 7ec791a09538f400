"""What can go wrong between an S3 client and its store, for tests.faultproxy: each a function of one exchange.

"Stored" faults let the store do what was asked, and spoil the answer alone; the others keep the request from it, or
spoil it on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import formatdate

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.exchange import Exchange, Fault
from tests.httpwire import Head
from tests.s3requests import Request

SKEW_ALLOWED_S = 15 * 60  # as S3 and Ceph do


def error_xml(code: str, message: str) -> bytes:
    """The body of a refusal."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + text.encode()


# refusals


def answer(
    status: int, code: str, message: str = "Injected", *, early: bool = False, **headers: str
) -> Fault:
    """An answer in the store's place. *early*: before the request's body was sent, and the connection ends."""

    def answered(exchange: Exchange) -> None:
        exchange.answer(status, error_xml(code, message), early=early, **headers)

    return _named(answered, code)


def slow_down(*, early: bool = False) -> Fault:
    """503, as a store that has too much to do."""
    return answer(503, "SlowDown", "Please reduce your request rate.", early=early)


def internal_error() -> Fault:
    """500."""
    return answer(500, "InternalError", "We encountered an internal error. Please try again.")


def access_denied() -> Fault:
    """403: the policy of the user or the bucket."""
    return answer(403, "AccessDenied", "Access Denied")


def no_such_bucket() -> Fault:
    """404: the bucket was deleted."""
    return answer(404, "NoSuchBucket", "The specified bucket does not exist")


def expired_token() -> Fault:
    """400: the credentials are over. Until they change: `when=signed_by(KEY), times=None`."""
    return answer(400, "ExpiredToken", "The provided token has expired.")


def signed_by(access_key: str) -> Callable[[Request], bool]:
    """For `when`: requests with these credentials."""
    return lambda request: request.access_key == access_key


def error_in_success(*, stored: bool, keepalive: bool = False) -> Fault:
    """200 with an <Error> inside, as S3 answers when it began to answer before it knew.

    *stored*: what was asked for has happened all the same. *keepalive*: as S3 does while it works, with white space
    in chunks before the error.
    """

    def error_inside_success(exchange: Exchange) -> None:
        if stored:
            _swallow(exchange)
        else:
            exchange.drain()
        body = error_xml("InternalError", "We encountered an internal error. Please try again.")
        if not keepalive:
            exchange.answer(200, body)
            return
        declaration, _, rest = body.partition(b"\n")
        pieces = [declaration + b"\n", b"\n", b"      ", rest]
        framed = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
        chunked = [("Transfer-Encoding", "chunked"), ("Content-Type", "application/xml")]
        exchange.relay(Head("HTTP/1.1 200 OK", chunked), framed)

    return error_inside_success


def stored_then(status: int = 503, code: str = "SlowDown") -> Fault:
    """The store does it; the client is told of a failure."""

    def stored_but_refused(exchange: Exchange) -> None:
        _swallow(exchange)
        exchange.answer(status, error_xml(code, "Injected"))

    return stored_but_refused


# connections


def reset_before_body() -> Fault:
    """The connection is reset when the head of the request has come."""
    return lambda exchange: exchange.reset()


def reset_in_body(after_bytes: int) -> Fault:
    """The connection is reset within the request's body; the store sees it end there, too."""

    def reset_within_body(exchange: Exchange) -> None:
        exchange.connection.upstream().send(exchange.head.without("expect").encode())
        for piece in first_bytes(exchange.body(), after_bytes):
            exchange.connection.upstream().send(piece)
        exchange.reset()

    return reset_within_body


def reset_after_body() -> Fault:
    """The connection is reset when the whole request has come; the store never sees it."""

    def reset_unstored(exchange: Exchange) -> None:
        exchange.drain()
        exchange.reset()

    return reset_unstored


def reset_when_stored() -> Fault:
    """The store does it; the connection is reset instead of an answer."""

    def reset_stored(exchange: Exchange) -> None:
        _swallow(exchange)
        exchange.reset()

    return reset_stored


def reset_in_answer(after_bytes: int) -> Fault:
    """The connection is reset within the body of the answer."""

    def reset_within_answer(exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.relay(reply, first_bytes(exchange.answer_body(reply), after_bytes))
        time.sleep(0.05)  # a reset overtakes what was sent before
        exchange.reset()

    return reset_within_answer


def black_hole() -> Fault:
    """The connection stays, and nothing is read or answered, until the client goes or the proxy heals."""
    return lambda exchange: exchange.hang()


def black_hole_when_stored() -> Fault:
    """The store does it; no answer ever comes."""

    def hang_stored(exchange: Exchange) -> None:
        _swallow(exchange)
        exchange.hang()

    return hang_stored


def stall_in_answer(after_bytes: int) -> Fault:
    """The body of the answer begins, and then no more comes."""

    def stall_within_answer(exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.relay(reply, first_bytes(exchange.answer_body(reply), after_bytes))
        exchange.hang()

    return stall_within_answer


def slow(delay_s: float = 0.0, bytes_per_s: float | None = None) -> Fault:
    """Everything works, slowly: *delay_s* before the store is asked, bodies both ways at *bytes_per_s*."""

    def slowed(exchange: Exchange) -> None:
        exchange.pause(delay_s)
        reply = exchange.forward(body=_paced(exchange, exchange.body(), bytes_per_s))
        exchange.relay(reply, _paced(exchange, exchange.answer_body(reply), bytes_per_s))

    return slowed


# bytes


def truncate_request(after_bytes: int, *, consistent: bool = False) -> Fault:
    """The store sees the beginning of the body alone: then its connection ends, and the client's with it.

    *consistent*: the length is made to fit, so that the store may take it for the whole.
    """

    def truncated_request(exchange: Exchange) -> None:
        body = first_bytes(exchange.body(), after_bytes)
        if consistent:
            length = min(after_bytes, exchange.head.body_bytes() or 0)
            reply = exchange.forward(exchange.head.plus(Content_Length=str(length)), body)
            exchange.drain()
            exchange.relay(reply)
            return
        exchange.connection.upstream().send(exchange.head.without("expect").encode())
        for piece in body:
            exchange.connection.upstream().send(piece)
        exchange.close_upstream()
        exchange.drain()
        exchange.end()

    return truncated_request


def truncate_answer(after_bytes: int, *, consistent: bool = False) -> Fault:
    """The client sees the beginning of the answer's body, then the end of the connection.

    *consistent*: Content-Length is made to fit, as by a proxy that keeps what it has got.
    """

    def truncated_answer(exchange: Exchange) -> None:
        reply = exchange.forward()
        body = first_bytes(exchange.answer_body(reply), after_bytes)
        length = min(after_bytes, reply.body_bytes() or 0)
        told = reply.plus(Content_Length=str(length)) if consistent else reply
        exchange.relay(told, body)
        exchange.end()

    return truncated_answer


def flip_byte_of_request(offset: int) -> Fault:
    """One byte of the request's body changes on its way to the store."""

    def damaged_request(exchange: Exchange) -> None:
        exchange.relay(exchange.forward(body=flipped(exchange.body(), offset)))

    return damaged_request


def flip_byte_of_answer(offset: int) -> Fault:
    """One byte of the answer's body changes on its way to the client."""

    def damaged_answer(exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.relay(reply, flipped(exchange.answer_body(reply), offset))

    return damaged_answer


# clocks


def clock_skew(skew_s: float, access_key: str, secret_key: str, region: str = "us-east-1") -> Fault:
    """A store whose clock is *skew_s* ahead of this machine's. For every request: `times=None`.

    It refuses what is not signed with its own time, within 15 minutes; the rest is signed anew for the store behind,
    which has this machine's time.
    """
    signer = Credentials(access_key, secret_key)

    def skewed(exchange: Exchange) -> None:
        now_s = time.time() + skew_s
        date = formatdate(now_s, usegmt=True)
        signed_s = _signing_time(exchange.request.headers.get("x-amz-date", ""))
        if abs(now_s - signed_s) > SKEW_ALLOWED_S:
            text = "The difference between the request time and the current time is too large."
            exchange.answer(403, error_xml("RequestTimeTooSkewed", text), Date=date)
            return
        reply = exchange.forward(resigned(exchange.head, signer, region))
        exchange.relay(reply.plus(Date=date))

    return skewed


def resigned(head: Head, signer: Credentials, region: str) -> Head:
    """The same request, signed now by *signer*; the hash of its body is believed."""
    method, target, _ = head.first.split(" ", 2)
    names = head.get("authorization").partition("SignedHeaders=")[2].split(",")[0].split(";")
    signed = {name: head.get(name) for name in names if name != "x-amz-date"}
    request = AWSRequest(method, f"http://{head.get('host')}{target}", headers=signed)
    request.context["body_hash"] = head.get("x-amz-content-sha256")
    _BelievingAuth(signer, "s3", region).add_auth(request)
    return head.plus(
        Authorization=request.headers["Authorization"], X_Amz_Date=request.headers["X-Amz-Date"]
    )


class _BelievingAuth(S3SigV4Auth):  # type: ignore[misc]
    """Takes the hash of the body from the request, which was signed with it before; the time from this machine."""

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        # not botocore's idea of the time, which a test may have changed
        request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        super()._modify_request_before_signing(request)

    def payload(self, request: AWSRequest) -> str:
        return str(request.context["body_hash"])


def _signing_time(text: str) -> float:
    try:
        return time.mktime(time.strptime(text, "%Y%m%dT%H%M%SZ")) - time.timezone
    except ValueError:
        return 0.0


# bodies


def first_bytes(body: Iterable[bytes], count: int) -> Iterator[bytes]:
    """The first *count* bytes."""
    for piece in body:
        yield piece[:count]
        count -= len(piece)
        if count <= 0:
            return


def flipped(body: Iterable[bytes], offset: int) -> Iterator[bytes]:
    """With the lowest bit of one byte changed."""
    for piece in body:
        if 0 <= offset < len(piece):
            piece = piece[:offset] + bytes([piece[offset] ^ 1]) + piece[offset + 1 :]
        offset -= len(piece)
        yield piece


def _paced(exchange: Exchange, body: Iterable[bytes], bytes_per_s: float | None) -> Iterator[bytes]:
    for piece in body:
        for start in range(0, len(piece), 16 << 10):
            part = piece[start : start + (16 << 10)]
            if bytes_per_s:
                exchange.pause(len(part) / bytes_per_s)
            yield part


def _swallow(exchange: Exchange) -> None:
    """Let the store answer, to nobody."""
    for _ in exchange.answer_body(exchange.forward()):
        pass


def _named(fault: Fault, name: str) -> Fault:
    fault.__qualname__ = name
    return fault
