"""What this node knows of the durable tier's objects, and of the digests of its own files.

What it keeps true:
- A row says that the tier holds, under a key, the bytes of one generation of one inode. It is written after the
  tier has said so, and removed before the tier is asked to delete.
- Digests belong to a generation: those of another are as good as none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fs.checksums import Digests
from fs.index import Index


class DurableObject(NamedTuple):
    """One row. *at_ns*: when it was committed (or found), ns since the epoch."""

    key: str
    ino: int
    generation: int
    size: int
    etag: str
    at_ns: int


class ObjectTable:
    """Rows in *index*; transactions are the caller's."""

    def __init__(self, index: Index) -> None:
        self._db = index.db

    def get(self, key: str) -> DurableObject | None:
        """The object under a key."""
        row = self._db.execute("SELECT * FROM object WHERE key=?", (key,)).fetchone()
        return None if row is None else DurableObject._make(row)

    def of(self, ino: int) -> list[DurableObject]:
        """Every object that holds some generation of an inode."""
        rows = self._db.execute("SELECT * FROM object WHERE ino=?", (ino,))
        return [DurableObject._make(row) for row in rows]

    def below(self, prefix: str) -> Iterator[DurableObject]:
        """Objects whose keys begin with *prefix*, which ends in "/", in order of their keys."""
        end = prefix[:-1] + "0"  # the character after "/"
        query = "SELECT * FROM object WHERE key>=? AND key<? ORDER BY key"
        return map(DurableObject._make, self._db.execute(query, (prefix, end)))

    def put(self, found: DurableObject) -> None:
        """Note an object, in place of what was known under its key."""
        self._db.execute("INSERT OR REPLACE INTO object VALUES(?,?,?,?,?,?)", found)

    def drop(self, key: str) -> None:
        """Forget an object."""
        self._db.execute("DELETE FROM object WHERE key=?", (key,))

    def is_durable(self, ino: int, generation: int) -> bool:
        """Whether some object holds this generation."""
        query = "SELECT 1 FROM object WHERE ino=? AND generation=? LIMIT 1"
        return self._db.execute(query, (ino, generation)).fetchone() is not None

    def digests(self, ino: int, generation: int) -> Digests | None:
        """The digests of this generation, if they are known."""
        query = "SELECT size,whole,block_bytes,blocks FROM digest WHERE ino=? AND generation=?"
        row = self._db.execute(query, (ino, generation)).fetchone()
        return None if row is None else Digests._make(row)

    def set_digests(self, ino: int, generation: int, digests: Digests) -> None:
        """Note the digests of a generation, in place of an earlier one's."""
        self._db.execute(
            "INSERT OR REPLACE INTO digest VALUES(?,?,?,?,?,?)", (ino, generation, *digests)
        )
