"""The arena: one backing file per inode in ``data/<ino>``, on a private tmpfs (or a directory in RAM).

What it keeps true:
- The backing file of a resident file exists from the moment its inode is committed until the last link and
  the last open are gone; removing it gives the memory back at once.
- The budget is the tmpfs's own size, so that writes which never pass through us (kernel passthrough)
  are held to it too. What admission reserves for bytes still to come is subtracted from what statfs
  offers. On a directory that is no tmpfs of its own, mount.budget holds the size instead.
- Its clock is the one that stamps the backing files: directories, links and files sort by mtime in the
  order in which they were changed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from fs.types import BLOCK_BYTES, SpaceUse

DATA = "data"
CLOCK = "clock"
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Backing files under *root*; *size_bytes* is set only where the tmpfs's size does not bound it."""

    def __init__(self, root: Path, *, size_bytes: int | None = None) -> None:
        self.root = root
        self.reserved_bytes = 0
        self._bound_bytes = size_bytes
        (root / DATA).mkdir(mode=0o700, exist_ok=True)
        self._data_fd = os.open(root / DATA, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._clock_fd = os.open(root / CLOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def is_bound(self) -> bool:
        """Whether its use is found out by looking at every file."""
        return self._bound_bytes is not None

    def close(self) -> None:
        """Let go of the directory; backing files stay."""
        os.close(self._data_fd)
        os.close(self._clock_fd)

    def now_ns(self) -> int:
        """The time as the arena's filesystem stamps it: never before the last stamp it gave."""
        os.utime(self._clock_fd)
        return os.fstat(self._clock_fd).st_mtime_ns

    def create(self, ino: int) -> os.stat_result:
        """Make *ino*'s empty backing file. One left by a crash before its commit is reused."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(str(ino), flags, 0o600, dir_fd=self._data_fd)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def open(self, ino: int, flags: int = os.O_RDWR) -> int:
        """A descriptor of *ino*'s backing file; the caller closes it."""
        return os.open(str(ino), flags | os.O_CLOEXEC, dir_fd=self._data_fd)

    def stat(self, ino: int) -> os.stat_result:
        """The backing file's own size, blocks and times."""
        return os.stat(str(ino), dir_fd=self._data_fd)

    def truncate(self, ino: int, size_bytes: int) -> os.stat_result:
        """Set the length; what is added reads as zeros and takes no memory."""
        fd = self.open(ino, os.O_RDWR)
        try:
            os.ftruncate(fd, size_bytes)
            return os.fstat(fd)
        finally:
            os.close(fd)

    def set_times(self, ino: int, atime_ns: int, mtime_ns: int) -> None:
        """Set both times of the backing file."""
        os.utime(str(ino), ns=(atime_ns, mtime_ns), dir_fd=self._data_fd)

    def remove(self, ino: int) -> None:
        """Give the memory back. It returns when the last descriptor and mapping are gone."""
        try:
            os.unlink(str(ino), dir_fd=self._data_fd)
        except FileNotFoundError:
            return

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give back the memory of a range of an open backing file; it reads as zeros then."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def inodes(self) -> list[int]:
        """Inode numbers that have a backing file."""
        return [int(name) for name in os.listdir(self._data_fd) if name.isdigit()]

    def space(self) -> SpaceUse:
        """Size, use and reservations, in bytes."""
        vfs = os.statvfs(self._data_fd)
        if self._bound_bytes is None:
            size = vfs.f_blocks * vfs.f_frsize
            used = size - vfs.f_bfree * vfs.f_frsize
        else:
            size = self._bound_bytes
            used = used_bytes(self._data_fd)
        return SpaceUse(size, used, self.reserved_bytes, vfs.f_files, vfs.f_ffree)


def used_bytes(data_fd: int) -> int:
    """Memory that the backing files in an open directory take together."""
    total = 0
    with os.scandir(data_fd) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
            except FileNotFoundError:
                continue
    return total
