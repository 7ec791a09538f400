"""HTTP/1.1 as bytes: heads and bodies go on as they came, so that signatures and framing stay what they were."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 256 << 10
MAX_HEAD_BYTES = 256 << 10


class Head(NamedTuple):
    """The lines before a body. *headers*: names as they came, in order."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str, default: str = "") -> str:
        """The first value of a header; names in any case."""
        return next((value for key, value in self.headers if key.lower() == name), default)

    def without(self, *names: str) -> Head:
        """All headers but these; names in lower case."""
        return Head(self.first, [pair for pair in self.headers if pair[0].lower() not in names])

    def plus(self, **headers: str) -> Head:
        """These headers in place of any of their names, "_" standing for "-"."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kept = self.without(*(name.lower() for name in named))
        return Head(self.first, [*kept.headers, *named.items()])

    def encode(self) -> bytes:
        """As it goes over the wire."""
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def body_bytes(self) -> int | None:
        """How long the body is as far as the head says; None when it comes in chunks."""
        if "chunked" in self.get("transfer-encoding").lower():
            return None
        return int(self.get("content-length", "0"))

    def status(self) -> int:
        """Of an answer."""
        return int(self.first.split(" ", 2)[1])


class Stream:
    """A connected socket, read through a buffer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def head(self) -> Head | None:
        """The next head; None when the peer has ended. Raises ConnectionError when it ends within."""
        raw = self._until(b"\r\n\r\n", MAX_HEAD_BYTES)
        if raw is None:
            return None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        headers = []
        for line in lines:
            name, _, value = line.partition(":")
            headers.append((name, value.strip()))
        return Head(first, headers)

    def body(self, length: int | None) -> Iterator[bytes]:
        """The body as it comes, framing of chunks included. Raises ConnectionError when it ends early."""
        if length is not None:
            yield from self._exactly(length)
            return
        while True:
            line = self._line()
            yield line
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            yield from self._exactly(size + 2)
        line = b""
        while line != b"\r\n":  # trailers
            line = self._line()
            yield line

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.sock.sendall(data)

    def has_gone(self) -> bool:
        """Whether the peer has ended, also when what it sent before was not read yet."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def reset(self) -> None:
        """End with RST, not FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def _line(self) -> bytes:
        line = self._until(b"\r\n", MAX_HEAD_BYTES)
        if line is None:
            raise ConnectionError("the peer ended within a body")
        return line

    def _until(self, end: bytes, max_bytes: int) -> bytes | None:
        while (found := self._buffer.find(end)) < 0:
            if len(self._buffer) > max_bytes:
                raise ConnectionError(f"no {end!r} within {max_bytes} bytes")
            more = self.sock.recv(PIECE_BYTES)
            if not more and not self._buffer:
                return None
            if not more:
                raise ConnectionError("the peer ended within a head")
            self._buffer += more
        return self._take(found + len(end))

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length:
            piece = self._take(length) if self._buffer else self.sock.recv(min(length, PIECE_BYTES))
            if not piece:
                raise ConnectionError(f"the peer ended {length} bytes before the end of a body")
            length -= len(piece)
            yield piece

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken
