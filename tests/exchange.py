"""One request between a client and the store, in the hands of a fault (tests.faultproxy, tests.s3faults)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.httpwire import Head, Stream
from tests.s3requests import Request

if TYPE_CHECKING:
    from tests.faultproxy import Connection, FaultProxy

LINGER_S = 2.0
POLL_S = 0.02
# What other readers of the bucket can see.
CHANGES = ("put_object", "complete_multipart_upload", "copy_object", "delete_object")


class Ended(Exception):
    """The connection was ended on purpose."""


@dataclass
class Exchange:
    """One request in the hands of a fault: what it may do with both sides."""

    proxy: FaultProxy
    request: Request
    head: Head
    client: Stream
    connection: Connection
    _body: Iterator[bytes] | None = field(default=None, repr=False)

    def body(self) -> Iterator[bytes]:
        """The request's body, from where it was last read; asks the client for it when it waits to be asked."""
        if self._body is None:
            if self.head.get("expect").lower() == "100-continue":
                self.client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._body = self._counted(self.client.body(self.head.body_bytes()))
        return self._body

    def drain(self) -> None:
        """Read the rest of the request's body."""
        for _ in self.body():
            pass

    def forward(self, head: Head | None = None, body: Iterable[bytes] | None = None) -> Head:
        """Send the request to the store, as it is or with another head or body: the head of the answer.

        Raises ConnectionError when the store ends instead.
        """
        if self.proxy.on_change is None or self.request.operation not in CHANGES:
            return self._forward(head, body)
        with self.proxy._one_change:
            answer = self._forward(head, body)
            self.proxy.on_change(self.request)
        return answer

    def _forward(self, head: Head | None, body: Iterable[bytes] | None) -> Head:
        upstream = self.connection.upstream()
        # it may have answered already, and read no more
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            upstream.send((head or self.head).without("expect").encode())
            for piece in self.body() if body is None else body:
                upstream.send(piece)
        return self.answer_of_store()

    def answer_of_store(self) -> Head:
        """The head of the answer, after all was sent. Raises ConnectionError."""
        answer = self.connection.upstream().head()
        if answer is None:
            raise ConnectionError("the store ended instead of answering")
        self.request.upstream_status = answer.status()
        return answer

    def answer_body(self, answer: Head) -> Iterator[bytes]:
        """The body of the store's answer."""
        if self.head.first.startswith("HEAD ") or answer.status() in (204, 304):
            return iter(())
        return self.connection.upstream().body(answer.body_bytes())

    def relay(self, answer: Head, body: Iterable[bytes] | None = None) -> None:
        """Pass the store's answer on to the client, with its body or another one."""
        self.request.status = answer.status()
        self.client.send(answer.encode())
        for piece in self.answer_body(answer) if body is None else body:
            self.client.send(piece)

    def answer(
        self, status: int, body: bytes = b"", *, early: bool = False, **headers: str
    ) -> None:
        """Answer in the store's place. *early*: before the request's body was read, and close."""
        if not early:
            self.drain()
        head = Head(
            f"HTTP/1.1 {status} Injected",
            [("Content-Length", str(len(body))), ("Content-Type", "application/xml")],
        ).plus(**headers)
        if early:
            head = head.plus(Connection="close")
        self.request.status = status
        self.client.send(head.encode() + (b"" if self.request.method == "HEAD" else body))
        if early:
            self._linger()
            raise Ended

    def close_upstream(self) -> None:
        """End the connection to the store."""
        self.connection.close_upstream()

    def end(self) -> None:
        """End the client's connection (FIN)."""
        raise Ended

    def reset(self) -> None:
        """Reset the client's connection."""
        self.client.reset()
        raise Ended

    def pause(self, duration_s: float) -> None:
        """Let time pass; less when the proxy heals or closes."""
        self.proxy._healed.wait(duration_s)

    def hang(self) -> None:
        """Do nothing until the client goes, or the proxy heals or closes; then reset."""
        healed = self.proxy._healed
        while not healed.wait(POLL_S):
            # What it still sends stays where it is: a peer that reads nothing.
            if self.client.has_gone():
                break
        self.reset()

    def _counted(self, body: Iterator[bytes]) -> Iterator[bytes]:
        for piece in body:
            self.request.body_bytes += len(piece)
            yield piece

    def _linger(self) -> None:
        # Closed with bytes unread, the kernel would reset, and the client might never see the answer.
        self.client.sock.shutdown(socket.SHUT_WR)
        self.client.sock.settimeout(LINGER_S)
        with contextlib.suppress(OSError):
            while self.client.sock.recv(1 << 16):
                pass


Fault = Callable[[Exchange], None]
