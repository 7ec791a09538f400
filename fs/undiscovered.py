"""What a node does not know yet of the durable tier that it has mounted: rows in the index, and how they fill.

What it keeps true:
- A directory is in `unlisted` until every name that the tier has in it is a name here. An inode is in `unheaded` until
  its attributes are what its object's metadata say. Both survive the worker; each step is one transaction.
- What is here already, or was decided here (the journal says what becomes of its key), is never changed by what the
  tier has.
- Every file, symlink and directory that was found has its object row. A directory without an object of its own has one
  with an empty ETag, so that nobody writes one because there is none.
- Of an object `a` and objects below `a/` the directory is shown; the object `a` cannot be reached. It is logged.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Sequence
from typing import Protocol

from fs.discovered import NO_ETAG, Entry, Owner, listed_attr, told_attr
from fs.index import Index
from fs.objects import parse_metadata
from fs.objecttable import DurableObject, ObjectTable
from fs.paths import Paths
from fs.tiers.tier import ObjectInfo
from fs.types import ROOT_INO, Attr

log = logging.getLogger("ckptfs.discovery")

BEGUN_NOTE = "discovering"
ROWS_AT_ONCE = 500  # in one transaction: 10 to 20 ms

_TREE = (
    "WITH RECURSIVE tree(ino) AS (VALUES(?) UNION ALL"
    " SELECT d.ino FROM dentry d JOIN tree t ON d.parent=t.ino)"
)


class Pending(Protocol):
    """Of fs.journal.Journal: what was decided here and is not in the tier yet."""

    def claims(self, key: str) -> bool: ...

    def has_below(self, prefix: str) -> bool: ...

    def put(self, key: str, attr: Attr) -> None: ...

    def tell(self) -> None: ...


class Undiscovered:
    """Rows in *index*. *now_ns*: a clock, ns since the epoch."""

    def __init__(
        self,
        index: Index,
        objects: ObjectTable,
        paths: Paths,
        pending: Pending,
        now_ns: Callable[[], int],
    ) -> None:
        self._index = index
        self._db = index.db
        self._objects = objects
        self._paths = paths
        self._pending = pending
        self._now_ns = now_ns
        index.index_names()
        self._db.execute("CREATE TABLE IF NOT EXISTS unheaded(ino INTEGER PRIMARY KEY)")
        # most of the time there is nothing left to find out, and then nothing is to be asked
        self._some_unlisted = self._has("SELECT 1 FROM unlisted LIMIT 1")
        self._some_unheaded = self._has("SELECT 1 FROM unheaded LIMIT 1")

    def _has(self, query: str, *values: object) -> bool:
        return self._db.execute(query, values).fetchone() is not None

    def begin(self, described: str) -> bool:
        """The tier *described* may hold more than is known: whether this is the first time.

        Directories that are here already are merged with the tier's; of a name in both, what is here counts.
        """
        row = self._db.execute("SELECT value FROM note WHERE key=?", (BEGUN_NOTE,)).fetchone()
        if row is not None and bytes(row[0]) == described.encode():
            return False
        with self._index.transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO unlisted SELECT ino FROM inode WHERE nlink>0 AND mode & 61440=?",
                (stat.S_IFDIR,),
            )
            self._db.execute(
                "INSERT OR REPLACE INTO note VALUES(?,?)", (BEGUN_NOTE, described.encode())
            )
        self._some_unlisted = True
        return True

    # asking

    @property
    def is_all_known(self) -> bool:
        """Whether nothing is left to find out."""
        return not (self._some_unlisted or self._some_unheaded)

    def is_unlisted(self, ino: int) -> bool:
        """Whether the tier may have names in a directory that are not known here."""
        return self._some_unlisted and self._has("SELECT 1 FROM unlisted WHERE ino=?", ino)

    def is_unheaded(self, ino: int) -> bool:
        """Whether an inode's attributes are what a listing says, and no more."""
        return self._some_unheaded and self._has("SELECT 1 FROM unheaded WHERE ino=?", ino)

    def unheaded_in(self, parent: int, after_cookie: int, limit: int) -> list[int]:
        """Of the entries that a scan would give (*limit* -1: all), those whose attributes are not known."""
        if not self._some_unheaded:
            return []
        rows = self._db.execute(
            "SELECT ino FROM (SELECT ino FROM dentry WHERE parent=? AND cookie>? ORDER BY cookie LIMIT ?)"
            " WHERE ino IN (SELECT ino FROM unheaded)",
            (parent, after_cookie, limit),
        )
        return [row[0] for row in rows]

    def has_entries(self, parent: int, after_cookie: int, count: int) -> bool:
        """Whether a scan would give that many entries."""
        query = "SELECT count(*) FROM (SELECT 1 FROM dentry WHERE parent=? AND cookie>? LIMIT ?)"
        found = self._db.execute(query, (parent, after_cookie, count)).fetchone()
        return bool(found[0] == count)

    def unlisted_below(self, ino: int) -> list[int]:
        """Directories at or below an inode of which not all names are known."""
        if not self._some_unlisted:
            return []
        query = _TREE + " SELECT ino FROM tree WHERE ino IN (SELECT ino FROM unlisted)"
        return [row[0] for row in self._db.execute(query, (ino,))]

    def unheaded_below(self, ino: int) -> list[int]:
        """Inodes at or below an inode whose attributes are not known."""
        if not self._some_unheaded:
            return []
        query = _TREE + " SELECT ino FROM tree WHERE ino IN (SELECT ino FROM unheaded)"
        return [row[0] for row in self._db.execute(query, (ino,))]

    def is_decided(self, entry_key: str) -> bool:
        """Whether the journal says what becomes of a name. *entry_key*: its key, without "/" at the end."""
        return self._pending.has_below(entry_key)

    def object_of(self, ino: int) -> DurableObject | None:
        """The object whose metadata tell an unheaded inode's attributes."""
        return next(iter(self._objects.of(ino)), None)

    # filling

    def insert(
        self, parent: int, entries: Sequence[Entry], skip: Callable[[bytes], bool]
    ) -> list[Entry]:
        """Make names of entries, in one transaction; those that *skip* names are not made.

        Entries that are hidden by another of their name are returned. Raises FsError ENOSPC.
        """
        index = self._index
        index.require_space()
        index.reserve(len(entries))
        hidden: list[Entry] = []
        owner, now_ns = self._owner(), self._now_ns()
        decides = self._pending.has_below("")
        directories = 0
        with index.transaction():
            for entry in entries:
                if skip(entry.name) or (decides and self.is_decided(entry.key.rstrip("/"))):
                    continue
                known = index.lookup(parent, entry.name)
                attr = listed_attr(entry, owner, now_ns)
                if known is None:
                    self._insert(parent, entry, attr)
                elif not entry.is_directory and stat.S_ISDIR(known.mode):
                    hidden.append(entry)
                    continue
                elif entry.is_directory and self._may_become_directory(known):
                    hidden.append(entry)
                    self._become_directory(known.ino, parent, entry, attr)
                else:
                    continue
                directories += entry.is_directory
            if directories:
                self._add_subdirectories(parent, directories)
        self._some_unheaded = True
        self._some_unlisted = self._some_unlisted or directories > 0
        return hidden

    def _owner(self) -> Owner:
        root = self._index.attr(ROOT_INO)
        assert root is not None
        return Owner(root.uid, root.gid)

    def _insert(self, parent: int, entry: Entry, attr: Attr) -> None:
        ino = self._index.next_ino()
        self._index.insert_dentry(parent, entry.name, ino)
        self._index.insert_inode(attr._replace(ino=ino), parent, None)
        self._note(ino, entry, attr.generation)

    def _note(self, ino: int, entry: Entry, generation: int) -> None:
        found = DurableObject(
            entry.key, ino, generation, entry.size, entry.etag, entry.modified_ns or self._now_ns()
        )
        self._objects.put(found)
        self._db.execute("INSERT OR IGNORE INTO unheaded VALUES(?)", (ino,))
        if entry.is_directory:
            self._db.execute("INSERT OR IGNORE INTO unlisted VALUES(?)", (ino,))

    def _may_become_directory(self, known: Attr) -> bool:
        """Whether it was taken for a file, and was shown to nobody yet."""
        return stat.S_ISREG(known.mode) and self.is_unheaded(known.ino)

    def _become_directory(self, ino: int, parent: int, entry: Entry, attr: Attr) -> None:
        self._objects.drop(entry.key[:-1])
        self._index.set_attr(attr._replace(ino=ino))
        self._index.set_parent(ino, parent)
        self._note(ino, entry, attr.generation)

    def _add_subdirectories(self, parent: int, count: int) -> None:
        attr = self._index.attr(parent)
        if attr is not None:
            self._index.add_links(parent, count, attr.ctime_ns)

    def complete(self, ino: int) -> None:
        """Every name of a directory is known."""
        with self._index.transaction():
            self._db.execute("DELETE FROM unlisted WHERE ino=?", (ino,))
        self._some_unlisted = self._has("SELECT 1 FROM unlisted LIMIT 1")

    def told(self, ino: int, info: ObjectInfo, target: bytes | None) -> None:
        """The metadata of an inode's object are known. *target*: it is a symlink."""
        index = self._index
        before = index.attr(ino)
        if before is None or not self.is_unheaded(ino):
            return
        attr = told_attr(before, info, target)
        digests = parse_metadata(info.meta, info.size).digests
        with index.transaction():
            index.set_attr(attr)
            if target is not None:
                index.set_target(ino, target)
            self._objects.put(
                DurableObject(
                    info.key, ino, attr.generation, info.size, info.etag, info.modified_ns
                )
            )
            if digests is not None and stat.S_ISREG(attr.mode):
                self._objects.set_digests(ino, attr.generation, digests)
            self._headed(ino)
        self._some_unheaded = self._has("SELECT 1 FROM unheaded LIMIT 1")

    def _headed(self, ino: int) -> None:
        self._db.execute("DELETE FROM unheaded WHERE ino=?", (ino,))

    def has_no_object(self, ino: int) -> bool:
        """The tier has no object for an unheaded inode: a directory is one without, a file is gone. Whether it is."""
        attr = self._index.attr(ino)
        if attr is None or not self.is_unheaded(ino):
            return False
        gone = not stat.S_ISDIR(attr.mode)
        with self._index.transaction():
            self._headed(ino)
            if gone:
                for parent, name in self._index.names(ino):
                    self._index.delete_dentry(parent, name)
                for found in self._objects.of(ino):
                    self._objects.drop(found.key)
                self._index.delete_inodes([ino])
        self._some_unheaded = self._has("SELECT 1 FROM unheaded LIMIT 1")
        return gone

    def keep_directory(self, ino: int) -> None:
        """Something in a directory is about to go: one that is there by its contents alone gets an object first."""
        prefix = self._paths.prefix(ino)
        found = self._objects.get(prefix) if prefix else None
        attr = self._index.attr(ino)
        if found is None or found.etag != NO_ETAG or attr is None or prefix is None:
            return
        if not self._pending.claims(prefix):
            with self._index.transaction():
                self._pending.put(prefix, attr)
            self._pending.tell()
