"""The index: SQLite in RAM that outlives the worker. Rows in, rows out; the rules are the catalog's.

What it keeps true:
- A transaction is on the tmpfs when it commits: kill -9 of the worker loses nothing and leaves no half
  change (WAL; synchronous=OFF, because RAM either survives or it does not).
- Inode numbers and directory cookies are never given twice, also across restarts: they are reserved in
  blocks, and what a crash leaves of a block is skipped.
- A file that is not ours, damaged, or of another version is refused before anything is written to it.
- Its small tmpfs keeps a reserve, so that changes which give space back work when it is full.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fs.errors import FsError, IndexDamaged, exists
from fs.types import ROOT_INO, Attr, DirEntry

APPLICATION_ID = 0x636B7074  # "ckpt"
SCHEMA_VERSION = 2
FIRST_COOKIE = 16  # below: "." and ".."
RESERVE_BLOCK = 4096
PAGE_BYTES = 1024  # a small change writes few bytes of WAL
SPACE_RESERVE_BYTES = 8 << 20
ATTRS_KEPT = 4096
RECENT_OPS = 8192  # far above what can be executed and yet unanswered when a worker dies

_SCHEMA = """
CREATE TABLE inode(
  ino INTEGER PRIMARY KEY, mode INTEGER NOT NULL, nlink INTEGER NOT NULL, uid INTEGER NOT NULL,
  gid INTEGER NOT NULL, rdev INTEGER NOT NULL, size INTEGER NOT NULL, blocks INTEGER NOT NULL,
  atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
  generation INTEGER NOT NULL, resident INTEGER NOT NULL, parent INTEGER NOT NULL, target BLOB);
CREATE TABLE dentry(
  parent INTEGER NOT NULL, cookie INTEGER NOT NULL, name BLOB NOT NULL, ino INTEGER NOT NULL,
  PRIMARY KEY(parent, cookie)) WITHOUT ROWID;
CREATE UNIQUE INDEX dentry_name ON dentry(parent, name);
CREATE TABLE xattr(ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY(ino, name)) WITHOUT ROWID;
CREATE TABLE recent_op(slot INTEGER PRIMARY KEY, op_id INTEGER NOT NULL, ino INTEGER NOT NULL);
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE object(
  key TEXT PRIMARY KEY, ino INTEGER NOT NULL, generation INTEGER NOT NULL, size INTEGER NOT NULL,
  etag TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX object_ino ON object(ino);
CREATE TABLE digest(
  ino INTEGER PRIMARY KEY, generation INTEGER NOT NULL, size INTEGER NOT NULL, whole BLOB NOT NULL,
  block_bytes INTEGER NOT NULL, blocks BLOB NOT NULL);
CREATE TABLE unlisted(ino INTEGER PRIMARY KEY);
CREATE TABLE journal(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, tree TEXT NOT NULL, kind INTEGER NOT NULL, key TEXT NOT NULL,
  ino INTEGER NOT NULL, generation INTEGER NOT NULL, source TEXT, state INTEGER NOT NULL,
  committing INTEGER NOT NULL, forced INTEGER NOT NULL, at_ns INTEGER NOT NULL);
CREATE INDEX journal_key ON journal(key);
CREATE INDEX journal_ino ON journal(ino);
CREATE INDEX journal_tree ON journal(tree, seq);
CREATE TABLE jump(tree TEXT NOT NULL, after_seq INTEGER NOT NULL, upto_seq INTEGER NOT NULL);
CREATE TABLE upload(
  id INTEGER PRIMARY KEY, key TEXT NOT NULL, ino INTEGER NOT NULL, generation INTEGER NOT NULL,
  whole BLOB NOT NULL, part_bytes INTEGER NOT NULL, before TEXT NOT NULL, begun_ns INTEGER NOT NULL,
  upload_id TEXT);
CREATE TABLE part(
  upload INTEGER NOT NULL, number INTEGER NOT NULL, etag TEXT NOT NULL, PRIMARY KEY(upload, number)
  ) WITHOUT ROWID;
CREATE TABLE note(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = "ino,mode,nlink,uid,gid,rdev,size,blocks,atime_ns,mtime_ns,ctime_ns,generation,resident"
_QUALIFIED = ",".join("i." + column for column in _COLUMNS.split(","))
_SQL_ATTR = f"SELECT {_COLUMNS} FROM inode WHERE ino=?"
_SQL_LOOKUP = "SELECT ino FROM dentry WHERE parent=? AND name=?"
_SQL_SCAN = (
    f"SELECT d.cookie,d.name,{_QUALIFIED} FROM dentry d JOIN inode i ON i.ino=d.ino"
    " WHERE d.parent=? AND d.cookie>? ORDER BY d.cookie LIMIT ?"
)


class _Transaction:
    # an object of its own: a generator with contextmanager costs as much as a statement
    def __init__(self, index: Index) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._index.begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._index.end(error)


class Index:
    """One node's namespace in ``path``. *check* reads the whole file for damage (at mount, not at takeover).

    Raises IndexDamaged when the file is not an index of this version or fails its check.
    """

    def __init__(self, path: Path, *, check: bool = True) -> None:
        self.path = path
        self._transaction = _Transaction(self)
        # rows as they are now, of inodes asked for lately; emptied by whatever is rolled back
        self._attrs: dict[int, Attr] = {}
        if not path.exists():
            _make(path)
        self._db = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        try:
            self._verify(check)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute("PRAGMA temp_store=MEMORY")
            # one process at a time opens it; without this each transaction locks a shared index of the WAL
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._next_ino = self._ino_limit = self._counter("ino")
            self._next_cookie = self._cookie_limit = self._counter("cookie")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise IndexDamaged(f"{path}: {error}") from error
        except IndexDamaged:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the database; everything committed stays."""
        self._db.close()

    def _verify(self, check: bool) -> None:
        application_id = self._db.execute("PRAGMA application_id").fetchone()[0]
        if application_id != APPLICATION_ID:
            raise IndexDamaged(
                f"{self.path}: not a ckptfs index (application id {application_id:#x})"
            )
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise IndexDamaged(
                f"{self.path}: index version {version}, this ckptfs reads {SCHEMA_VERSION}"
            )
        if check:
            problem = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise IndexDamaged(f"{self.path}: {' '.join(problem.split())}")
        root = self._db.execute("SELECT mode FROM inode WHERE ino=?", (ROOT_INO,)).fetchone()
        if root is None or not stat.S_ISDIR(root[0]):
            raise IndexDamaged(f"{self.path}: has no root directory")

    # transactions

    def transaction(self) -> _Transaction:
        """All or nothing. Raises FsError ENOSPC when the index's tmpfs is full."""
        return self._transaction

    def begin(self) -> None:
        """For `transaction`."""
        if min(self._ino_limit - self._next_ino, self._cookie_limit - self._next_cookie) < 8:
            self._reserve_numbers()
        self._db.execute("BEGIN IMMEDIATE")

    def end(self, error: BaseException | None) -> None:
        """For `transaction`."""
        if error is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error as failed:
                error = failed
        self._attrs.clear()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            raise FsError(errno.ENOSPC, f"{self.path}: the index's tmpfs is full") from error
        raise error

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, for the modules that keep tables of their own in it (journal, ledger, residency)."""
        return self._db

    @property
    def changes(self) -> int:
        """Grows with every row that is changed."""
        return self._db.total_changes

    def require_space(self) -> None:
        """Raise FsError ENOSPC when only the reserve for deletions is left."""
        vfs = os.statvfs(self.path)
        free_bytes = vfs.f_bavail * vfs.f_frsize
        if free_bytes >= SPACE_RESERVE_BYTES:
            return
        # the file does not shrink: what deletions gave back lies in it
        free_bytes += self._db.execute("PRAGMA freelist_count").fetchone()[0] * PAGE_BYTES
        if free_bytes < SPACE_RESERVE_BYTES:
            raise FsError(errno.ENOSPC, f"{self.path}: the index's tmpfs is full")

    def _counter(self, key: str) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        if row is None:
            raise IndexDamaged(f"{self.path}: counter {key!r} is missing")
        return int(row[0])

    def _reserve_numbers(self) -> None:
        # its own commit, before the transaction that needs them: a rollback must not give one twice
        self._ino_limit = self._next_ino + RESERVE_BLOCK
        self._cookie_limit = self._next_cookie + RESERVE_BLOCK
        self._db.execute(
            "UPDATE meta SET value=CASE key WHEN 'ino' THEN ? ELSE ? END",
            (self._ino_limit, self._cookie_limit),
        )

    def reserve(self, count: int) -> None:
        """Before a transaction that makes up to *count* (below `RESERVE_BLOCK` - 8) inodes, each with a name."""
        if min(self._ino_limit - self._next_ino, self._cookie_limit - self._next_cookie) < count:
            self._reserve_numbers()

    def next_ino(self) -> int:
        """A number no inode of this index ever had. Call inside a transaction."""
        assert self._next_ino < self._ino_limit
        self._next_ino += 1
        return self._next_ino - 1

    def _next_dentry_cookie(self) -> int:
        assert self._next_cookie < self._cookie_limit
        self._next_cookie += 1
        return self._next_cookie - 1

    # inodes

    def attr(self, ino: int) -> Attr | None:
        """The recorded attributes, or None."""
        attr = self._attrs.get(ino)
        if attr is None:
            row = self._db.execute(_SQL_ATTR, (ino,)).fetchone()
            if row is None:
                return None
            attr = Attr._make(row)
            self._remember(attr)
        return attr

    def _remember(self, attr: Attr) -> None:
        if len(self._attrs) >= ATTRS_KEPT:
            self._attrs.clear()
        self._attrs[attr.ino] = attr

    def insert_inode(self, attr: Attr, parent: int, target: bytes | None) -> None:
        """Add a row; *parent* is meaningful for directories only."""
        self._db.execute(
            "INSERT INTO inode VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", (*attr, parent, target)
        )
        self._remember(attr)

    def set_attr(self, attr: Attr) -> None:
        """Replace every recorded attribute of ``attr.ino``."""
        self._db.execute(
            "UPDATE inode SET mode=?,nlink=?,uid=?,gid=?,rdev=?,size=?,blocks=?,atime_ns=?,"
            "mtime_ns=?,ctime_ns=?,generation=?,resident=? WHERE ino=?",
            (*attr[1:], attr.ino),
        )
        self._remember(attr)

    def touch_directory(self, ino: int, now_ns: int, nlink_change: int = 0) -> None:
        """Note that a directory's entries changed."""
        self._db.execute(
            "UPDATE inode SET mtime_ns=?,ctime_ns=?,nlink=nlink+? WHERE ino=?",
            (now_ns, now_ns, nlink_change, ino),
        )
        attr = self._attrs.get(ino)
        if attr is not None:
            self._attrs[ino] = attr._replace(
                mtime_ns=now_ns, ctime_ns=now_ns, nlink=attr.nlink + nlink_change
            )

    def add_links(self, ino: int, change: int, now_ns: int) -> None:
        """Change the link count and the ctime."""
        self._db.execute(
            "UPDATE inode SET nlink=nlink+?,ctime_ns=? WHERE ino=?", (change, now_ns, ino)
        )
        attr = self._attrs.get(ino)
        if attr is not None:
            self._attrs[ino] = attr._replace(nlink=attr.nlink + change, ctime_ns=now_ns)

    def set_ctime(self, ino: int, now_ns: int) -> None:
        """Note a change of the inode itself."""
        self._db.execute("UPDATE inode SET ctime_ns=? WHERE ino=?", (now_ns, ino))
        attr = self._attrs.get(ino)
        if attr is not None:
            self._attrs[ino] = attr._replace(ctime_ns=now_ns)

    def target(self, ino: int) -> bytes | None:
        """A symlink's target."""
        row = self._db.execute("SELECT target FROM inode WHERE ino=?", (ino,)).fetchone()
        return None if row is None else row[0]

    def set_target(self, ino: int, target: bytes) -> None:
        """What was taken for a file is a symlink."""
        self._db.execute("UPDATE inode SET target=? WHERE ino=?", (target, ino))

    def parent(self, ino: int) -> int:
        """A directory's parent."""
        row = self._db.execute("SELECT parent FROM inode WHERE ino=?", (ino,)).fetchone()
        return ROOT_INO if row is None else int(row[0])

    def set_parent(self, ino: int, parent: int) -> None:
        """A directory has moved."""
        self._db.execute("UPDATE inode SET parent=? WHERE ino=?", (parent, ino))

    def delete_inodes(self, inos: list[int]) -> None:
        """Forget inodes that have neither links nor users."""
        rows = [(ino,) for ino in inos]
        self._db.executemany("DELETE FROM xattr WHERE ino=?", rows)
        self._db.executemany("DELETE FROM inode WHERE ino=?", rows)
        for ino in inos:
            self._attrs.pop(ino, None)

    def unlinked_inodes(self) -> list[int]:
        """Inodes whose last link is gone."""
        return [row[0] for row in self._db.execute("SELECT ino FROM inode WHERE nlink=0")]

    def regular_files(self) -> Iterator[Attr]:
        """Every regular file's row."""
        query = f"SELECT {_COLUMNS} FROM inode WHERE mode & {0o170000} = {stat.S_IFREG}"
        return map(Attr._make, self._db.execute(query))

    def set_resident(self, ino: int, resident: int, blocks: int) -> None:
        """Note whether a file's bytes are in the arena, and how much memory they take (512-byte blocks)."""
        self._db.execute(
            "UPDATE inode SET resident=?,blocks=? WHERE ino=?", (resident, blocks, ino)
        )
        attr = self._attrs.get(ino)
        if attr is not None:
            self._attrs[ino] = attr._replace(resident=resident, blocks=blocks)

    def index_names(self) -> None:
        """Let `names` be fast. Only what writes paths down needs it, so only then it is there."""
        self._db.execute("CREATE INDEX IF NOT EXISTS dentry_ino ON dentry(ino)")

    def names(self, ino: int) -> list[tuple[int, bytes]]:
        """(parent, name) of every link of an inode."""
        query = "SELECT parent,name FROM dentry WHERE ino=?"
        return self._db.execute(query, (ino,)).fetchall()

    def counts(self) -> tuple[int, int]:
        """How many (files, directories) have a link."""
        row = self._db.execute(
            f"SELECT sum(mode & {0o170000} != {stat.S_IFDIR}),sum(mode & {0o170000} = {stat.S_IFDIR})"
            " FROM inode WHERE nlink>0"
        ).fetchone()
        return int(row[0] or 0), int(row[1] or 0)

    # dentries

    def lookup(self, parent: int, name: bytes) -> Attr | None:
        """The attributes behind a name, or None."""
        row = self._db.execute(_SQL_LOOKUP, (parent, name)).fetchone()
        return None if row is None else self.attr(row[0])

    def insert_dentry(self, parent: int, name: bytes, ino: int) -> None:
        """Add a name; its cookie is above all others. Raises FsError EEXIST."""
        row = (parent, self._next_dentry_cookie(), name, ino)
        try:
            self._db.execute("INSERT INTO dentry VALUES(?,?,?,?)", row)
        except sqlite3.IntegrityError:
            raise exists() from None

    def move_dentry(self, source: tuple[int, bytes], destination: tuple[int, bytes]) -> None:
        """Give a name another place, with a new cookie: a reader of the directory sees it once."""
        self._db.execute(
            "UPDATE dentry SET parent=?,name=?,cookie=? WHERE parent=? AND name=?",
            (*destination, self._next_dentry_cookie(), *source),
        )

    def point_dentry(self, parent: int, name: bytes, ino: int) -> None:
        """Let an existing name mean another inode, in its old place of the directory."""
        self._db.execute("UPDATE dentry SET ino=? WHERE parent=? AND name=?", (ino, parent, name))

    def delete_dentry(self, parent: int, name: bytes) -> None:
        """Remove a name."""
        self._db.execute("DELETE FROM dentry WHERE parent=? AND name=?", (parent, name))

    def is_empty(self, parent: int) -> bool:
        """Whether a directory has no entries."""
        query = "SELECT 1 FROM dentry WHERE parent=? LIMIT 1"
        return self._db.execute(query, (parent,)).fetchone() is None

    def scan(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]:
        """Entries in cookie order from behind *after_cookie*."""
        rows = self._db.execute(_SQL_SCAN, (parent, after_cookie, limit)).fetchall()
        return [DirEntry(row[0], row[1], Attr._make(row[2:])) for row in rows]

    # xattrs

    def xattr(self, ino: int, name: bytes) -> bytes | None:
        """A value, or None."""
        query = "SELECT value FROM xattr WHERE ino=? AND name=?"
        row = self._db.execute(query, (ino, name)).fetchone()
        return None if row is None else row[0]

    def xattr_names(self, ino: int) -> list[bytes]:
        """Names, sorted."""
        query = "SELECT name FROM xattr WHERE ino=? ORDER BY name"
        return [row[0] for row in self._db.execute(query, (ino,))]

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """Set or replace a value."""
        self._db.execute("INSERT OR REPLACE INTO xattr VALUES(?,?,?)", (ino, name, value))

    def delete_xattr(self, ino: int, name: bytes) -> bool:
        """Remove a value; whether it was there."""
        query = "DELETE FROM xattr WHERE ino=? AND name=?"
        return self._db.execute(query, (ino, name)).rowcount > 0

    # requests executed but perhaps not answered

    def record_op(self, op_id: int, ino: int) -> None:
        """Remember, in the transaction that executes it, what a request did."""
        self._db.execute(
            "INSERT OR REPLACE INTO recent_op VALUES(?,?,?)", (op_id % RECENT_OPS, op_id, ino)
        )

    def recorded_op(self, op_id: int) -> int | None:
        """The inode a request made or changed, if it was executed; negative: an xattr was new."""
        query = "SELECT ino FROM recent_op WHERE slot=? AND op_id=?"
        row = self._db.execute(query, (op_id % RECENT_OPS, op_id)).fetchone()
        return None if row is None else int(row[0])

    def recent_inodes(self) -> set[int]:
        """Inodes that recent requests made or changed."""
        return {abs(row[0]) for row in self._db.execute("SELECT ino FROM recent_op")}

    def forget_ops(self) -> None:
        """A new kernel connection numbers its requests anew."""
        self._db.execute("DELETE FROM recent_op")


def _make(path: Path) -> None:
    # under another name first: a crash in between must not look like a damaged index
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    now = time.time_ns()
    db = sqlite3.connect(fresh, isolation_level=None)
    db.executescript(
        f"PRAGMA page_size={PAGE_BYTES}; PRAGMA application_id={APPLICATION_ID};"
        f"PRAGMA user_version={SCHEMA_VERSION}; BEGIN; {_SCHEMA}"
        f"INSERT INTO inode VALUES({ROOT_INO},{stat.S_IFDIR | 0o755},2,{os.getuid()},{os.getgid()},0,0,0,"
        f"{now},{now},{now},0,1,{ROOT_INO},NULL);"
        f"INSERT INTO meta VALUES('ino',{ROOT_INO + 1}),('cookie',{FIRST_COOKIE}); COMMIT;"
    )
    db.close()
    fresh.rename(path)
