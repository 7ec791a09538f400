"""What a mount that is over has left undone in the durable tier, read from its index.

What it keeps true: asked only while no supervisor lives and the lock is held, so nothing changes meanwhile. What was
written and never came into the journal (a mount that died) counts as well.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from fs.errors import CkptfsError
from fs.index import Index
from fs.journal import Journal, Kind, Row, State
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.reconcile import known_tier
from mount.rundir import RunDir

_SQL_UNRECORDED = f"""
SELECT i.ino,i.size,i.mtime_ns,i.generation FROM inode i
WHERE i.nlink>0 AND i.resident=1 AND i.mode & {0o170000} = {stat.S_IFREG}
  AND NOT EXISTS(SELECT 1 FROM journal j WHERE j.ino=i.ino)"""
_WHAT = {
    Kind.PUT: "it is not uploaded yet",
    Kind.COPY: "its new name is not there yet",
    Kind.DELETE: "its removal is not done yet",
    Kind.META: "its attributes are not there yet",
}


class Left(NamedTuple):
    """One thing. *reason*: what is missing of it."""

    key: str
    size: int
    since_ns: int
    reason: str


class Leftover(NamedTuple):
    """What the tier lacks: of what policy wants, and of what it does not want. *tier*: where it is to go."""

    tier: str
    unsaved: list[Left]
    skipped: list[Left]


def leftover(run: RunDir) -> Leftover | None:
    """What is left; None without a durable tier. Raises IndexDamaged; CkptfsError while a supervisor lives."""
    if not run.has_data():
        return None
    lock_fd = run.lock()
    if lock_fd is None:
        raise CkptfsError(f"{run.name}: mounted again meanwhile")
    try:
        index = Index(run.index / "index.sqlite", check=False)
        try:
            return _read(run, index)
        finally:
            index.close()
    finally:
        os.close(lock_fd)


def _read(run: RunDir, index: Index) -> Leftover | None:
    tier = known_tier(index)
    if tier is None:
        return None
    index.index_names()
    objects, paths = ObjectTable(index), Paths(index)
    unsaved: dict[str, Left] = {}
    skipped: dict[str, Left] = {}
    for row in Journal(index, objects, paths, lambda: 0).all_rows():
        kept = skipped if row.state == State.SKIPPED else unsaved
        since_ns = kept[row.key].since_ns if row.key in kept else row.at_ns
        kept[row.key] = Left(row.key, _size(index, row), since_ns, _WHAT[Kind(row.kind)])
    for ino, size, mtime_ns, generation in index.db.execute(_SQL_UNRECORDED).fetchall():
        if objects.is_durable(ino, generation) and not _written_since(run, ino, size, mtime_ns):
            continue
        for key in paths.keys(ino):
            unsaved[key] = Left(key, size, mtime_ns, "it was open when the mount ended")
    return Leftover(tier, list(unsaved.values()), list(skipped.values()))


def _size(index: Index, row: Row) -> int:
    attr = index.attr(row.ino) if row.ino and row.kind == Kind.PUT else None
    return attr.size if attr is not None and stat.S_ISREG(attr.mode) else 0


def _written_since(run: RunDir, ino: int, size: int, mtime_ns: int) -> bool:
    try:
        status = os.stat(run.arena / "data" / str(ino))
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) != (size, mtime_ns)
