"""The vfs against a plain model of a filesystem, with crashes (hypothesis state machine).

No mount, no root: the vfs works on a temporary directory, and this test plays kernel and supervisor. It calls as the
kernel would, writes to backing files as passthrough does, remembers which opens were granted, and now and then kills
the worker before or after a change was committed; then a new vfs takes over and the request is sent again. Whatever
happens, each operation must have its effect once, and every attribute, name and byte must be as in the model.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog
from fs.content import Content
from fs.errors import FsError
from fs.index import Index
from fs.types import FH_INO_MASK, ROOT_INO, Attr, Change, Op
from fs.vfs import Vfs

NAMES = (b"a", b"b", b"c", b"\xff\n")
FIRST_COOKIE = 15  # below the first entry's, behind `.` and `..`
XATTRS = (b"user.a", b"trusted.b")
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# Where a worker may die, as the vfs names its points; a death at a point an operation does not pass is no death.
CRASHES = (None, None, None, "before_commit", "after_commit", "free:before")

names = st.sampled_from(NAMES)
picks = st.integers(min_value=0, max_value=1000)
crashes = st.sampled_from(CRASHES)
modes = st.sampled_from((0o600, 0o644, 0o755, 0o4755, 0o2775, 0o1777))
users = st.sampled_from((0, 0, 0, 1000, 1001))


class Killed(BaseException):
    """The worker ends here. Not an Exception, so that nothing on the way can catch it."""


@dataclass
class Node:
    """One inode of the model."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int = 1
    target: bytes | None = None
    data: bytearray = field(default_factory=bytearray)
    entries: dict[bytes, int] = field(default_factory=dict)
    parent: int = ROOT_INO
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    mtime_ns: int | None = None  # known only where it was set
    generation: int = 0

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


@dataclass
class Listing:
    """A directory being read, piece by piece."""

    ino: int
    expected: set[bytes]
    cookie: int = FIRST_COOKIE
    seen: list[bytes] = field(default_factory=list)
    # Names that came or moved meanwhile: may be shown or not, also twice.
    moved: set[bytes] = field(default_factory=set)


class VfsAgainstModel(RuleBasedStateMachine):
    """Rules are requests; invariants compare everything."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ckptfs-model-"))
        (self.directory / "arena").mkdir()
        self.crash_at: str | None = None
        self.op_id = 0
        self.nodes = {ROOT_INO: Node(ROOT_INO, stat.S_IFDIR | 0o755, os.getuid(), os.getgid(), 2)}
        self.handles: list[int] = []
        self.listings: list[Listing] = []
        self.vfs: Vfs
        self.ever: set[int] = {ROOT_INO}

    # the worker

    @initialize()
    def start(self) -> None:
        self._start(fresh_mount=True)

    def _fault(self, point: str) -> None:
        if self.crash_at is not None and point.endswith(self.crash_at):
            self.crash_at = None
            raise Killed

    def _start(self, *, fresh_mount: bool) -> None:
        index = Index(self.directory / "index.sqlite", check=fresh_mount)
        catalog = EmbeddedCatalog(index, self._fault)
        self.vfs = Vfs(index, catalog, Content(Arena(self.directory / "arena")), self._fault)
        counts = {fh: self.handles.count(fh) for fh in self.handles}
        self.vfs.recover(list(counts.items()), fresh_mount=fresh_mount)

    def _stop(self) -> None:
        self.vfs.index.close()
        self.vfs.arena.close()

    def _replace_worker(self) -> None:
        self._stop()
        self._start(fresh_mount=False)

    def teardown(self) -> None:
        self._stop()
        shutil.rmtree(self.directory)

    def _run(self, request: Callable[[Op], Any], crash: str | None, uid: int = 0) -> Any:
        """Send a request, again to the next worker when the first dies over it: its result or errno."""
        self.op_id += 1
        self.crash_at = crash
        for resent in (False, True):
            try:
                result = request(Op(uid, uid, self.op_id, resent))
                if isinstance(result, Coroutine):
                    result = _run_to_end(result)
                return result
            except FsError as exc:
                assert exc.errno is not None
                return errno.errorcode[exc.errno]
            except Killed:
                assert not resent
                self._replace_worker()
            finally:
                self.crash_at = None
        raise AssertionError("both workers died")

    # choosing

    def _pick(self, kind: Callable[[Node], bool], pick: int) -> Node | None:
        found = [node for node in self.nodes.values() if kind(node)]
        return found[pick % len(found)] if found else None

    def _dir(self, pick: int) -> Node:
        node = self._pick(lambda n: n.is_dir and n.nlink > 0, pick)
        assert node is not None
        return node

    def _child(self, parent: Node, name: bytes) -> Node | None:
        return self.nodes.get(parent.entries.get(name, 0))

    def _is_open(self, ino: int) -> bool:
        return any(fh & FH_INO_MASK == ino for fh in self.handles)

    def _drop_if_gone(self, node: Node) -> None:
        if node.nlink == 0 and not self._is_open(node.ino):
            del self.nodes[node.ino]

    def _moved(self, parent: Node, name: bytes) -> None:
        """Tell running listings that a name went, came or changed place."""
        for listing in self.listings:
            if listing.ino == parent.ino:
                listing.expected.discard(name)
                listing.moved.add(name)

    # making

    def _make(
        self, parent: Node, name: bytes, result: Any, mode: int, uid: int, **rest: Any
    ) -> None:
        if name in parent.entries:
            assert result == "EEXIST"
            return
        assert isinstance(result, Attr), result
        assert result.ino not in self.ever, "an inode number was given twice"
        self.ever.add(result.ino)
        gid = uid
        if parent.mode & stat.S_ISGID:
            gid = parent.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        nlink = 2 if stat.S_ISDIR(mode) else 1
        node = Node(result.ino, mode, uid, gid, nlink, parent=parent.ino, **rest)
        self.nodes[result.ino] = node
        parent.entries[name] = result.ino
        parent.nlink += int(node.is_dir)
        parent.mtime_ns = None
        self._moved(parent, name)

    @rule(pick=picks, name=names, mode=modes, uid=users, crash=crashes, write=st.booleans())
    def create(
        self, pick: int, name: bytes, mode: int, uid: int, crash: str | None, write: bool
    ) -> None:
        parent = self._dir(pick)
        flags = os.O_RDWR if write else os.O_RDONLY
        result = self._run(
            lambda op: self.vfs.create(parent.ino, name, mode, flags, op), crash, uid
        )
        if not isinstance(result, str):
            fh, result = result
            self.handles.append(fh)
        self._make(parent, name, result, stat.S_IFREG | mode, uid)

    @rule(pick=picks, name=names, mode=modes, uid=users, crash=crashes)
    def mkdir(self, pick: int, name: bytes, mode: int, uid: int, crash: str | None) -> None:
        parent = self._dir(pick)
        result = self._run(lambda op: self.vfs.mkdir(parent.ino, name, mode, op), crash, uid)
        self._make(parent, name, result, stat.S_IFDIR | mode, uid)

    @rule(pick=picks, name=names, mode=modes, uid=users, crash=crashes)
    def mkfifo(self, pick: int, name: bytes, mode: int, uid: int, crash: str | None) -> None:
        parent, mode = self._dir(pick), stat.S_IFIFO | mode
        result = self._run(lambda op: self.vfs.mknod(parent.ino, name, mode, 0, op), crash, uid)
        self._make(parent, name, result, mode, uid)

    @rule(pick=picks, name=names, path=st.binary(min_size=1, max_size=4095), crash=crashes)
    def symlink(self, pick: int, name: bytes, path: bytes, crash: str | None) -> None:
        parent = self._dir(pick)
        result = self._run(lambda op: self.vfs.symlink(parent.ino, name, path, op), crash)
        self._make(parent, name, result, stat.S_IFLNK | 0o777, 0, target=path)

    @rule(pick=picks, other=picks, name=names, crash=crashes)
    def link(self, pick: int, other: int, name: bytes, crash: str | None) -> None:
        node = self._pick(lambda n: not n.is_dir and n.nlink > 0, pick)
        if node is None:
            return
        parent = self._dir(other)
        result = self._run(lambda op: self.vfs.link(node.ino, parent.ino, name, op), crash)
        if name in parent.entries:
            assert result == "EEXIST"
            return
        assert result.ino == node.ino
        node.nlink += 1
        assert result.nlink == node.nlink
        parent.entries[name] = node.ino
        parent.mtime_ns = None
        self._moved(parent, name)

    # removing and moving

    def _forget_name(self, parent: Node, name: bytes) -> None:
        node = self.nodes[parent.entries.pop(name)]
        parent.mtime_ns = None
        self._moved(parent, name)
        if node.is_dir:
            node.nlink = 0
            parent.nlink -= 1
        else:
            node.nlink -= 1
        self._drop_if_gone(node)

    @rule(pick=picks, name=names, crash=crashes)
    def unlink(self, pick: int, name: bytes, crash: str | None) -> None:
        parent = self._dir(pick)
        node = self._child(parent, name)
        result = self._run(lambda op: self.vfs.unlink(parent.ino, name, op), crash)
        if node is None:
            assert result == "ENOENT"
        elif node.is_dir:
            assert result == "EISDIR"
        else:
            assert result is None
            self._forget_name(parent, name)

    @rule(pick=picks, name=names, crash=crashes)
    def rmdir(self, pick: int, name: bytes, crash: str | None) -> None:
        parent = self._dir(pick)
        node = self._child(parent, name)
        result = self._run(lambda op: self.vfs.rmdir(parent.ino, name, op), crash)
        if node is None:
            assert result == "ENOENT"
        elif not node.is_dir:
            assert result == "ENOTDIR"
        elif node.entries:
            assert result == "ENOTEMPTY"
        else:
            assert result is None
            self._forget_name(parent, name)

    def _is_below(self, node: Node, ancestor: Node) -> bool:
        while node.ino != ROOT_INO:
            if node is ancestor:
                return True
            node = self.nodes[node.parent]
        return False

    def _refusals(
        self, moved: Node | None, source: Node, old: Node | None, to: Node, flags: int
    ) -> set[str]:
        """Every errno that a rename may rightly fail with; empty when it must succeed."""
        if moved is None or (flags == RENAME_EXCHANGE and old is None):
            return {"ENOENT"}
        refusals = set()
        if flags == RENAME_NOREPLACE and old is not None:
            refusals.add("EEXIST")
        if moved.is_dir and self._is_below(to, moved):
            refusals.add("EINVAL")
        if flags == RENAME_EXCHANGE:
            assert old is not None
            if old.is_dir and self._is_below(source, old):
                refusals.add("EINVAL")
            return refusals
        if old is None or old is moved:
            return refusals
        if moved.is_dir and not old.is_dir:
            refusals.add("ENOTDIR")
        if old.is_dir and not moved.is_dir:
            refusals.add("EISDIR")
        if old.is_dir and old.entries:
            refusals.add("ENOTEMPTY")
        return refusals

    @rule(
        pick=picks,
        name=names,
        other=picks,
        new=names,
        flags=st.sampled_from((0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE)),
        crash=crashes,
    )
    def rename(
        self, pick: int, name: bytes, other: int, new: bytes, flags: int, crash: str | None
    ) -> None:
        source, to = self._dir(pick), self._dir(other)
        moved, old = self._child(source, name), self._child(to, new)
        refusals = self._refusals(moved, source, old, to, flags)
        result = self._run(
            lambda op: self.vfs.rename((source.ino, name), (to.ino, new), flags, op), crash
        )
        if refusals:
            assert result in refusals
            return
        assert result is None
        assert moved is not None
        if moved is old:
            return
        source.mtime_ns = to.mtime_ns = None
        if flags == RENAME_EXCHANGE:
            assert old is not None
            self._moved(source, name)
            self._moved(to, new)
            source.entries[name], to.entries[new] = old.ino, moved.ino
            for node, came_from, parent in ((moved, source, to), (old, to, source)):
                if node.is_dir:
                    node.parent = parent.ino
                    came_from.nlink -= 1
                    parent.nlink += 1
            return
        if old is not None:
            self._forget_name(to, new)
        self._moved(source, name)
        self._moved(to, new)
        to.entries[new] = source.entries.pop(name)
        if moved.is_dir:
            moved.parent = to.ino
            source.nlink -= 1
            to.nlink += 1

    # attributes

    @rule(pick=picks, mode=modes, crash=crashes)
    def chmod(self, pick: int, mode: int, crash: str | None) -> None:
        node = self._pick(lambda n: n.nlink > 0, pick)
        assert node is not None
        result = self._run(lambda op: self.vfs.setattr(node.ino, Change(mode=mode), op), crash)
        node.mode = stat.S_IFMT(node.mode) | mode
        assert result.mode == node.mode

    @rule(pick=picks, uid=st.none() | users, gid=st.none() | users, crash=crashes)
    def chown(self, pick: int, uid: int | None, gid: int | None, crash: str | None) -> None:
        node = self._pick(lambda n: n.nlink > 0, pick)
        assert node is not None
        if uid is None and gid is None:
            return
        self._run(lambda op: self.vfs.setattr(node.ino, Change(uid=uid, gid=gid), op), crash)
        node.uid = node.uid if uid is None else uid
        node.gid = node.gid if gid is None else gid
        if not node.is_dir:
            self._drop_privileges(node)

    def _drop_privileges(self, node: Node) -> None:
        node.mode &= ~stat.S_ISUID
        if node.mode & stat.S_IXGRP:
            node.mode &= ~stat.S_ISGID

    @rule(pick=picks, ns=st.integers(min_value=-(10**18), max_value=4 * 10**18), crash=crashes)
    def utimens(self, pick: int, ns: int, crash: str | None) -> None:
        node = self._pick(lambda n: n.nlink > 0, pick)
        assert node is not None
        change = Change(mtime_ns=ns, atime_ns=ns + 1)
        result = self._run(lambda op: self.vfs.setattr(node.ino, change, op), crash)
        node.mtime_ns = ns
        assert (result.mtime_ns, result.atime_ns) == (ns, ns + 1)

    @rule(pick=picks, size=st.integers(0, 9000), uid=users, crash=crashes)
    def truncate(self, pick: int, size: int, uid: int, crash: str | None) -> None:
        node = self._pick(lambda n: n.is_file and (n.nlink > 0 or self._is_open(n.ino)), pick)
        if node is None:
            return
        result = self._run(lambda op: self.vfs.setattr(node.ino, Change(size=size), op), crash, uid)
        assert result.size == size
        assert result.generation > node.generation
        if uid:
            self._drop_privileges(node)
        self._resize(node, size)

    def _resize(self, node: Node, size: int) -> None:
        del node.data[size:]
        node.data.extend(bytes(size - len(node.data)))
        node.mtime_ns = None

    @rule(pick=picks, name=st.sampled_from(XATTRS), value=st.binary(max_size=50), crash=crashes)
    def setxattr(self, pick: int, name: bytes, value: bytes, crash: str | None) -> None:
        node = self._pick(lambda n: n.nlink > 0, pick)
        assert node is not None
        assert self._run(lambda op: self.vfs.setxattr(node.ino, name, value, op), crash) is None
        node.xattrs[name] = value

    @rule(pick=picks, name=st.sampled_from(XATTRS), crash=crashes)
    def removexattr(self, pick: int, name: bytes, crash: str | None) -> None:
        node = self._pick(lambda n: n.nlink > 0, pick)
        assert node is not None
        result = self._run(lambda op: self.vfs.removexattr(node.ino, name, op), crash)
        assert result == (None if name in node.xattrs else "ENODATA")
        node.xattrs.pop(name, None)

    # opens and bytes

    @rule(pick=picks, write=st.booleans(), truncate=st.booleans(), crash=crashes)
    def open(self, pick: int, write: bool, truncate: bool, crash: str | None) -> None:
        node = self._pick(lambda n: n.is_file and n.nlink > 0, pick)
        if node is None:
            return
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_TRUNC if truncate and write else 0)
        fh = self._run(lambda op: self.vfs.open(node.ino, flags, op), crash)
        assert fh & FH_INO_MASK == node.ino
        self.handles.append(fh)
        if flags & os.O_TRUNC:
            self._resize(node, 0)

    @precondition(lambda self: self.handles)
    @rule(pick=picks, offset=st.integers(0, 9000), data=st.binary(min_size=1, max_size=5000))
    def write(self, pick: int, offset: int, data: bytes) -> None:
        """As passthrough does: past the vfs, into the backing file."""
        writable = [fh for fh in self.handles if self.vfs.content.has_writers(fh & FH_INO_MASK)]
        if not writable:
            return
        node = self.nodes[writable[pick % len(writable)] & FH_INO_MASK]
        fd = self.vfs.arena.open(node.ino)
        os.pwrite(fd, data, offset)
        os.close(fd)
        if len(node.data) < offset:
            self._resize(node, offset)
        node.data[offset : offset + len(data)] = data
        node.mtime_ns = None

    @precondition(lambda self: self.handles)
    @rule(pick=picks, crash=crashes, sync=st.booleans())
    def flush(self, pick: int, crash: str | None, sync: bool) -> None:
        """close(2) or fsync(2): afterwards the index knows what the bytes are."""
        fh = self.handles[pick % len(self.handles)]
        node = self.nodes[fh & FH_INO_MASK]
        recorded = self.vfs.index.attr(node.ino)
        self._run(lambda op: self.vfs.fsync(fh) if sync else self.vfs.flush(fh), crash)
        now = self.vfs.index.attr(node.ino)
        if self._writable(fh):
            assert now.size == len(node.data)
            if recorded.size != len(node.data):
                assert now.generation > recorded.generation

    def _writable(self, fh: int) -> bool:
        return fh != fh & FH_INO_MASK and bool(fh & (1 << 61))

    @precondition(lambda self: self.handles)
    @rule(pick=picks, crash=crashes)
    def release(self, pick: int, crash: str | None) -> None:
        """The handle counts until the release is answered: the next worker is told of it too."""
        fh = self.handles[pick % len(self.handles)]
        node = self.nodes[fh & FH_INO_MASK]
        assert self._run(lambda op: self.vfs.release(fh), crash) is None
        self.handles.remove(fh)
        self._drop_if_gone(node)

    # listings

    @rule(pick=picks)
    def opendir(self, pick: int) -> None:
        node = self._dir(pick)
        if len(self.listings) < 3:
            self.listings.append(Listing(self.vfs.opendir(node.ino), set(node.entries)))

    @precondition(lambda self: self.listings)
    @rule(pick=picks, count=st.integers(1, 3))
    def readdir(self, pick: int, count: int) -> None:
        """One buffer that holds `count` entries, told with attributes, as the kernel asks for them."""
        listing = self.listings[pick % len(self.listings)]
        rows = _run_to_end(self.vfs.readdir(listing.ino, listing.cookie))
        if not rows:
            assert listing.expected <= set(listing.seen), "entries were missed"
            self.listings.remove(listing)
            return
        for row in rows[:count]:
            assert row.cookie > listing.cookie
            listing.cookie = row.cookie
            assert row.name in listing.moved or row.name not in listing.seen, "shown twice"
            listing.seen.append(row.name)
            self._compare(self.nodes[row.attr.ino], row.attr)
        self.vfs.readdir_stopped(listing.ino, rows[count:], listing.cookie)

    @rule(pick=picks, other=picks, mode=modes, size=st.integers(0, 9000))
    def change_what_a_listing_has_yet_to_tell(
        self, pick: int, other: int, mode: int, size: int
    ) -> None:
        """A buffer was full after one entry; what the next ones tell is what holds then."""
        node = self._pick(lambda n: n.is_dir and len(n.entries) > 1, pick)
        if node is None:
            return
        rows = _run_to_end(self.vfs.readdir(node.ino, FIRST_COOKIE))
        self.vfs.readdir_stopped(node.ino, rows[1:], rows[0].cookie)
        changed = self.nodes[rows[1 + other % (len(rows) - 1)].attr.ino]
        _run_to_end(self.vfs.setattr(changed.ino, Change(mode=mode), Op(0, 0)))
        changed.mode = stat.S_IFMT(changed.mode) | mode
        if changed.is_file:
            _run_to_end(self.vfs.setattr(changed.ino, Change(size=size), Op(0, 0)))
            self._resize(changed, size)
        later = _run_to_end(self.vfs.readdir(node.ino, rows[0].cookie))
        assert [row.name for row in later] == [row.name for row in rows[1:]]
        for row in later:
            self._compare(self.nodes[row.attr.ino], row.attr)

    # the worker's end, between requests

    @rule()
    def kill_worker(self) -> None:
        self._replace_worker()

    @rule()
    def remount(self) -> None:
        """The supervisor ended too: nothing is open any more, every file is still there."""
        self._stop()
        for fh in self.handles:
            # What was written and not yet flushed is kept; when it was written is known from the file.
            self.nodes[fh & FH_INO_MASK].mtime_ns = None
        self.handles.clear()
        self.listings.clear()
        for node in list(self.nodes.values()):
            self._drop_if_gone(node)
        self._start(fresh_mount=True)

    @rule()
    def sweep(self) -> None:
        """Afterwards nothing is left of what is gone: no memory, no rows."""
        self.vfs.sweep()
        assert set(self.vfs.arena.inodes()) == {n.ino for n in self.nodes.values() if n.is_file}
        assert set(self.vfs.index.unlinked_inodes()) == {
            node.ino for node in self.nodes.values() if node.nlink == 0
        }

    # what must hold at all times

    def _compare(self, node: Node, attr: Attr) -> None:
        assert attr.ino == node.ino
        assert oct(attr.mode) == oct(node.mode)
        assert (attr.nlink, attr.uid, attr.gid) == (node.nlink, node.uid, node.gid)
        if node.is_file:
            assert attr.size == len(node.data)
        if node.target is not None:
            assert attr.size == len(node.target)
        if node.mtime_ns is not None:
            assert attr.mtime_ns == node.mtime_ns
        assert attr.generation >= node.generation, "a generation went back"
        node.generation = attr.generation

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        op = Op(0, 0)
        for node in list(self.nodes.values()):
            self._compare(node, self.vfs.getattr(node.ino))
            assert set(self.vfs.listxattr(node.ino, op)) == set(node.xattrs)
            for name, value in node.xattrs.items():
                assert self.vfs.getxattr(node.ino, name, op) == value
            if node.is_file:
                assert (self.directory / "arena" / "data" / str(node.ino)).read_bytes() == node.data
            elif node.target is not None:
                assert self.vfs.readlink(node.ino) == node.target
            elif node.is_dir:
                found = {
                    row.name: row.attr.ino
                    for row in _run_to_end(self.vfs.readdir(node.ino, FIRST_COOKIE))
                }
                assert found == node.entries
                assert self.vfs.parent(node.ino).ino == node.parent

    @invariant()
    def names_lead_where_they_should(self) -> None:
        root = self.nodes[ROOT_INO]
        for name in NAMES:
            attr = _run_to_end(self.vfs.lookup(ROOT_INO, name))
            assert (attr.ino if attr else None) == root.entries.get(name)


def _run_to_end(request: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that may not suspend: on one node nothing has to be waited for."""
    try:
        request.send(None)
    except StopIteration as done:
        return done.value
    request.close()
    raise AssertionError("a request suspended")


@pytest.mark.timeout(300)
class TestVfsAgainstModel(VfsAgainstModel.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=int(os.environ.get("CKPTFS_MODEL_EXAMPLES", "60")),
        stateful_step_count=50,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
