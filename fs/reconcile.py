"""At the start with a durable tier: the journal made to say what is not durable yet, whatever happened before.

What it keeps true:
- Afterwards every file, directory and symlink whose current generation no object holds has a row. Others are without
  one only when bytes were written past a dead mount, or after a mount without the tier.
- A mount without the tier writes nothing down, so what it may have renamed, removed or changed is found by comparing
  every name with every object (`leave_untracked` leaves word that this is due).
- An arena whose files lie in one tier is not used with another: objects there would be believed that are not there.
"""

from __future__ import annotations

import stat

from fs.errors import CkptfsError
from fs.index import Index
from fs.journal import Kind, is_stored
from fs.store import Store
from fs.types import ROOT_INO

TIER_NOTE, UNTRACKED_NOTE = "tier", "untracked"


class WrongTier(CkptfsError):
    """The arena's files are in another durable tier."""


def known_tier(index: Index) -> str | None:
    """The durable tier that this index's objects are in, as `Tier.describe` named it; None: in none."""
    row = index.db.execute("SELECT value FROM note WHERE key=?", (TIER_NOTE,)).fetchone()
    return None if row is None else bytes(row[0]).decode()


def bytes_elsewhere(index: Index) -> int:
    """How many files' bytes are in the durable tier only."""
    query = "SELECT count(*) FROM inode WHERE resident=0 AND nlink>0"
    return int(index.db.execute(query).fetchone()[0])


def require_known(index: Index, described: str | None) -> None:
    """Raise WrongTier when files would not be readable with the tier *described* (None: with none)."""
    known = known_tier(index)
    if known is None or known == described:
        return
    away = bytes_elsewhere(index)
    listed = index.db.execute("SELECT 1 FROM unlisted LIMIT 1").fetchone() is None
    if away or not listed:
        what = f"the bytes of {away} files" if away else "directories that were not read yet"
        raise WrongTier(
            f"this arena has {what} in {known} only: mount it with --durable {known}, or begin anew "
            "with --set-aside"
        )


def leave_untracked(index: Index) -> None:
    """This mount has no durable tier. Raises WrongTier when it could not read everything."""
    require_known(index, None)
    if known_tier(index) is not None:
        with index.transaction():
            index.db.execute("INSERT OR REPLACE INTO note VALUES(?,?)", (UNTRACKED_NOTE, b""))


def adopt(index: Index, described: str) -> bool:
    """Note the tier; whether it is another than before, whose objects are then forgotten. Raises WrongTier."""
    require_known(index, described)
    if known_tier(index) == described:
        return False
    with index.transaction():
        for table in ("object", "journal", "jump", "upload", "part", "digest"):
            index.db.execute(f"DELETE FROM {table}")
        index.db.execute("INSERT OR REPLACE INTO note VALUES(?,?)", (TIER_NOTE, described.encode()))
    return True


def reconcile(store: Store) -> int:
    """Write the rows that are missing: how many files they are for."""
    index, journal = store.index, store.journal
    with index.transaction():
        _first_generations(store)
        _compare_all(store)
        index.db.execute(
            "UPDATE journal SET generation=(SELECT generation FROM inode WHERE ino=journal.ino)"
            " WHERE kind=? AND committing=0 AND EXISTS(SELECT 1 FROM inode WHERE ino=journal.ino"
            " AND nlink>0 AND generation!=journal.generation)",
            (Kind.PUT,),
        )
        missing = index.db.execute(
            "SELECT i.ino FROM inode i WHERE i.nlink>0 AND i.ino!=? AND i.resident=1"
            " AND (i.mode & 61440 != ? OR i.generation>0)"
            " AND NOT EXISTS(SELECT 1 FROM journal j WHERE j.ino=i.ino)"
            " AND NOT EXISTS(SELECT 1 FROM object o WHERE o.ino=i.ino AND o.generation=i.generation)"
            " ORDER BY i.mtime_ns,i.ino",
            (ROOT_INO, stat.S_IFREG),
        ).fetchall()
        for (ino,) in missing:
            attr = index.attr(ino)
            if attr is None or not is_stored(attr.mode):
                continue
            suffix = "/" if stat.S_ISDIR(attr.mode) else ""
            for key in store.paths.keys(ino):
                journal.put(key + suffix, attr)
    return len(missing)


def _compare_all(store: Store) -> None:
    """After a mount that wrote nothing down: the journal anew, from the names that are there and the objects."""
    index, journal, objects = store.index, store.journal, store.objects
    if not index.db.execute("DELETE FROM note WHERE key=?", (UNTRACKED_NOTE,)).rowcount:
        return
    index.db.execute("DELETE FROM journal WHERE committing=0")
    index.db.execute("DELETE FROM jump")
    inos = index.db.execute(
        "SELECT ino FROM inode WHERE nlink>0 AND ino!=? ORDER BY mtime_ns,ino", (ROOT_INO,)
    )
    wanted = set()
    for (ino,) in inos.fetchall():
        attr = index.attr(ino)
        if attr is None or not is_stored(attr.mode):
            continue
        suffix = "/" if stat.S_ISDIR(attr.mode) else ""
        for key in (key + suffix for key in store.paths.keys(ino)):
            wanted.add(key)
            found = objects.get(key)
            if found is None or (found.ino, found.generation) != (ino, attr.generation):
                journal.put(key, attr)
        journal.meta(attr)  # where nothing is to be uploaded: mode, owner or times may be others
    for (key,) in index.db.execute("SELECT key FROM object ORDER BY key DESC").fetchall():
        if key not in wanted:
            journal.removed(key)


def _first_generations(store: Store) -> None:
    """Files made by whoever never came to close them have their first generation now."""
    made = store.index.db.execute(
        "SELECT ino FROM inode WHERE generation=0 AND nlink>0 AND mode & 61440 = ?", (stat.S_IFREG,)
    ).fetchall()
    for (ino,) in made:
        attr = store.index.attr(ino)
        if attr is not None and not store.content.has_writers(ino):
            store.index.set_attr(attr._replace(generation=1))
