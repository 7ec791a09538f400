"""Requests that cannot be answered yet, while others are: reads of bytes that have to be fetched.

What it keeps true:
- Whoever waits here holds nothing else up: each request is a task of its own, answered in whatever order.
- Nobody waits for ever: what is waited for has a deadline, and a process that is being killed is answered at once,
  since the kernel does not let it go before.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Awaitable, Callable

import trio

from fs import relay
from fs.residency import Elsewhere
from fs.types import FH_INO_MASK
from mount.backing import Backings

log = logging.getLogger("ckptfs.waiting")

DYING_LOOK_S = 0.5
_SEEK_DATA, _SEEK_HOLE = 3, 4
_SIGKILL_BIT = 1 << 8
_BODY = relay.REQUEST_HEADER_BYTES


class _Wait:
    __slots__ = ("pid", "scope", "seen")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.scope = trio.CancelScope()
        self.seen = False


class Waiting:
    """Requests for files that are not resident. *answered* is told each number once its reply is sent."""

    def __init__(
        self,
        backings: Backings,
        elsewhere: Elsewhere | None,
        scratch: bytearray,
        answered: Callable[[int], None],
    ) -> None:
        self._backings = backings
        self._elsewhere = elsewhere
        self._scratch = scratch
        self._answered = answered
        self._waits: dict[int, _Wait] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Let requests wait, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._watch()
            finally:
                self._nursery = None

    def __bool__(self) -> bool:
        return bool(self._waits)

    def serve(self, opcode: int, unique: int, request: memoryview) -> bool:
        """Execute a request (of an opcode in relay.LOCAL) on a handle that is not resident.

        False: it waits, and is answered later.
        """
        try:
            if opcode == relay.READ:
                return self._read(unique, request)
            self._backings.send(relay.reply(unique, self._other(opcode, request)))
        except OSError as error:
            self._backings.send(relay.error_reply(unique, error.errno or errno.EIO))
        return True

    def _files(self) -> Elsewhere:
        if self._elsewhere is None:
            raise OSError(errno.EIO, "there is no durable tier to read from")
        return self._elsewhere

    def _read(self, unique: int, request: memoryview) -> bool:
        fh, offset, size = struct.unpack_from("<QQI", request, _BODY)
        ino = fh & FH_INO_MASK
        files = self._files()
        if files.is_resident(ino):
            self._backings.serve(relay.READ, unique, request, self._scratch)
            return True
        found = files.at_hand(ino, offset, size)
        if found is not None:
            self._send_bytes(unique, found.fd, offset, found.length)
            return True
        head = bytes(request[: _BODY + 40])
        self.start(unique, relay.pid_of(request), lambda: self._fetch(unique, head))
        return False

    async def _fetch(self, unique: int, request: bytes) -> None:
        fh, offset, size = struct.unpack_from("<QQI", request, _BODY)
        found = await self._files().fetched(fh & FH_INO_MASK, offset, size)
        if found is None:
            self._backings.serve(relay.READ, unique, memoryview(request), self._scratch)
        else:
            self._send_bytes(unique, found.fd, offset, found.length)

    def _send_bytes(self, unique: int, fd: int, offset: int, length: int) -> None:
        head = relay.REPLY_HEADER_BYTES
        view = memoryview(self._scratch)
        count = os.preadv(fd, [view[head : head + length]], offset) if length else 0
        relay.REPLY_HEADER.pack_into(self._scratch, 0, head + count, 0, unique)
        self._backings.send(view[: head + count])

    def _other(self, opcode: int, request: memoryview) -> bytes:
        files = self._files()
        if opcode == relay.LSEEK:
            fh, offset, whence = struct.unpack_from("<QqI", request, _BODY)
            return self._lseek(files.size(fh & FH_INO_MASK), offset, whence)
        if opcode == relay.COPY_FILE_RANGE:
            # the kernel then copies by reading and writing
            raise OSError(errno.EOPNOTSUPP, "not of a file that is elsewhere")
        raise OSError(errno.EBADF, "a handle that is not resident is for reading")

    def _lseek(self, size: int, offset: int, whence: int) -> bytes:
        """All of it is data, as far as is known."""
        if whence not in (_SEEK_DATA, _SEEK_HOLE):
            raise OSError(errno.EINVAL, "the kernel does the others itself")
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, "behind the end")
        return struct.pack("<Q", offset if whence == _SEEK_DATA else size)

    # waiting

    def start(self, unique: int, pid: int, action: Callable[[], Awaitable[None]]) -> None:
        """Let *action* answer a request, or an error that it raises."""
        if self._nursery is None:
            raise OSError(errno.EIO, "nothing can wait before the worker serves")
        wait = self._waits[unique] = _Wait(pid)
        self._nursery.start_soon(self._run, unique, wait, action)

    async def _run(self, unique: int, wait: _Wait, action: Callable[[], Awaitable[None]]) -> None:
        try:
            with wait.scope:
                await self._guarded(unique, action)
            if wait.scope.cancelled_caught:
                self._backings.send(relay.error_reply(unique, errno.EINTR))
            self._answered(unique)
        finally:
            del self._waits[unique]

    async def _guarded(self, unique: int, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        except OSError as error:
            self._backings.send(relay.error_reply(unique, error.errno or errno.EIO))
        except Exception:
            log.exception("request %d failed; the application gets EIO", unique)
            self._backings.send(relay.error_reply(unique, errno.EIO))

    async def _watch(self) -> None:
        """A process that was sent SIGKILL does not end before its requests are answered."""
        while True:
            await trio.sleep(DYING_LOOK_S)
            for wait in list(self._waits.values()):
                if wait.seen and is_dying(wait.pid):
                    wait.scope.cancel()
                wait.seen = True


def is_dying(pid: int) -> bool:
    """Whether a thread has a SIGKILL pending."""
    if pid <= 0:
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line.split()[1], 16) & _SIGKILL_BIT:
            return True
    return False
