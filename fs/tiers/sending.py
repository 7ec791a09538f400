"""A body on its way into an HTTP request.

What it keeps true: it begins at its start however far an earlier attempt came, it leaves in large pieces (HTTP
libraries ask for 16 to 128 KiB at a time, and each piece costs a system call and a turn at the interpreter), and it
never ends early in silence: a server would wait for the rest until it gives up.
"""

from __future__ import annotations

import os

from fs.tiers.tier import Body, TierBadBytes

PIECE_BYTES = 1 << 20


class Sending:
    """*body* as a file that HTTP libraries read. A length of 0 is better sent as b""."""

    def __init__(self, body: Body | bytes) -> None:
        self._body = BytesBody(body) if isinstance(body, bytes) else body
        self._body.seek(0)
        self._length = len(self._body)

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        """The position, from the body's start."""
        return self._body.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position."""
        return self._body.seek(offset, whence)

    def read(self, size: int = -1, /) -> bytes | memoryview:
        """The next piece, large whatever *size* says (but 0). Raises TierBadBytes when the body ends early."""
        if size == 0:
            return b""
        # more than is left may have been appended to a file: what was announced is what is sent
        before = self._body.tell()
        left = self._length - before
        if left <= 0:
            return b""
        piece = self._body.read(min(left, PIECE_BYTES))
        if not piece:
            raise TierBadBytes(f"the bytes to send ended at {before} of {self._length}")
        return piece if len(piece) <= left else piece[:left]


class BytesBody:
    """Bytes in memory as a Body, not copied."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1, /) -> memoryview:
        """At most *size* bytes (-1: all that is left)."""
        end = len(self._view) if size < 0 else min(len(self._view), self._position + size)
        piece = self._view[self._position : end]
        self._position += len(piece)
        return piece
