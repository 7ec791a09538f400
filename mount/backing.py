"""Backing files as the worker's session uses them: ids for the kernel, or reads and writes in its place.

What it keeps true:
- One backing id (passthrough) or one descriptor (plain) per inode while it has opens, however many: the
  kernel refuses a second id for an inode that is open. Both go with the last release; one left over would
  pin the file's memory. Ids belong to the connection, so they outlive the worker that registered them.
- Without an id are: every file in the plain lane, and in the other one those that are not resident or
  whose writers may have to be held back, until their last open is gone.
- FALLOCATE, LSEEK and COPY_FILE_RANGE, which libfuse has no handlers for, act on the backing file as the
  system calls do. Those that may take long run in a thread, so that nothing else waits for them.
"""

from __future__ import annotations

import contextlib
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
from fs.opentable import OpenTable
from fs.types import FH_INO_MASK, FH_RESIDENT
from mount.budget import Budget
from mount.sysmount import libc

log = logging.getLogger("ckptfs.backing")

_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_COPY_PIECE_BYTES = 256 << 20  # a signal can end a copy between pieces
_PUNCH_HOLE = 2
_BODY = relay.REQUEST_HEADER_BYTES
_NOBODY_WAITS = (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ECONNABORTED)


class Backings:
    """Backing files in the open directory *data_fd*, for the FUSE connection *device_fd*."""

    def __init__(
        self, device_fd: int, data_fd: int, table: OpenTable, budget: Budget | None
    ) -> None:
        self.passthrough = False
        self.slow_inline = False
        self._device_fd = device_fd
        self._data_fd = data_fd
        self._table = table
        self._budget = budget
        self._fds: dict[int, int] = {}
        self._slow: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run_slow, daemon=True, name="slow-io").start()

    def _open_file(self, ino: int, flags: int = os.O_RDWR) -> int:
        try:
            return os.open(str(ino), flags | os.O_CLOEXEC, dir_fd=self._data_fd)
        except FileNotFoundError as error:  # the path is there, its bytes are not
            raise OSError(errno.EIO, f"backing file {ino} is gone") from error

    # opens

    def probe(self, fd: int) -> bool:
        """Whether this process may register backing files (CAP_SYS_ADMIN in the first namespace)."""
        try:
            self.close_id(self._register(fd))
        except OSError:
            return False
        return True

    def _register(self, fd: int) -> int:
        argument = bytearray(struct.pack("<iIQ", fd, 0, 0))
        backing_id = int(fcntl.ioctl(self._device_fd, _BACKING_OPEN, argument, True))
        self._table.last_backing_id = backing_id
        return backing_id

    def close_id(self, backing_id: int) -> None:
        """Let the kernel let go of a backing file; one that is not registered is none to close."""
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(self._device_fd, _BACKING_CLOSE, struct.pack("<I", backing_id))

    def id_for(self, fh: int, *, may_pass: bool) -> int:
        """The backing id under which an open is granted; 0: the kernel does not move the bytes.

        All opens of an inode at a time have the same. Raises OSError.
        """
        ino = fh & FH_INO_MASK
        backing_id = self._table.backing_id(ino)
        if backing_id is not None:
            return backing_id
        if not fh & FH_RESIDENT:
            return 0
        if not self.passthrough or not may_pass:
            self._kept_fd(ino)
            return 0
        fd = self._open_file(ino)
        try:
            return self._register(fd)
        finally:
            os.close(fd)

    def unused(self, ino: int) -> None:
        """The last open is gone."""
        backing_id = self._table.backing_id(ino)
        if backing_id:
            self.close_id(backing_id)
        fd = self._fds.pop(ino, None)
        if fd is not None:
            os.close(fd)
        self._table.forget(ino)

    def adopt(self, last_id: int) -> None:
        """Close what a worker that died left registered; *last_id* is the last id it wrote down."""
        for ino, _ in self._table.idle():
            self.unused(ino)
        if not self.passthrough:
            return
        # registered last, or next, but killed before the open was written down
        for backing_id in {last_id, last_id + 1} - self._table.backing_ids() - {0}:
            self.close_id(backing_id)

    # requests answered here

    def serves(self, request: relay.Buffer) -> bool:
        """Whether a request (of an opcode in relay.LOCAL) is for bytes that lie in a backing file."""
        return bool(relay.fh_of(request) & FH_RESIDENT)

    def serve(self, opcode: int, unique: int, request: memoryview, scratch: bytearray) -> None:
        """Execute and answer. *scratch* is at least a reply header and the largest read long."""
        if opcode == relay.WRITE:
            self._answer(unique, lambda: self._write(request))
        elif opcode == relay.READ:
            self._read(unique, request, scratch)
        elif opcode == relay.LSEEK:
            self._answer(unique, lambda: self._lseek(request))
        else:
            kept = bytes(request[: _BODY + 56])
            action = self._fallocate if opcode == relay.FALLOCATE else self._copy

            def execute() -> None:
                self._answer(unique, lambda: action(kept))

            execute() if self.slow_inline else self._slow.put(execute)

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
            os.write(self._device_fd, message)
        except OSError as error:
            if error.errno not in _NOBODY_WAITS:
                log.error("the kernel refused a reply of %d bytes: %s", len(message), error)
            return False
        return True

    def _kept_fd(self, ino: int) -> int:
        """A descriptor that stays open as long as the inode has opens."""
        fd = self._fds.get(ino)
        if fd is None:
            fd = self._fds[ino] = self._open_file(ino)
        return fd

    def _write(self, request: memoryview) -> bytes:
        fh, offset, size = struct.unpack_from("<QQI", request, _BODY)
        if self._budget is not None and not self._budget.admit(size):
            raise OSError(errno.ENOSPC, "the arena is full")
        data = request[_BODY + 40 : _BODY + 40 + size]
        return struct.pack("<II", os.pwrite(self._kept_fd(fh & FH_INO_MASK), data, offset), 0)

    def _read(self, unique: int, request: memoryview, scratch: bytearray) -> None:
        fh, offset, size = struct.unpack_from("<QQI", request, _BODY)
        head = relay.REPLY_HEADER_BYTES
        view = memoryview(scratch)
        try:
            # not from a mapping of the file: reading a hole through one takes memory, or fails without
            count = os.preadv(self._kept_fd(fh & FH_INO_MASK), [view[head : head + size]], offset)
        except OSError as error:
            self.send(relay.error_reply(unique, error.errno or errno.EIO))
            return
        relay.REPLY_HEADER.pack_into(scratch, 0, head + count, 0, unique)
        self.send(view[: head + count])

    def _lseek(self, request: memoryview) -> bytes:
        fh, offset, whence = struct.unpack_from("<QqI", request, _BODY)
        fd = self._open_file(fh & FH_INO_MASK, os.O_RDONLY)
        try:
            return struct.pack("<Q", os.lseek(fd, offset, whence))
        finally:
            os.close(fd)

    def _fallocate(self, request: bytes) -> bytes:
        fh, offset, length, mode = struct.unpack_from("<QqqI", request, _BODY)
        allocates = not mode & _PUNCH_HOLE
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
        fields = struct.unpack_from("<QqQQqQ", request, _BODY)
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
