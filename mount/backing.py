"""Backing files as the supervisor uses them: ids for the kernel, or reads and writes in its place.

What it keeps true:
- One backing id (passthrough) or one descriptor (plain) per inode while it has opens, however many: the
  kernel refuses a second id for an inode that is open. Both go with the last release; one left over would
  pin the file's memory.
- The table of granted opens is what a new worker is told: which inodes are in use, and for writing.
- FALLOCATE, LSEEK and COPY_FILE_RANGE, which libfuse has no handlers for, act on the backing file as the
  system calls do. Those that may take long run in a thread, so that nothing else waits for them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable

from fs import relay
from fs.types import FH_INO_MASK, FH_RESIDENT
from mount.budget import Budget
from mount.sysmount import libc

log = logging.getLogger("ckptfs.backing")

_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_COPY_PIECE_BYTES = 256 << 20  # a signal can end a copy between pieces


class _Backing:
    __slots__ = ("backing_id", "fd", "opens")

    def __init__(self, backing_id: int | None, fd: int) -> None:
        self.backing_id = backing_id
        self.fd = fd
        self.opens = 0


class Backings:
    """Backing files under the open directory *data_fd*, for the FUSE connection *fuse_fd*."""

    def __init__(self, data_fd: int, budget: Budget | None) -> None:
        self.passthrough = False
        self.fuse_fd = -1
        self._data_fd = data_fd
        self._budget = budget
        self._by_ino: dict[int, _Backing] = {}
        self._granted: dict[int, int] = {}  # file handle -> opens
        self._slow: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run_slow, daemon=True, name="local-io").start()

    def _open_file(self, ino: int, flags: int = os.O_RDWR) -> int:
        return os.open(str(ino), flags | os.O_CLOEXEC, dir_fd=self._data_fd)

    # opens

    def probe(self, fd: int) -> bool:
        """Whether this process may register backing files (it needs CAP_SYS_ADMIN in the first namespace)."""
        try:
            self._close_id(self._register(fd))
        except OSError:
            return False
        return True

    def _register(self, fd: int) -> int:
        argument = bytearray(struct.pack("<iIQ", fd, 0, 0))
        return int(fcntl.ioctl(self.fuse_fd, _BACKING_OPEN, argument, True))

    def _close_id(self, backing_id: int) -> None:
        fcntl.ioctl(self.fuse_fd, _BACKING_CLOSE, struct.pack("<I", backing_id))

    def grant(self, fh: int) -> int | None:
        """Note an open that the worker granted: its backing id, None in the plain lane. Raises OSError."""
        ino = fh & FH_INO_MASK
        backing = self._by_ino.get(ino)
        if backing is None:
            fd = self._open_file(ino)
            if self.passthrough:
                try:
                    backing = _Backing(self._register(fd), -1)
                finally:
                    os.close(fd)
            else:
                backing = _Backing(None, fd)
            self._by_ino[ino] = backing
        backing.opens += 1
        self._granted[fh] = self._granted.get(fh, 0) + 1
        return backing.backing_id

    def release(self, fh: int) -> None:
        """The open is gone (or never reached the application)."""
        count = self._granted.get(fh, 0) - 1
        if count > 0:
            self._granted[fh] = count
        else:
            self._granted.pop(fh, None)
        backing = self._by_ino.get(fh & FH_INO_MASK)
        if backing is None:
            return
        backing.opens -= 1
        if backing.opens > 0:
            return
        del self._by_ino[fh & FH_INO_MASK]
        if backing.backing_id is not None:
            self._close_id(backing.backing_id)
        if backing.fd >= 0:
            os.close(backing.fd)

    def granted(self) -> list[tuple[int, int]]:
        """Every open that an application still holds: (file handle, count)."""
        return list(self._granted.items())

    # requests answered here

    def serves(self, opcode: int, request: relay.Buffer) -> bool:
        """Whether the request is for bytes that lie in a backing file."""
        return opcode in relay.LOCAL and bool(relay.fh_of(request) & FH_RESIDENT)

    def serve(self, opcode: int, unique: int, request: memoryview, scratch: bytearray) -> None:
        """Execute and answer. *scratch* is at least a reply header and the largest read long."""
        if opcode == relay.WRITE:
            self._answer(unique, lambda: self._write(request))
        elif opcode == relay.READ:
            self._read(unique, request, scratch)
        elif opcode == relay.LSEEK:
            self._answer(unique, lambda: self._lseek(request))
        else:
            kept = bytes(request[: relay.REQUEST_HEADER_BYTES + 56])
            action = self._fallocate if opcode == relay.FALLOCATE else self._copy
            self._slow.put(lambda: self._answer(unique, lambda: action(kept)))

    def _run_slow(self) -> None:
        while True:
            self._slow.get()()

    def _answer(self, unique: int, action: Callable[[], bytes]) -> None:
        try:
            message = relay.reply(unique, action())
        except OSError as error:
            message = relay.error_reply(unique, error.errno or errno.EIO)
        self.send(message)

    def send(self, message: bytes | bytearray | memoryview) -> bool:
        """Give the kernel a reply; False when nobody waits for it any more (interrupted, unmounted)."""
        try:
            os.write(self.fuse_fd, message)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED):
                log.error("the kernel refused a reply of %d bytes: %s", len(message), error)
            return False
        return True

    def _fd(self, ino: int) -> tuple[int, bool]:
        """A descriptor and whether it must be closed."""
        backing = self._by_ino.get(ino)
        if backing is not None and backing.fd >= 0:
            return backing.fd, False
        return self._open_file(ino), True

    def _write(self, request: memoryview) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", request, relay.REQUEST_HEADER_BYTES)
        if self._budget is not None and not self._budget.admit(size):
            raise OSError(errno.ENOSPC, "the arena is full")
        fd, mine = self._fd(fh & FH_INO_MASK)
        try:
            start = relay.REQUEST_HEADER_BYTES + 40
            return struct.pack("<II", os.pwrite(fd, request[start : start + size], offset), 0)
        finally:
            if mine:
                os.close(fd)

    def _read(self, unique: int, request: memoryview, scratch: bytearray) -> None:
        fh, offset, size = struct.unpack_from("<QQI", request, relay.REQUEST_HEADER_BYTES)
        head = relay.REPLY_HEADER_BYTES
        view = memoryview(scratch)
        try:
            fd, mine = self._fd(fh & FH_INO_MASK)
            try:
                count = os.preadv(fd, [view[head : head + size]], offset)
            finally:
                if mine:
                    os.close(fd)
        except OSError as error:
            self.send(relay.error_reply(unique, error.errno or errno.EIO))
            return
        relay.REPLY_HEADER.pack_into(scratch, 0, head + count, 0, unique)
        self.send(view[: head + count])

    def _lseek(self, request: relay.Buffer) -> bytes:
        fh, offset, whence = struct.unpack_from("<QqI", request, relay.REQUEST_HEADER_BYTES)
        fd, mine = self._fd(fh & FH_INO_MASK)
        try:
            return struct.pack("<Q", os.lseek(fd, offset, whence))
        finally:
            if mine:
                os.close(fd)

    def _fallocate(self, request: bytes) -> bytes:
        fh, offset, length, mode = struct.unpack_from("<QqqI", request, relay.REQUEST_HEADER_BYTES)
        allocates = not mode & 2  # FALLOC_FL_PUNCH_HOLE
        if allocates and self._budget is not None and not self._budget.admit(length):
            raise OSError(errno.ENOSPC, "the arena is full")
        fd = self._open_file(fh & FH_INO_MASK)
        try:
            arguments = ctypes.c_int(mode), ctypes.c_long(offset), ctypes.c_long(length)
            if libc.fallocate(fd, *arguments):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        finally:
            os.close(fd)
        return b""

    def _copy(self, request: bytes) -> bytes:
        fields = struct.unpack_from("<QqQQqQ", request, relay.REQUEST_HEADER_BYTES)
        from_fh, from_offset, _, to_fh, to_offset, length = fields
        length = min(length, _COPY_PIECE_BYTES)
        if self._budget is not None and not self._budget.admit(length):
            raise OSError(errno.ENOSPC, "the arena is full")
        source = self._open_file(from_fh & FH_INO_MASK, os.O_RDONLY)
        try:
            target = self._open_file(to_fh & FH_INO_MASK)
            try:
                done = os.copy_file_range(source, target, length, from_offset, to_offset)
            finally:
                os.close(target)
        finally:
            os.close(source)
        return struct.pack("<II", done, 0)
