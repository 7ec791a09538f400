"""Multipart uploads under way, written down before they are begun, so that a crash leaves none unknown.

What it keeps true: a row exists from before the tier is asked for an upload until the tier has said that it is
completed or gone. A row without an upload id means: asked for, answer unknown; what the tier lists under that key and
did not list before may then be ours (`own_orphans`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from fs.index import Index
from fs.tiers.tier import PendingUpload

CLOCKS_APART_NS = 15 * 60 * 10**9  # more than S3 lets a client's clock differ


class Entry(NamedTuple):
    """One upload. *before*: ids that the tier listed under the key beforehand; None: it could not be asked."""

    id: int
    key: str
    ino: int
    generation: int
    whole: bytes
    part_bytes: int
    before: list[str] | None
    begun_ns: int
    upload_id: str | None


class Ledger:
    """Rows in *index*, each change a transaction of its own."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._db = index.db

    def entries(self) -> list[Entry]:
        """Every upload that is not known to be over, oldest first."""
        rows = self._db.execute(
            "SELECT id,key,ino,generation,whole,part_bytes,before,begun_ns,upload_id"
            " FROM upload ORDER BY id"
        )
        return [Entry._make((*row[:6], json.loads(row[6]), *row[7:])) for row in rows]

    def begin(
        self,
        key: str,
        ino: int,
        generation: int,
        whole: bytes,
        part_bytes: int,
        before: list[str] | None,
        now_ns: int,
    ) -> int:
        """An upload is about to be asked for: the row's id."""
        with self._index.transaction():
            done = self._db.execute(
                "INSERT INTO upload(key,ino,generation,whole,part_bytes,before,begun_ns)"
                " VALUES(?,?,?,?,?,?,?)",
                (key, ino, generation, whole, part_bytes, json.dumps(before), now_ns),
            )
        assert done.lastrowid is not None
        return done.lastrowid

    def named(self, entry_id: int, upload_id: str) -> None:
        """The tier has given it an id."""
        with self._index.transaction():
            self._db.execute("UPDATE upload SET upload_id=? WHERE id=?", (upload_id, entry_id))

    def sent(self, entry_id: int, number: int, etag: str) -> None:
        """The tier has a part."""
        with self._index.transaction():
            self._db.execute("INSERT OR REPLACE INTO part VALUES(?,?,?)", (entry_id, number, etag))

    def parts(self, entry_id: int) -> dict[int, str]:
        """ETags of the parts that the tier has confirmed, by number."""
        rows = self._db.execute("SELECT number,etag FROM part WHERE upload=?", (entry_id,))
        return dict(rows.fetchall())

    def over(self, entry_id: int) -> None:
        """It is completed, or gone. Call inside a transaction."""
        self._db.execute("DELETE FROM part WHERE upload=?", (entry_id,))
        self._db.execute("DELETE FROM upload WHERE id=?", (entry_id,))


def own_orphans(entry: Entry, listed: Iterable[PendingUpload]) -> list[str]:
    """Ids of the uploads that can only be the one which *entry* asked for. Empty when in doubt.

    Another node may upload to the same key: what was there before, is older than the request, or is one of several
    candidates is not ours to abort.
    """
    if entry.before is None:
        return []
    candidates = [
        found.upload_id
        for found in listed
        if found.key == entry.key
        and found.upload_id not in entry.before
        and found.started_ns is not None
        and found.started_ns >= entry.begun_ns - CLOCKS_APART_NS
    ]
    return candidates if len(candidates) == 1 else []
