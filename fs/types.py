"""Words that every part of the filesystem uses, with no behaviour of their own.

A file handle is the inode number with two flag bits, so that whoever sees a handle (the session in
a reply, a worker that has just taken over) knows the inode and what the handle may do without a table:

    bit 62  RESIDENT  bytes are in the arena: the kernel (passthrough) or the session moves them
    bit 61  WRITABLE  opened with O_WRONLY or O_RDWR

Inode numbers therefore stay below 2**61.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT_INO = 1
NAME_MAX_BYTES = 255
SYMLINK_MAX_BYTES = 4095
BLOCK_BYTES = 512

FH_RESIDENT = 1 << 62
FH_WRITABLE = 1 << 61
FH_INO_MASK = FH_WRITABLE - 1

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


class Attr(NamedTuple):
    """One inode's attributes; times in ns since the epoch, ``blocks`` in units of 512 bytes.

    ``resident`` is 0 of a regular file whose bytes are in the durable tier and not (all) in the arena.
    """

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    generation: int
    resident: int = 1


class Op(NamedTuple):
    """Who asks, and which request it is.

    ``op_id`` names the kernel's request (31 bits); ``resent`` says that an earlier worker may have
    executed it already, so that a recorded result must be given instead of executing it again.
    """

    uid: int
    gid: int
    op_id: int = 0
    resent: bool = False


class Change:
    """What a setattr asks for; None leaves a field alone. Times in ns."""

    __slots__ = ("atime_ns", "gid", "mode", "mtime_ns", "size", "uid")

    def __init__(
        self,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> None:
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.size = size
        self.atime_ns = atime_ns
        self.mtime_ns = mtime_ns

    def is_empty(self) -> bool:
        """Whether no field is to change."""
        return all(getattr(self, field) is None for field in self.__slots__)


class DirEntry(NamedTuple):
    """One row of a directory; ``cookie`` is its persistent position, ascending, never reused."""

    cookie: int
    name: bytes
    attr: Attr


class SpaceUse(NamedTuple):
    """The arena's budget: what may be held, and what is taken (bytes)."""

    size_bytes: int
    used_bytes: int
    reserved_bytes: int
    inodes: int
    free_inodes: int

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be written."""
        return max(0, self.size_bytes - self.used_bytes - self.reserved_bytes)
