"""Who has which file open, and when a generation of its bytes ends.

What it keeps true:
- While a file has a writable open its size and times are the backing file's, because writes do not pass
  through us; once the last one is released they are the index's and cost no system call.
- A generation ends when a writer flushes (close), fsyncs or is released and the bytes may have changed.
  Stores through a mapping do not move the backing file's mtime, so a writable open that could have been
  mapped always ends one at its last release; a later comparison of digests may find it equal.
- An inode without links stays until its last open is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from fs.arena import Arena
from fs.types import FH_INO_MASK, FH_WRITABLE, Attr

GenerationEnded = Callable[[Attr], None]


class _Opens:
    __slots__ = ("drop_privileges", "mappable", "readers", "writers")

    def __init__(self) -> None:
        self.readers = 0
        self.writers = 0
        self.mappable = False
        self.drop_privileges = False


class Content:
    """Opens by inode, and the attributes that follow from the bytes."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.generation_ended: list[GenerationEnded] = []
        self.used: list[Callable[[int], None]] = []  # told of each open and release
        self._opens: dict[int, _Opens] = {}

    def adopt(self, handles: Iterable[tuple[int, int]]) -> None:
        """Take over opens that an earlier worker granted: (file handle, count) pairs."""
        for fh, count in handles:
            opens = self._opens.setdefault(fh & FH_INO_MASK, _Opens())
            if fh & FH_WRITABLE:
                opens.writers += count
                opens.mappable = True
            else:
                opens.readers += count

    def opened(self, ino: int, flags: int, *, drop_privileges: bool = False) -> None:
        """Note an open with open(2) *flags*."""
        for listener in self.used:
            listener(ino)
        opens = self._opens.get(ino)
        if opens is None:
            opens = self._opens[ino] = _Opens()
        if flags & os.O_ACCMODE == os.O_RDONLY:
            opens.readers += 1
            return
        opens.writers += 1
        opens.mappable |= flags & os.O_ACCMODE == os.O_RDWR
        opens.drop_privileges |= drop_privileges

    def released(self, fh: int) -> bool:
        """Note a release; whether the inode has no opens left. A release not known of is one more."""
        ino = fh & FH_INO_MASK
        for listener in self.used:
            listener(ino)
        opens = self._opens.get(ino)
        if opens is None:
            return True
        if fh & FH_WRITABLE:
            opens.writers = max(0, opens.writers - 1)
        else:
            opens.readers = max(0, opens.readers - 1)
        if opens.writers or opens.readers:
            return False
        del self._opens[ino]
        return True

    def is_open(self, ino: int) -> bool:
        """Whether anyone has it open."""
        return ino in self._opens

    def open_inodes(self) -> set[int]:
        """Every inode that somebody has open."""
        return set(self._opens)

    def writing_inodes(self) -> list[int]:
        """Every inode that somebody has open for writing."""
        return [ino for ino, opens in self._opens.items() if opens.writers]

    def has_writers(self, ino: int) -> bool:
        """Whether anyone may be changing the bytes."""
        opens = self._opens.get(ino)
        return opens is not None and opens.writers > 0

    def may_be_mapped(self, ino: int) -> bool:
        """Whether bytes may have changed without moving the mtime (shared writable mapping)."""
        opens = self._opens.get(ino)
        return opens is not None and opens.mappable

    def drops_privileges(self, ino: int) -> bool:
        """Whether a writer without CAP_FSETID has it open: suid, sgid and capabilities go with a change."""
        opens = self._opens.get(ino)
        return opens is not None and opens.drop_privileges

    def observe(self, attr: Attr) -> Attr:
        """*attr* with size, blocks and times as the backing file has them now."""
        status = self.arena.stat(attr.ino)
        return merged(attr, status)

    def ended(self, attr: Attr) -> None:
        """Tell who cares that a generation ended."""
        for listener in self.generation_ended:
            listener(attr)


def merged(attr: Attr, status: os.stat_result) -> Attr:
    """The index knows of changes to the inode, the backing file of changes to the bytes."""
    return Attr(
        attr.ino,
        attr.mode,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.rdev,
        status.st_size,
        status.st_blocks,
        status.st_atime_ns,
        status.st_mtime_ns,
        max(attr.ctime_ns, status.st_ctime_ns),
        attr.generation,
        attr.resident,
    )
