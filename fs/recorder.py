"""Changes of the namespace, written down as what they ask of the durable tier (fs.journal).

What it keeps true: it is called in the transaction of a change, before the index's names are changed (`made` and
`linked`: after). A name that cannot be a key is refused here, so nothing is acknowledged that could never be stored.
"""

from __future__ import annotations

import errno
import os
import stat

from fs.arena import Arena
from fs.errors import FsError
from fs.index import Index
from fs.journal import Journal, is_stored
from fs.objects import key_bytes
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.types import Attr

SNAPSHOT_BYTES = (
    1 << 20
)  # of a file that is rewritten in place: what can be copied while its writer waits
_PIECE_BYTES = 1 << 20

Place = tuple[int, bytes]


class Recorder:
    """Writes to *journal* what happens to the names in *index*."""

    def __init__(
        self,
        index: Index,
        journal: Journal,
        objects: ObjectTable,
        paths: Paths,
        arena: Arena,
        max_key_bytes: int,
    ) -> None:
        self.journal = journal
        self._index = index
        self._objects = objects
        self._paths = paths
        self._arena = arena
        self._max_key_bytes = max_key_bytes

    def tell(self) -> None:
        """After the transaction."""
        self.journal.tell()

    def _key(self, place: Place, attr: Attr) -> str | None:
        key = self._paths.key(*place)
        if key is None:
            return None
        return key + "/" if stat.S_ISDIR(attr.mode) else key

    def _usable(self, key: str) -> None:
        if key_bytes(key) > self._max_key_bytes:
            raise FsError(
                errno.ENAMETOOLONG,
                f"{key}: as a key of the durable tier it has {key_bytes(key)} bytes, "
                f"at most {self._max_key_bytes} are possible",
            )

    def made(self, parent: int, name: bytes, attr: Attr) -> None:
        """A new node. A regular file is written down when its first generation ends."""
        key = self._key((parent, name), attr)
        if key is None or not is_stored(attr.mode):
            return
        self._usable(key)
        if attr.generation or not stat.S_ISREG(attr.mode):
            self.journal.put(key, attr)

    def linked(self, parent: int, name: bytes, attr: Attr) -> None:
        """One more name of a file: one more object."""
        key = self._key((parent, name), attr)
        if key is None or not is_stored(attr.mode):
            return
        self._usable(key)
        if attr.generation or not stat.S_ISREG(attr.mode):
            self.journal.put(key, attr)

    def removed(self, parent: int, name: bytes, attr: Attr) -> None:
        """A name is about to go."""
        key = self._key((parent, name), attr)
        if key is not None:
            self.journal.removed(key)

    def renaming(self, source: Place, destination: Place, moved: Attr, old: Attr | None) -> None:
        """A name is about to move, in place of *old* if there is one."""
        before, after = self._key(source, moved), self._key(destination, moved)
        if before is None or after is None:
            return
        if stat.S_ISDIR(moved.mode):
            self._renaming_directory(before, after)
            return
        self._usable(after)
        if not is_stored(moved.mode):
            if old is not None:
                self.journal.removed(after)
            return
        place = self.journal.replaced(after) if old is not None else None
        self.journal.renamed(before, after, place=place)

    def _renaming_directory(self, before: str, after: str) -> None:
        longest = max((key_bytes(key) for key in self.journal.keys_below(before)), default=0)
        if longest - key_bytes(before) + key_bytes(after) > self._max_key_bytes:
            raise FsError(
                errno.ENAMETOOLONG, f"{after}: what is below would have keys that are too long"
            )
        self.journal.replaced(after)
        self.journal.renamed_below(before, after)
        self._paths.moved()

    def exchanging(self, one: Place, two: Place, first: Attr, second: Attr) -> None:
        """Two names are about to change places. Raises FsError EINVAL for what cannot be exchanged there."""
        for attr in (first, second):
            if not stat.S_ISREG(attr.mode) or not attr.resident:
                raise FsError(
                    errno.EINVAL, "with a durable tier only files in memory can be exchanged"
                )
        for place, attr in ((one, second), (two, first)):
            key = self._key(place, attr)
            if key is not None and attr.generation:
                self.journal.replaced(key)
                self.journal.put(key, attr)

    def changing(self, attr: Attr) -> None:
        """Attributes are about to be replaced by these; with another generation, the bytes are others."""
        before = self._index.attr(attr.ino)
        if before is None or attr.nlink == 0 or not is_stored(attr.mode):
            return
        if attr.generation != before.generation:
            self.journal.ended(attr)
        elif _stored(attr) != _stored(before):
            self.journal.meta(attr)

    def overwriting(self, attr: Attr) -> None:
        """Keep the bytes of a small file that something further down the list may rely on.

        Without memory for a copy the row uploads what the file will hold then.
        """
        if not attr.resident or attr.size > SNAPSHOT_BYTES:
            return
        rows = self.journal.to_snapshot(attr)
        if not rows:
            return
        with self._index.transaction():
            ino = self._index.next_ino()
            try:
                self._copy(attr.ino, ino, attr.size)
            except OSError:
                self._arena.remove(ino)
                return
            self._index.insert_inode(attr._replace(ino=ino, nlink=0), 0, None)
            for row in rows:
                self.journal.repoint(row, ino)

    def _copy(self, source: int, target: int, size: int) -> None:
        self._arena.create(target)
        reading = self._arena.open(source, os.O_RDONLY)
        try:
            writing = self._arena.open(target)
            try:
                os.pwrite(writing, os.pread(reading, size, 0), 0)
            finally:
                os.close(writing)
        finally:
            os.close(reading)


def _stored(attr: Attr) -> tuple[int, int, int, int]:
    return attr.mode, attr.uid, attr.gid, attr.mtime_ns
