"""Requests that wait for something, kept where the next worker finds them.

Only needed where the kernel cannot be asked to send requests again (before Linux 6.9): there the request that was read
last lies in the open table, and those that wait behind it lie here.

What it keeps true: a request is here from before the next one is read until its reply is sent. Written by pwrite, so a
full tmpfs is an error (and the request is not kept), never a signal.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from fs.relay import READ_BUFFER_BYTES, REQUEST_HEADER

SLOTS = 256
_SLOT_BYTES = (READ_BUFFER_BYTES + 4095) // 4096 * 4096 + 4096
_HEAD = struct.Struct("<QQ")  # unique length


class Suspended:
    """The file ``suspended`` in *directory*; *fresh* begins it anew (a new mount)."""

    def __init__(self, directory: Path, *, fresh: bool) -> None:
        path = directory / "suspended"
        if fresh:
            path.unlink(missing_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._slot_of: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        for slot in range(os.fstat(self._fd).st_size // _SLOT_BYTES + 1):
            head = os.pread(self._fd, _HEAD.size, slot * _SLOT_BYTES)
            unique, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
            if unique:
                self._slot_of[unique] = slot
                self._lengths[unique] = length
        self._free = sorted(set(range(SLOTS)) - set(self._slot_of.values()), reverse=True)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def keep(self, request: bytes | memoryview) -> bool:
        """Keep a request; False when there is no room for it."""
        unique = REQUEST_HEADER.unpack_from(request)[2]
        if unique in self._slot_of:
            return True
        if not self._free:
            return False
        slot = self._free[-1]
        at = slot * _SLOT_BYTES
        try:
            if os.pwrite(self._fd, request, at + _HEAD.size) < len(request):
                return False
            # the head last: a slot without one is free
            os.pwrite(self._fd, _HEAD.pack(unique, len(request)), at)
        except OSError:
            return False
        self._free.pop()
        self._slot_of[unique] = slot
        self._lengths[unique] = len(request)
        return True

    def answered(self, unique: int) -> None:
        """Its reply is sent, or is about to be in a way that is found again."""
        slot = self._slot_of.pop(unique, None)
        if slot is None:
            return
        del self._lengths[unique]
        os.pwrite(self._fd, bytes(8), slot * _SLOT_BYTES)
        self._free.append(slot)

    def requests(self) -> list[bytes]:
        """What is kept, in the order in which the kernel numbered it."""
        return [
            os.pread(self._fd, self._lengths[unique], slot * _SLOT_BYTES + _HEAD.size)
            for unique, slot in sorted(self._slot_of.items())
        ]
