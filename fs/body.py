"""A piece of a file as the body of a request, read straight from the file and digested as it is read.

What it keeps true: `digest` is of the bytes that the last pass from start to end has read, whatever passes came
before (a signature, a failed attempt). Memory is one buffer, however long the piece is.
"""

from __future__ import annotations

import os

import xxhash

READ_BYTES = 1 << 20


class FileBody:
    """*length* bytes from *offset* behind *fd*. The descriptor is the caller's."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._position = 0
        self._hash = xxhash.xxh3_128()
        self._hashed = 0

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        """The position, from the piece's start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position in the piece."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, a large piece whatever *size* says: HTTP libraries ask for little at a time.

        Fewer than announced when the file has become shorter.
        """
        count = min(READ_BYTES, self._length - self._position)
        if count <= 0 or size == 0:
            return b""
        data = os.pread(self._fd, count, self._offset + self._position)
        if self._position == 0:
            self._hash.reset()
            self._hashed = 0
        if self._position == self._hashed:
            self._hash.update(data)
            self._hashed += len(data)
        self._position += len(data)
        return data

    def digest(self) -> bytes | None:
        """XXH3-128 of the piece as it was read last; None when it was not read to its end."""
        return self._hash.digest() if self._hashed == self._length else None
