"""The authority on the namespace, as the vfs sees it, and the one for a single node.

What it keeps true:
- Each change is one transaction that also records which request it answered, so a request sent again
  after a worker's death gives its first result instead of being executed twice.
- Rules that the kernel has checked already (name length, permission, type of parent) are not repeated;
  rules that need the namespace (exists, empty, not into itself) are decided here, in the transaction.

Changes are coroutines because a catalog shared by several nodes has to ask for them. The embedded one
never suspends.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from typing import Protocol

from fs.errors import FsError, exists, not_found
from fs.index import Index
from fs.recorder import Recorder
from fs.types import RENAME_EXCHANGE, RENAME_NOREPLACE, Attr, DirEntry, Op

Fault = Callable[[str], None]
Inserted = Callable[[int], int]


def no_fault(point: str) -> None:
    """Injected in place of this, a fault may end the process at a named point of a change."""


class Catalog(Protocol):
    """What the vfs asks of a namespace. Errors are FsError with the errno of the system call.

    *cache_timeout_s*: how long the kernel may believe what it was told. *may_wait*: whether a coroutine
    may suspend.
    """

    cache_timeout_s: float
    may_wait: bool

    async def lookup(self, parent: int, name: bytes) -> Attr | None: ...

    async def listed(self, ino: int, after_cookie: int = 0, limit: int | None = None) -> None: ...

    async def make(
        self, parent: int, name: bytes, new: Attr, target: bytes | None, inserted: Inserted, op: Op
    ) -> Attr: ...

    async def link(self, ino: int, parent: int, name: bytes, now_ns: int, op: Op) -> Attr: ...

    async def unlink(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None: ...

    async def rmdir(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None: ...

    async def rename(
        self,
        source: tuple[int, bytes],
        destination: tuple[int, bytes],
        flags: int,
        now_ns: int,
        op: Op,
    ) -> Attr | None: ...

    async def set_attr(self, attr: Attr) -> None: ...

    async def overwriting(self, attr: Attr) -> None: ...

    async def set_xattr(
        self, ino: int, name: bytes, value: bytes | None, now_ns: int, op: Op
    ) -> None: ...

    def scan(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]: ...

    async def entries(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]: ...


class EmbeddedCatalog:
    """The namespace of one node: the index itself. *fault* is for tests of crashes.

    With a *recorder*, each change also writes down what it asks of the durable tier, in its transaction.
    """

    # nobody else changes this namespace, so the kernel may keep what it has been told
    cache_timeout_s = 86400.0
    may_wait = False

    def __init__(
        self, index: Index, fault: Fault = no_fault, recorder: Recorder | None = None
    ) -> None:
        self._index = index
        self._fault = fault
        self._recorder = recorder

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """What a name means, or None."""
        return self._index.lookup(parent, name)

    async def listed(self, ino: int, after_cookie: int = 0, limit: int | None = None) -> None:
        """Return when `scan` shows the *limit* entries behind a cookie (None: all): at once."""

    async def entries(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]:
        """Entries behind a cookie, *limit* at most; none at the end."""
        return self._index.scan(parent, after_cookie, limit)

    def scan(self, parent: int, after_cookie: int, limit: int) -> list[DirEntry]:
        """Entries in cookie order."""
        return self._index.scan(parent, after_cookie, limit)

    def _executed(self, op: Op) -> int | None:
        """The inode that this request changed before (0: none to tell); None if it was not executed."""
        return self._index.recorded_op(op.op_id) if op.resent else None

    def _present(self, ino: int) -> Attr:
        attr = self._index.attr(ino)
        if attr is None:
            raise not_found("removed again since")
        return attr

    async def make(
        self, parent: int, name: bytes, new: Attr, target: bytes | None, inserted: Inserted, op: Op
    ) -> Attr:
        """Add a node of any kind; its number, link count and times are chosen here.

        *inserted* is called with the number inside the transaction and returns the time to record.
        A name that begins with "/" (the kernel sends none such) makes an inode without a name. That
        *parent* is a directory with links is the caller's to know.
        Raises FsError EEXIST, ENOSPC.
        """
        if (done := self._executed(op)) is not None:
            return self._present(done)
        index = self._index
        index.require_space()
        self._fault("make:before_commit")
        with index.transaction():
            ino = index.next_ino()
            nameless = name.startswith(b"/")
            if not nameless:
                index.insert_dentry(parent, name, ino)
            now_ns = inserted(ino)
            is_dir = stat.S_ISDIR(new.mode)
            attr = new._replace(
                ino=ino,
                nlink=0 if nameless else 2 if is_dir else 1,
                atime_ns=now_ns,
                mtime_ns=now_ns,
                ctime_ns=now_ns,
            )
            index.insert_inode(attr, parent, target)
            if not nameless:
                index.touch_directory(parent, now_ns, int(is_dir))
            if self._recorder is not None and not nameless:
                self._recorder.made(parent, name, attr)
            index.record_op(op.op_id, ino)
        self._fault("make:after_commit")
        self._tell()
        return attr

    def _tell(self) -> None:
        if self._recorder is not None:
            self._recorder.tell()

    def _require_directory(self, ino: int) -> Attr:
        attr = self._index.attr(ino)
        if attr is None or attr.nlink == 0:
            raise not_found("the directory has been removed")
        if not stat.S_ISDIR(attr.mode):
            raise FsError(errno.ENOTDIR)
        return attr

    async def link(self, ino: int, parent: int, name: bytes, now_ns: int, op: Op) -> Attr:
        """Give an inode one more name."""
        if (done := self._executed(op)) is not None:
            return self._present(done)
        index = self._index
        index.require_space()
        self._fault("link:before_commit")
        with index.transaction():
            self._require_directory(parent)
            attr = index.attr(ino)
            if attr is None:
                raise not_found()
            index.insert_dentry(parent, name, ino)
            index.add_links(ino, 1, now_ns)
            index.touch_directory(parent, now_ns)
            if self._recorder is not None:
                self._recorder.linked(parent, name, attr)
            index.record_op(op.op_id, ino)
        self._fault("link:after_commit")
        self._tell()
        return attr._replace(nlink=attr.nlink + 1, ctime_ns=now_ns)

    async def unlink(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None:
        """Remove a name; the attributes after it, ``nlink`` 0 for the last one (None: freed since)."""
        if (done := self._executed(op)) is not None:
            return self._index.attr(done)
        index = self._index
        self._fault("unlink:before_commit")
        with index.transaction():
            attr = index.lookup(parent, name)
            if attr is None:
                raise not_found()
            if stat.S_ISDIR(attr.mode):
                raise FsError(errno.EISDIR)
            if self._recorder is not None:
                self._recorder.removed(parent, name, attr)
            self._drop_name(parent, name, attr, now_ns)
            index.record_op(op.op_id, attr.ino)
        self._fault("unlink:after_commit")
        self._tell()
        return attr._replace(nlink=attr.nlink - 1, ctime_ns=now_ns)

    def _drop_name(self, parent: int, name: bytes, attr: Attr, now_ns: int) -> None:
        self._index.delete_dentry(parent, name)
        self._index.add_links(attr.ino, -1, now_ns)
        self._index.touch_directory(parent, now_ns)

    async def rmdir(self, parent: int, name: bytes, now_ns: int, op: Op) -> Attr | None:
        """Remove an empty directory."""
        if (done := self._executed(op)) is not None:
            return self._index.attr(done)
        index = self._index
        self._fault("rmdir:before_commit")
        with index.transaction():
            attr = index.lookup(parent, name)
            if attr is None:
                raise not_found()
            if not stat.S_ISDIR(attr.mode):
                raise FsError(errno.ENOTDIR)
            if self._recorder is not None:
                self._recorder.removed(parent, name, attr)
            self._remove_directory(parent, name, attr, now_ns)
            index.record_op(op.op_id, attr.ino)
        self._fault("rmdir:after_commit")
        self._tell()
        return attr._replace(nlink=0, ctime_ns=now_ns)

    def _remove_directory(self, parent: int, name: bytes, attr: Attr, now_ns: int) -> None:
        if not self._index.is_empty(attr.ino):
            raise FsError(errno.ENOTEMPTY)
        self._index.delete_dentry(parent, name)
        self._index.add_links(attr.ino, -attr.nlink, now_ns)
        self._index.touch_directory(parent, now_ns, -1)

    async def rename(
        self,
        source: tuple[int, bytes],
        destination: tuple[int, bytes],
        flags: int,
        now_ns: int,
        op: Op,
    ) -> Attr | None:
        """Move a name. The inode whose name was replaced, as it is then, or None.

        Raises FsError ENOENT, EEXIST (NOREPLACE), EINVAL (into itself, unknown flags), EISDIR, ENOTDIR,
        ENOTEMPTY.
        """
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == 3:
            raise FsError(errno.EINVAL, f"rename flags {flags:#x} are not supported")
        if (done := self._executed(op)) is not None:
            return self._index.attr(done)
        self._fault("rename:before_commit")
        with self._index.transaction():
            replaced = None
            if flags & RENAME_EXCHANGE:
                self._exchange(source, destination, now_ns)
            else:
                replaced = self._move(source, destination, flags, now_ns)
            self._index.record_op(op.op_id, replaced.ino if replaced else 0)
        self._fault("rename:after_commit")
        self._tell()
        return replaced

    def _move(
        self, source: tuple[int, bytes], destination: tuple[int, bytes], flags: int, now_ns: int
    ) -> Attr | None:
        index = self._index
        moved, old = index.lookup(*source), index.lookup(*destination)
        if moved is None:
            raise not_found()
        if source[0] != destination[0]:
            self._require_directory(destination[0])
        if old is not None and flags & RENAME_NOREPLACE:
            raise exists()
        if old is not None and old.ino == moved.ino:
            return None  # two names of one inode: POSIX leaves both
        is_dir = stat.S_ISDIR(moved.mode)
        if is_dir:
            self._require_outside(destination[0], moved.ino)
        if self._recorder is not None:
            self._recorder.renaming(source, destination, moved, old)
        if old is not None:
            self._replace(destination, old, is_dir, now_ns)
        crosses = int(is_dir and source[0] != destination[0])
        index.move_dentry(source, destination)
        index.set_ctime(moved.ino, now_ns)
        index.touch_directory(source[0], now_ns, -crosses)
        if source[0] != destination[0]:
            index.touch_directory(destination[0], now_ns, crosses)
        if crosses:
            index.set_parent(moved.ino, destination[0])
        return None if old is None else index.attr(old.ino)

    def _replace(
        self, destination: tuple[int, bytes], old: Attr, by_directory: bool, now_ns: int
    ) -> None:
        if stat.S_ISDIR(old.mode):
            if not by_directory:
                raise FsError(errno.EISDIR)
            self._remove_directory(*destination, old, now_ns)
        elif by_directory:
            raise FsError(errno.ENOTDIR)
        else:
            self._drop_name(*destination, old, now_ns)

    def _require_outside(self, directory: int, moved: int) -> None:
        # the kernel checks this too, but only for the tree as one node sees it
        while directory != self._index.parent(directory):
            if directory == moved:
                raise FsError(errno.EINVAL, "a directory cannot be moved into itself")
            directory = self._index.parent(directory)

    def _exchange(self, one: tuple[int, bytes], two: tuple[int, bytes], now_ns: int) -> None:
        index = self._index
        first, second = index.lookup(*one), index.lookup(*two)
        if first is None or second is None:
            raise not_found()
        if first.ino == second.ino:
            return
        for attr, place in ((first, two), (second, one)):
            if stat.S_ISDIR(attr.mode):
                self._require_outside(place[0], attr.ino)
        if self._recorder is not None:
            self._recorder.exchanging(one, two, first, second)
        links = int(stat.S_ISDIR(second.mode)) - int(stat.S_ISDIR(first.mode))
        crosses = one[0] != two[0]
        index.point_dentry(*one, second.ino)
        index.point_dentry(*two, first.ino)
        index.touch_directory(one[0], now_ns, links if crosses else 0)
        index.touch_directory(two[0], now_ns, -links if crosses else 0)
        for attr, place in ((first, two), (second, one)):
            index.set_ctime(attr.ino, now_ns)
            if crosses and stat.S_ISDIR(attr.mode):
                index.set_parent(attr.ino, place[0])

    async def set_attr(self, attr: Attr) -> None:
        """Replace an inode's attributes. Executing it twice is the same as once."""
        self._fault("setattr:before_commit")
        if self._recorder is None:
            self._index.set_attr(attr)
        else:
            with self._index.transaction():
                self._recorder.changing(attr)
                self._index.set_attr(attr)
        self._fault("setattr:after_commit")
        self._tell()

    async def overwriting(self, attr: Attr) -> None:
        """A file is about to be rewritten in place: keep the bytes that somebody still needs as they are."""
        if self._recorder is not None:
            self._recorder.overwriting(attr)

    async def set_xattr(
        self, ino: int, name: bytes, value: bytes | None, now_ns: int, op: Op
    ) -> None:
        """Set, or with None remove, an extended attribute; ENODATA when there is none to remove."""
        if self._executed(op) is not None:
            return
        index = self._index
        if value is not None:
            index.require_space()
        self._fault("setxattr:before_commit")
        with index.transaction():
            created = value is not None and index.xattr(ino, name) is None
            if value is not None:
                index.set_xattr(ino, name, value)
            elif not index.delete_xattr(ino, name):
                raise FsError(errno.ENODATA)
            index.set_ctime(ino, now_ns)
            index.record_op(op.op_id, -ino if created else ino)
        self._fault("setxattr:after_commit")
