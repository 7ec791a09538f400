"""What must be made durable, in which order: the list that writeback works off.

What it keeps true:
- Rows are written in the transaction of the change that they stand for, so a crash leaves both or neither. Every file
  whose current generation no object holds has a row that will put it there, or one that policy skips.
- Done in order within a tree (the first part of the key), the rows lead from one state that the namespace had to
  another: what is removed before it was ever uploaded leaves the list, what is renamed before goes under its final name
  only, what is rewritten before is uploaded once, as it is last.
- Bytes that a row needs stay: an inode without links is kept as long as a row names it (`keeps`). A small file
  is not rewritten under its row (`overwriting`): a marker must not name what comes after it in the list.
- A row whose effect may be visible already (`committing`) is never taken back; what undoes it comes behind it.
- Bytes that are in the tier only are not lost by moving names: a copy is made before what it is made from goes or is
  replaced. Where a name that was moved is moved on, and its old place is taken by then, the name in between is shown,
  too, as it was (`FIXED`): there is no other place for its bytes.
- Something that was never uploaded is removed or renamed: the states in which it was there can no longer be
  shown. From its position to the end of the list the rows lead to one later state (a jump, `settle_jumps`): what was
  rewritten since appears only as it is last, and deletions wait for everything else. So no marker appears whose data
  were taken back.

The big exception, and why it is none: a large file that is rewritten in place keeps its first position with its last
bytes. There is no memory for both, and a marker further down the list finds what it names.
"""

from __future__ import annotations

import enum
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fs.index import Index
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.types import Attr

KEEP_REPLACED_BYTES = 16 << 20  # a file replaced by a rename is still uploaded up to this size
BEGUN, FIXED = 1, 2  # committing: it may be visible; it is not yet, and must become so
_COLUMNS = "seq,tree,kind,key,ino,generation,source,state,committing,forced,at_ns"


class Kind(enum.IntEnum):
    """What a row asks of the tier."""

    PUT = 1
    COPY = 2
    DELETE = 3
    META = 4


class State(enum.IntEnum):
    """What policy says of a row."""

    LIVE = 0
    SKIPPED = 1


class Row(NamedTuple):
    """One entry. *source*: the key that a COPY is made from. *at_ns*: since when it is not durable."""

    seq: int
    tree: str
    kind: int
    key: str
    ino: int
    generation: int
    source: str | None
    state: int
    committing: int
    forced: int
    at_ns: int


def tree_of(key: str) -> str:
    """The top-level tree that a key is in; "" for files that lie at the top themselves."""
    head, slash, _ = key.partition("/")
    return head if slash else ""


def is_stored(mode: int) -> bool:
    """Whether nodes of this type have objects: pipes, sockets and devices have none."""
    return stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


class Journal:
    """Rows in *index*. Methods that change something are called inside a transaction; *now_ns* is a clock."""

    def __init__(
        self, index: Index, objects: ObjectTable, paths: Paths, now_ns: Callable[[], int]
    ) -> None:
        self._index = index
        self._db = index.db
        self._objects = objects
        self._paths = paths
        self._now_ns = now_ns
        self._unpinned: set[int] = set()
        self.listeners: list[Callable[[], None]] = []

    # reading

    def _rows(self, where: str, *values: object) -> list[Row]:
        query = f"SELECT {_COLUMNS} FROM journal WHERE {where}"
        return [Row._make(row) for row in self._db.execute(query, values)]

    def row(self, seq: int) -> Row | None:
        """One row, as it is now."""
        rows = self._rows("seq=?", seq)
        return rows[0] if rows else None

    def at(self, key: str) -> list[Row]:
        """Rows for a key, in order."""
        return self._rows("key=? ORDER BY seq", key)

    def of(self, ino: int) -> list[Row]:
        """Rows that need an inode, in order."""
        return self._rows("ino=? ORDER BY seq", ino)

    def claims(self, key: str) -> bool:
        """Whether the list says what becomes of a key, so that the tier does not."""
        return (
            self._db.execute("SELECT 1 FROM journal WHERE key=? LIMIT 1", (key,)).fetchone()
            is not None
        )

    def keeps(self, ino: int) -> bool:
        """Whether a row still needs the bytes of an inode."""
        query = "SELECT 1 FROM journal WHERE ino=? AND kind=? LIMIT 1"
        return self._db.execute(query, (ino, Kind.PUT)).fetchone() is not None

    def is_clean(self, ino: int) -> bool:
        """Whether no row is about an inode."""
        query = "SELECT 1 FROM journal WHERE ino=? LIMIT 1"
        return self._db.execute(query, (ino,)).fetchone() is None

    def trees(self) -> list[str]:
        """Trees that have rows which policy does not skip."""
        query = "SELECT DISTINCT tree FROM journal WHERE state=?"
        return [row[0] for row in self._db.execute(query, (State.LIVE,))]

    def in_tree(self, tree: str, after_seq: int, limit: int) -> list[Row]:
        """Rows of a tree that policy does not skip, in order, from behind *after_seq*."""
        return self._rows(
            "tree=? AND seq>? AND state=? ORDER BY seq LIMIT ?", tree, after_seq, State.LIVE, limit
        )

    def all_rows(self) -> Iterator[Row]:
        """Everything, in order."""
        return map(Row._make, self._db.execute(f"SELECT {_COLUMNS} FROM journal ORDER BY seq"))

    def below(self, prefix: str) -> list[Row]:
        """Rows for keys that begin with *prefix* ("" or ending in "/"), in order."""
        if not prefix:
            return list(self.all_rows())
        return self._rows("key>=? AND key<? ORDER BY seq", prefix, prefix[:-1] + "0")

    def page(self, prefix: str, after_seq: int, limit: int) -> list[Row]:
        """Rows at or below a key ("": all), in order, from behind *after_seq*."""
        if not prefix:
            return self._rows("seq>? ORDER BY seq LIMIT ?", after_seq, limit)
        where = "seq>? AND (key=? OR (key>=? AND key<?)) ORDER BY seq LIMIT ?"
        return self._rows(where, after_seq, *_range(prefix), limit)

    def totals(self) -> tuple[int, int, int | None]:
        """(rows, bytes of the files in them, at_ns of the oldest), without those that policy skips."""
        row = self._db.execute(
            "SELECT count(*),coalesce(sum(CASE WHEN j.kind=? THEN i.size ELSE 0 END),0),min(j.at_ns)"
            " FROM journal j LEFT JOIN inode i ON i.ino=j.ino WHERE j.state=?",
            (Kind.PUT, State.LIVE),
        ).fetchone()
        return int(row[0]), int(row[1]), row[2]

    def waits_for_copy(self, key: str, seq: int) -> bool:
        """Whether an earlier row still needs what lies under *key* now."""
        query = "SELECT 1 FROM journal WHERE kind=? AND source=? AND seq<? LIMIT 1"
        return self._db.execute(query, (Kind.COPY, key, seq)).fetchone() is not None

    def precedes(self, key: str, seq: int) -> bool:
        """Whether an earlier row is still to change what lies under *key*."""
        query = "SELECT 1 FROM journal WHERE key=? AND seq<? AND state=? LIMIT 1"
        return self._db.execute(query, (key, seq, State.LIVE)).fetchone() is not None

    # writing: rows

    def _insert(self, row: Row) -> None:
        values = list(row)
        if row.seq == 0:
            values[0] = None
        self._db.execute("INSERT INTO journal VALUES(?,?,?,?,?,?,?,?,?,?,?)", values)

    def _append(
        self,
        kind: Kind,
        key: str,
        ino: int,
        generation: int,
        source: str | None = None,
        *,
        seq: int = 0,
        like: Row | None = None,
    ) -> None:
        at_ns = self._now_ns() if like is None else like.at_ns
        forced = 0 if like is None else like.forced
        self._insert(
            Row(seq, tree_of(key), kind, key, ino, generation, source, State.LIVE, 0, forced, at_ns)
        )

    def _remove(self, row: Row) -> None:
        self._db.execute("DELETE FROM journal WHERE seq=?", (row.seq,))
        self._let_go(row.ino)

    def _let_go(self, ino: int) -> None:
        if ino:
            self._unpinned.add(ino)

    def take_unpinned(self) -> list[int]:
        """Inodes that rows no longer need; to be freed if they have neither links nor opens."""
        inos, self._unpinned = self._unpinned, set()
        return [ino for ino in inos if not self.keeps(ino)]

    def tell(self) -> None:
        """After a transaction: there may be something to do."""
        for listener in self.listeners:
            listener()

    # writing: what happened to the namespace

    def put(self, key: str, attr: Attr) -> None:
        """A file, symlink or directory has new bytes, or is new, under this key."""
        rows = self.at(key)
        last = rows[-1] if rows else None
        if last is not None and last.kind == Kind.META and not last.committing:
            self._remove(last)
            last = rows[-2] if len(rows) > 1 else None
        if last is None or last.committing or last.kind == Kind.DELETE:
            self._append(Kind.PUT, key, attr.ino, attr.generation)
        elif last.kind == Kind.COPY:
            # in its place: the deletion of what it was copied from comes behind it
            self._db.execute(
                "UPDATE journal SET kind=?,ino=?,generation=?,source=NULL,state=? WHERE seq=?",
                (Kind.PUT, attr.ino, attr.generation, State.LIVE, last.seq),
            )
        elif last.ino == attr.ino and last.state == State.LIVE:
            self._db.execute(
                "UPDATE journal SET generation=? WHERE seq=?", (attr.generation, last.seq)
            )
        elif last.ino == attr.ino:
            self._remove(last)
            self._append(Kind.PUT, key, attr.ino, attr.generation, like=last)
        else:
            self._append(Kind.PUT, key, attr.ino, attr.generation)

    def ended(self, attr: Attr) -> None:
        """A generation of a file's bytes has ended: all its names want it."""
        for key in self._paths.keys(attr.ino):
            self.put(key, attr)

    def meta(self, attr: Attr) -> None:
        """Mode, owner or times have changed, the bytes have not."""
        suffix = "/" if stat.S_ISDIR(attr.mode) else ""
        for name in self._paths.keys(attr.ino):
            key = name + suffix
            rows = self.at(key)
            last = rows[-1] if rows else None
            if last is not None and not last.committing and last.kind != Kind.DELETE:
                continue  # it will carry what the attributes are then
            if last is None and self._objects.get(key) is None:
                continue
            if last is not None and last.kind == Kind.DELETE:
                continue
            self._append(Kind.META, key, attr.ino, attr.generation)

    def removed(self, key: str) -> None:
        """A name is gone: what is not visible yet under it is taken back."""
        for row in self.at(key):
            if row.committing or row.kind == Kind.DELETE:
                continue
            if self._is_only_way(row):
                self._fix(row)
                continue
            self._take_back(row)
            if row.kind != Kind.META:
                self._jump(row)
        self._delete(key)

    # copies of what is in the tier only

    def _is_overtaken(self, row: Row) -> bool:
        """Whether what a copy is made from is another's by the end of the list."""
        return row.source is not None and any(
            later.seq > row.seq and later.kind != Kind.DELETE for later in self.at(row.source)
        )

    def _is_only_way(self, row: Row) -> bool:
        """Whether another name of the inode gets its bytes from a copy that nobody else wants any more."""
        attr = self._index.attr(row.ino) if row.kind == Kind.COPY else None
        if attr is None or attr.resident or not stat.S_ISREG(attr.mode):
            return False
        return any(other.kind == Kind.PUT for other in self.of(row.ino))

    def _fix(self, row: Row) -> None:
        """Let a copy be made whatever becomes of its name."""
        self._db.execute("UPDATE journal SET committing=? WHERE seq=?", (FIXED, row.seq))

    def _take_back(self, row: Row) -> None:
        """Nobody wants a row's effect; nor that of the copy it was to be made from."""
        self._remove(row)
        if row.source is None or self._is_copied(row.source):
            return
        for earlier in self.at(row.source):
            if earlier.committing == FIXED and not self._is_only_way(earlier):
                self._take_back(earlier)

    def _is_copied(self, key: str) -> bool:
        query = "SELECT 1 FROM journal WHERE kind=? AND source=? LIMIT 1"
        return self._db.execute(query, (Kind.COPY, key)).fetchone() is not None

    def _is_back(self, row: Row, new: str) -> bool:
        """Whether a name is moved back to where its bytes still lie: then they stay. Says so in the list."""
        if row.source != new:
            return False
        self._db.execute("DELETE FROM journal WHERE key=? AND kind=?", (new, Kind.DELETE))
        self._db.execute(
            "UPDATE journal SET committing=0 WHERE key=? AND committing=?", (new, FIXED)
        )
        if not self.claims(new):
            self._append(Kind.META, new, row.ino, row.generation, like=row)
        return True

    def _jump(self, gone: Row) -> None:
        """What is behind a row that has left its position leads to the state at the end of the list."""
        newest = self._db.execute(
            "SELECT max(seq) FROM journal WHERE tree=? AND seq>?", (gone.tree, gone.seq)
        ).fetchone()[0]
        if newest is None:
            return
        widened = self._db.execute(
            "UPDATE jump SET upto_seq=max(upto_seq,?) WHERE tree=? AND after_seq<=? AND upto_seq>=?",
            (newest, gone.tree, gone.seq, gone.seq),
        )
        if widened.rowcount == 0:
            self._db.execute("INSERT INTO jump VALUES(?,?,?)", (gone.tree, gone.seq, newest))

    def settle_jumps(self, tree: str, rows: list[Row]) -> list[Row]:
        """*rows* of a tree, in order, without those that a jump leaves out or makes wait."""
        jumps = self._db.execute(
            "SELECT after_seq,upto_seq FROM jump WHERE tree=?", (tree,)
        ).fetchall()
        if not jumps:
            return rows
        kept = []
        for row in rows:
            around = [jump for jump in jumps if jump[0] < row.seq <= jump[1]]
            if not around or row.committing:
                kept.append(row)
            elif row.kind == Kind.DELETE:
                if self._is_replaced(row, max(jump[1] for jump in around)):
                    with self._index.transaction():
                        self._remove(row)
                elif not any(self._has_others(tree, *jump) for jump in around):
                    kept.append(row)
            elif row.kind == Kind.PUT and self._is_superseded(row, max(jump[1] for jump in around)):
                with self._index.transaction():
                    self._remove(row)
            else:
                kept.append(row)
        for after_seq, upto_seq in jumps:
            if not self._db.execute(
                "SELECT 1 FROM journal WHERE tree=? AND seq>? AND seq<=? LIMIT 1",
                (tree, after_seq, upto_seq),
            ).fetchone():
                self._db.execute(
                    "DELETE FROM jump WHERE tree=? AND after_seq=? AND upto_seq=?",
                    (tree, after_seq, upto_seq),
                )
        return kept

    def _has_others(self, tree: str, after_seq: int, upto_seq: int) -> bool:
        query = "SELECT 1 FROM journal WHERE tree=? AND seq>? AND seq<=? AND kind!=? AND state=? LIMIT 1"
        values = (tree, after_seq, upto_seq, Kind.DELETE, State.LIVE)
        return self._db.execute(query, values).fetchone() is not None

    def _is_replaced(self, row: Row, upto_seq: int) -> bool:
        """Whether what is to be deleted has a successor that is not to be deleted."""
        query = (
            "SELECT 1 FROM journal WHERE key=? AND seq>? AND seq<=? AND kind IN (?,?) AND state=?"
        )
        values = (row.key, row.seq, upto_seq, Kind.PUT, Kind.COPY, State.LIVE)
        return self._db.execute(query, values).fetchone() is not None

    def _is_superseded(self, row: Row, upto_seq: int) -> bool:
        query = "SELECT 1 FROM journal WHERE key=? AND seq>? AND seq<=? AND kind IN (?,?) LIMIT 1"
        values = (row.key, row.seq, upto_seq, Kind.PUT, Kind.COPY)
        return self._db.execute(query, values).fetchone() is not None

    def _delete(self, key: str) -> None:
        rows = self.at(key)
        if rows and rows[-1].kind == Kind.DELETE:
            return
        if self._objects.get(key) is not None or any(row.committing for row in rows):
            self._append(Kind.DELETE, key, 0, 0)

    def replaced(self, key: str) -> Row | None:
        """Another file takes this name. A row whose place in the order the new one must take, or None."""
        rows = [row for row in self.at(key) if not row.committing and row.kind != Kind.DELETE]
        position = None
        for row in rows:
            if row.kind == Kind.PUT and row.state == State.LIVE and self._is_kept(row):
                continue
            if self._is_only_way(row):
                self._fix(row)
                continue
            if position is None and row.kind != Kind.META and row.state == State.LIVE:
                position = row
            self._take_back(row)
        return position

    def _is_kept(self, row: Row) -> bool:
        """Whether a replaced file is to be uploaded still: something behind it may rely on it."""
        attr = self._index.attr(row.ino)
        if attr is None or attr.size > KEEP_REPLACED_BYTES:
            return False
        query = "SELECT 1 FROM journal WHERE tree=? AND seq>? AND state=? LIMIT 1"
        behind = self._db.execute(query, (row.tree, row.seq, State.LIVE)).fetchone()
        return behind is not None

    def renamed(self, old: str, new: str, *, place: Row | None = None) -> None:
        """A file or symlink has another name. *place*: the row whose position it takes (`replaced`)."""
        self._rename_keys([(old, new)], place)

    def renamed_below(self, old: str, new: str) -> None:
        """A directory has another name; *old* and *new* end in "/"."""
        self._rename_keys([(key, new + key[len(old) :]) for key in self.keys_below(old)], None)

    def keys_below(self, prefix: str) -> set[str]:
        """Every key with that prefix that the tier has or is to have."""
        found = {found.key for found in self._objects.below(prefix)}
        return found | {row.key for row in self.below(prefix)}

    def _rename_keys(self, pairs: Iterable[tuple[str, str]], place: Row | None) -> None:
        moves = dict(pairs)
        taken = set(moves.values())
        pending: list[Row] = []
        copies: list[tuple[int, str, int, int]] = []
        deletions: list[tuple[int, str]] = []
        for old in moves:
            rows = self.at(old)
            # of replaced files that are still to be uploaded: under the old name, they were never under the new one
            for row in rows:
                if row.committing or row.kind != Kind.COPY:
                    continue
                if self._is_overtaken(row) or row.source in taken - {moves[old]}:
                    self._fix(row)
            rows = self.at(old)
            movable = [row for row in rows if not row.committing and row.kind != Kind.DELETE]
            visible = self._objects.get(old)
            begun = [row for row in rows if row.committing and row.kind != Kind.DELETE]
            moved = None
            for row in movable:
                self._remove(row)
                if row.kind in (Kind.PUT, Kind.COPY):
                    moved = row
                    self._jump(row)
            if moved is not None:
                pending.append(moved)
            elif rows and rows[-1].kind == Kind.DELETE:
                pass  # the name is gone already
            elif begun:
                copies.append((begun[-1].at_ns, old, begun[-1].ino, begun[-1].generation))
            elif visible is not None:
                copies.append((visible.at_ns, old, visible.ino, visible.generation))
            if begun or visible is not None:
                deletions.append((visible.at_ns if visible else begun[-1].at_ns, old))
        pending = [row for row in pending if not self._is_back(row, moves[row.key])]
        sources = {row.source for row in pending if row.source is not None}
        for at_ns, old, ino, generation in sorted(copies):
            del at_ns
            seq = self._taken(place, moves[old], old)
            self._append(Kind.COPY, moves[old], ino, generation, old, seq=seq)
        for row in sorted(pending):
            seq = self._taken(place, moves[row.key], row.source)
            key = moves[row.key]
            self._append(
                Kind(row.kind), key, row.ino, row.generation, row.source, seq=seq, like=row
            )
        for source in sorted(sources):
            self._behind(source)
        for _, old in sorted(deletions, reverse=True):
            self._delete(old)

    def _taken(self, place: Row | None, key: str, source: str | None) -> int:
        """The position of what is replaced; 0 where what a copy is made from is not there by then."""
        if place is None or place.key != key:
            return 0
        rows = [] if source is None else self.at(source)
        later = any(row.seq > place.seq and row.kind != Kind.DELETE for row in rows)
        return 0 if later else place.seq

    def _behind(self, key: str) -> None:
        """The deletion of what a copy is made from stays behind the copy."""
        rows = self.at(key)
        if rows and rows[-1].kind == Kind.DELETE and not rows[-1].committing:
            self._db.execute("DELETE FROM journal WHERE seq=?", (rows[-1].seq,))
            self._append(Kind.DELETE, key, 0, 0, like=rows[-1])

    def repoint(self, row: Row, ino: int) -> None:
        """Let a row upload another inode: the copy of its bytes as they are now."""
        self._db.execute("UPDATE journal SET ino=? WHERE seq=?", (ino, row.seq))

    def to_snapshot(self, attr: Attr) -> list[Row]:
        """Rows of a file about to be rewritten whose bytes something behind them may rely on."""
        return [
            row
            for row in self.of(attr.ino)
            if row.kind == Kind.PUT and row.state == State.LIVE and self._is_kept(row)
        ]

    # writing: what writeback did

    def begin_commit(self, row: Row) -> None:
        """Its effect may be visible from now on."""
        self._db.execute("UPDATE journal SET committing=1 WHERE seq=?", (row.seq,))
        if row.kind == Kind.DELETE:
            self._objects.drop(row.key)

    def uncommit(self, row: Row) -> None:
        """It turned out not to be visible. A row behind it for the same key makes it superfluous."""
        behind = [later for later in self.at(row.key) if later.seq > row.seq]
        if row.kind == Kind.COPY and (self._is_copied(row.key) or self._is_only_way(row)):
            self._fix(row)
            return
        if any(later.kind != Kind.META for later in behind):
            self._remove(row)
            return
        self._db.execute("UPDATE journal SET committing=0 WHERE seq=?", (row.seq,))

    def as_put(self, row: Row) -> None:
        """Let a row upload the bytes in memory instead of copying."""
        self._db.execute(
            "UPDATE journal SET kind=?,source=NULL,committing=0 WHERE seq=?", (Kind.PUT, row.seq)
        )

    def committed(self, row: Row) -> None:
        """Its effect is visible."""
        self._remove(row)

    def skip(self, rows: Iterable[Row], state: State) -> None:
        """Policy skips these rows, or no longer does."""
        self._db.executemany(
            "UPDATE journal SET state=? WHERE seq=?", [(state, row.seq) for row in rows]
        )

    def force(self, prefix: str) -> int:
        """Somebody asked for it: policy does not hold rows at or below a key ("": all). How many there are."""
        query = "UPDATE journal SET forced=1,state=?"
        if not prefix:
            return self._db.execute(query, (State.LIVE,)).rowcount
        at, low, high = _range(prefix)
        query += " WHERE key=? OR (key>=? AND key<?)"
        return self._db.execute(query, (State.LIVE, at, low, high)).rowcount

    def has_below(self, prefix: str) -> bool:
        """Whether there is a row at or below a key ("": anywhere), skipped or not."""
        query = "SELECT 1 FROM journal"
        if not prefix:
            return self._db.execute(query + " LIMIT 1").fetchone() is not None
        query += " WHERE key=? OR (key>=? AND key<?) LIMIT 1"
        return self._db.execute(query, _range(prefix)).fetchone() is not None


def _range(prefix: str) -> tuple[str, str, str]:
    at = prefix.rstrip("/")
    return at, at + "/", at + "0"
