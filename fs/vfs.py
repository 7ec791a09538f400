"""POSIX semantics over catalog, content and arena. Knows nothing of FUSE.

What it keeps true:
- What the kernel decides itself (permission checks, locks, page cache, path walking) is left to it; what
  it leaves to the filesystem (sgid inheritance, clearing of suid on chown, times) is done as tmpfs does.
- Every method runs to its end without suspending unless the catalog has to ask another node or the bytes
  of a file have to be fetched, so two requests never see each other half done; what was looked at before
  a wait is looked at again behind it.
- Freeing is late and repeatable: an inode without links or opens goes at unlink or at the last release,
  and whatever a dead worker left is found again by recover().
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable

from fs.catalog import Catalog, Fault, no_fault
from fs.content import Content, merged
from fs.errors import FsError, not_found
from fs.index import Index
from fs.residency import Residency
from fs.types import (
    FH_INO_MASK,
    FH_RESIDENT,
    FH_WRITABLE,
    NAME_MAX_BYTES,
    SYMLINK_MAX_BYTES,
    Attr,
    Change,
    DirEntry,
    Op,
    SpaceUse,
)
from fs.unlinked import Unlinked
from fs.virtualxattr import PREFIX as VIRTUAL_XATTRS
from fs.virtualxattr import VirtualXattrs

log = logging.getLogger(__name__)

CAPABILITY_XATTR = b"security.capability"
SELINUX_XATTR = b"security.selinux"
XATTR_NAMESPACES = (b"user.", b"trusted.", b"security.")
SCAN_ROWS = 1024  # what one readdir buffer can hold
SCANS_KEPT = 64


def _require_known(xattr: bytes) -> None:
    """The kernel passes every name on; tmpfs knows these namespaces (and ACLs, which we do not)."""
    for prefix in XATTR_NAMESPACES:
        if xattr.startswith(prefix):
            if xattr == prefix:
                raise FsError(errno.EINVAL, "an extended attribute needs a name")
            return
    raise FsError(errno.EOPNOTSUPP, "not a namespace of extended attributes kept here")


class Vfs:
    """The filesystem of one node. Errors are FsError with the errno of the system call."""

    def __init__(
        self,
        index: Index,
        catalog: Catalog,
        content: Content,
        fault: Fault = no_fault,
        residency: Residency | None = None,
    ) -> None:
        self.index = index
        self.catalog = catalog
        self.content = content
        self.arena = content.arena
        self._residency = residency
        self.virtual_xattrs = VirtualXattrs(index, content)
        self._unlinked = Unlinked(index, content, fault, self._keeps)
        self._scans: OrderedDict[tuple[int, int], tuple[int, list[DirEntry]]] = OrderedDict()

    # start

    def recover(self, handles: Iterable[tuple[int, int]], *, fresh_mount: bool) -> None:
        """Take over from a worker that is gone. *handles*: opens still granted, (file handle, count).

        With *fresh_mount* nothing is open and the kernel knows nothing; backing files may have been
        written by descriptors that outlived the last mount, so each is looked at again.
        """
        self.content.adopt(handles)
        if fresh_mount:
            self.index.forget_ops()
            self._resync()
        self._unlinked.recover()

    def _resync(self) -> None:
        known = set()
        changed = []
        for attr in self.index.regular_files():
            if not attr.resident:  # what there is of it is part of an old cache
                continue
            known.add(attr.ino)
            try:
                now = self.content.observe(attr)
            except FileNotFoundError:
                if attr.nlink:
                    log.error("the bytes of inode %d are gone from the arena: EIO", attr.ino)
                continue
            if now != attr:
                bytes_changed = (now.size, now.mtime_ns) != (attr.size, attr.mtime_ns)
                changed.append(now._replace(generation=attr.generation + bytes_changed))
        with self.index.transaction():
            for attr in changed:
                self.index.set_attr(attr)
        for ino in self.arena.inodes():
            if ino not in known:
                self.arena.remove(ino)

    # attributes

    def _attr(self, ino: int) -> Attr:
        attr = self.index.attr(ino)
        if attr is None:
            raise FsError(errno.ESTALE)  # the kernel walks the path again
        return self._current(attr)

    def _attr_with_bytes(self, ino: int) -> Attr:
        """As _attr; ESTALE for a file whose bytes are gone.

        It was unlinked or replaced between the kernel's walk of its path and this request. At ESTALE
        the kernel walks the path again and finds what is there now.
        """
        attr = self._attr(ino)
        if stat.S_ISREG(attr.mode) and attr.nlink == 0 and not self._unlinked.has_bytes(ino):
            raise FsError(errno.ESTALE)
        return attr

    def _current(self, attr: Attr) -> Attr:
        if attr.resident and self.content.has_writers(attr.ino):
            return self.content.observe(attr)
        return attr

    def getattr(self, ino: int) -> Attr:
        """Attributes as they are now, also while a file is being written."""
        return self._attr(ino)

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """What a name means; None when there is none."""
        if len(name) > NAME_MAX_BYTES:
            raise FsError(errno.ENAMETOOLONG)
        attr = await self.catalog.lookup(parent, name)
        return None if attr is None else self._current(attr)

    async def setattr(self, ino: int, change: Change, op: Op) -> Attr:
        """chmod, chown, truncate, utimens; any of them together."""
        attr = self._attr_with_bytes(ino)
        if change.size is not None:
            if change.size and not attr.resident:
                attr = await self._fetched(ino)
            await self.catalog.overwriting(attr)
            attr = self._truncate(attr, change.size)
            if op.uid:
                attr = self._without_privileges(attr)
        if change.mode is not None:
            attr = attr._replace(mode=stat.S_IFMT(attr.mode) | stat.S_IMODE(change.mode))
        if change.uid is not None or change.gid is not None or change.is_empty():
            # empty: chown(-1, -1), or suid to be dropped; the kernel leaves what that means to us
            attr = self._chown(attr, change)
        if change.atime_ns is not None or change.mtime_ns is not None:
            attr = self._set_times(attr, change)
        attr = attr._replace(ctime_ns=self.arena.now_ns())
        await self.catalog.set_attr(attr)
        if change.size is not None:
            self.content.ended(attr)
        return attr

    def _truncate(self, attr: Attr, size: int) -> Attr:
        if not stat.S_ISREG(attr.mode):
            raise FsError(errno.EINVAL)
        if attr.resident:
            status = self.arena.truncate(attr.ino, size)
        else:
            assert size == 0  # else it has been fetched
            self._forget_cached(attr.ino)
            status = self.arena.create(attr.ino)
        return merged(attr, status)._replace(generation=attr.generation + 1, resident=1)

    def _chown(self, attr: Attr, change: Change) -> Attr:
        uid = attr.uid if change.uid is None else change.uid
        gid = attr.gid if change.gid is None else change.gid
        attr = attr._replace(uid=uid, gid=gid)
        if stat.S_ISDIR(attr.mode) or change.mode is not None:
            return attr
        return self._without_privileges(attr)

    def _without_privileges(self, attr: Attr) -> Attr:
        mode = attr.mode & ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            mode &= ~stat.S_ISGID
        self.index.delete_xattr(attr.ino, CAPABILITY_XATTR)
        return attr._replace(mode=mode)

    def _set_times(self, attr: Attr, change: Change) -> Attr:
        atime_ns = attr.atime_ns if change.atime_ns is None else change.atime_ns
        mtime_ns = attr.mtime_ns if change.mtime_ns is None else change.mtime_ns
        if stat.S_ISREG(attr.mode) and attr.resident:
            self.arena.set_times(attr.ino, atime_ns, mtime_ns)
        return attr._replace(atime_ns=atime_ns, mtime_ns=mtime_ns)

    # names

    def _new(self, parent: int, mode: int, op: Op, rdev: int = 0, size: int = 0) -> Attr:
        directory = self.index.attr(parent)
        if directory is None or directory.nlink == 0:
            raise not_found("the directory has been removed")
        gid = op.gid
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        return Attr(0, mode, 1, op.uid, gid, rdev, size, 0, 0, 0, 0, 0)

    def _insert_backing(self, ino: int) -> int:
        return self.arena.create(ino).st_ctime_ns

    def _insert_plain(self, ino: int) -> int:
        return self.arena.now_ns()

    async def _make(
        self, parent: int, name: bytes, new: Attr, op: Op, target: bytes | None = None
    ) -> Attr:
        if len(name) > NAME_MAX_BYTES:
            raise FsError(errno.ENAMETOOLONG)
        inserted = self._insert_backing if stat.S_ISREG(new.mode) else self._insert_plain
        attr = await self.catalog.make(parent, name, new, target, inserted, op)
        return attr

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, op: Op) -> Attr:
        """A regular file, FIFO, socket or (inert) device node."""
        new = self._new(parent, mode, op, rdev)
        # nobody will close it, so its first generation is over already
        return await self._make(parent, name, new._replace(generation=1), op)

    async def mkdir(self, parent: int, name: bytes, mode: int, op: Op) -> Attr:
        """A directory; sgid and group come from a parent that has sgid."""
        return await self._make(parent, name, self._new(parent, mode | stat.S_IFDIR, op), op)

    async def symlink(self, parent: int, name: bytes, target: bytes, op: Op) -> Attr:
        """A symbolic link; *target* is kept byte for byte."""
        if len(target) > SYMLINK_MAX_BYTES:
            raise FsError(errno.ENAMETOOLONG)
        new = self._new(parent, stat.S_IFLNK | 0o777, op, size=len(target))
        return await self._make(parent, name, new, op, target)

    def readlink(self, ino: int) -> bytes:
        """A symbolic link's target."""
        target = self.index.target(ino)
        if target is None:
            raise FsError(errno.EINVAL)
        return target

    async def link(self, ino: int, parent: int, name: bytes, op: Op) -> Attr:
        """One more name for an inode, also for one that has none left but is open (O_TMPFILE)."""
        if len(name) > NAME_MAX_BYTES:
            raise FsError(errno.ENAMETOOLONG)
        attr = await self.catalog.link(ino, parent, name, self.arena.now_ns(), op)
        return self._current(attr)

    async def unlink(self, parent: int, name: bytes, op: Op) -> None:
        """Remove a name; without other names or opens the memory is free when this returns."""
        attr = await self.catalog.unlink(parent, name, self.arena.now_ns(), op)
        self._dropped(attr)

    async def rmdir(self, parent: int, name: bytes, op: Op) -> None:
        """Remove an empty directory."""
        attr = await self.catalog.rmdir(parent, name, self.arena.now_ns(), op)
        self._dropped(attr)

    async def rename(
        self, source: tuple[int, bytes], destination: tuple[int, bytes], flags: int, op: Op
    ) -> None:
        """Move a name in one step, whatever is below it; RENAME_NOREPLACE and RENAME_EXCHANGE."""
        if len(destination[1]) > NAME_MAX_BYTES:
            raise FsError(errno.ENAMETOOLONG)
        now_ns = self.arena.now_ns()
        replaced = await self.catalog.rename(source, destination, flags, now_ns, op)
        self._dropped(replaced)

    def _dropped(self, attr: Attr | None) -> None:
        if attr is None or attr.nlink:
            return
        if not self.content.is_open(attr.ino):
            self._free(attr.ino)
        elif self._residency is not None and not attr.resident:
            self._residency.unlinked(attr.ino)

    def _keeps(self, ino: int) -> bool:
        return self._residency is not None and self._residency.keeps(ino)

    def _free(self, ino: int) -> None:
        """Its last link and its last open are gone."""
        if self._keeps(ino):
            return  # until `unpinned`
        if self._residency is not None:
            self._residency.drop(ino)
        self._unlinked.add(ino)

    def unpinned(self, ino: int) -> None:
        """Nothing has to be uploaded of it any more: free it if it has neither links nor opens."""
        attr = self.index.attr(ino)
        if attr is not None and not attr.nlink and not self.content.is_open(ino):
            self._free(ino)

    def _forget_cached(self, ino: int) -> None:
        if self._residency is not None:
            self._residency.drop(ino)
        self.arena.remove(ino)  # what a worker that is gone has left

    async def _fetched(self, ino: int) -> Attr:
        """Return when all its bytes are in the arena. Raises FsError EIO, ENOSPC, ESTALE."""
        if self._residency is None:
            raise FsError(
                errno.EIO, f"the bytes of inode {ino} are in a durable tier: none is given"
            )
        self.content.opened(ino, os.O_RDONLY)  # so that it stays
        try:
            await self._residency.ensure_resident(ino)
        finally:
            if self.content.released(ino):
                self._closed(ino)
        return self._attr_with_bytes(ino)

    def sweep(self) -> None:
        """Forget the rows of inodes that are gone, and their last bytes."""
        self._unlinked.sweep()

    # opens

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, op: Op
    ) -> tuple[int, Attr]:
        """Make a regular file and open it: (file handle, attributes)."""
        new = self._new(parent, stat.S_IFREG | stat.S_IMODE(mode), op)
        attr = await self._make(parent, name, new, op)
        self.content.opened(attr.ino, flags)
        return self._handle(attr.ino, flags), self._current(attr)

    async def open(self, ino: int, flags: int, op: Op) -> int:
        """Open a regular file: its handle. One that is not resident is only fetched at once to be written."""
        attr = self._attr_with_bytes(ino)
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if not attr.resident:
            if not writable and attr.size:
                self.content.opened(ino, flags)
                return ino
            if not flags & os.O_TRUNC:
                attr = await self._fetched(ino)
        drops = writable and self._privileged(attr, op)
        if writable:
            await self.catalog.overwriting(attr)
        self.content.opened(ino, flags, drop_privileges=drops)
        if flags & os.O_TRUNC and writable:
            await self._truncate_at_open(self._current(attr), op)
        return self._handle(ino, flags)

    async def _truncate_at_open(self, attr: Attr, op: Op) -> None:
        attr = self._truncate(attr, 0)
        await self.catalog.set_attr(self._without_privileges(attr) if op.uid else attr)

    def _privileged(self, attr: Attr, op: Op) -> bool:
        if op.uid and attr.mode & (stat.S_ISUID | stat.S_ISGID):
            return True
        return self.index.xattr(attr.ino, CAPABILITY_XATTR) is not None

    def _handle(self, ino: int, flags: int) -> int:
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        return ino | FH_RESIDENT | (FH_WRITABLE if writable else 0)

    async def flush(self, fh: int) -> None:
        """close(2) of one descriptor: what was written through it becomes a generation."""
        if fh & FH_WRITABLE:
            await self._end_generation(fh & FH_INO_MASK, mapped=False)

    async def fsync(self, fh: int) -> None:
        """As flush: RAM is as safe as this node makes it."""
        await self.flush(fh)

    async def release(self, fh: int) -> None:
        """The last user of one open is gone (descriptors and mappings)."""
        ino = fh & FH_INO_MASK
        if fh & FH_WRITABLE:
            await self._end_generation(ino, mapped=self.content.may_be_mapped(ino))
        if self.content.released(fh):
            self._closed(ino)

    def _closed(self, ino: int) -> None:
        attr = self.index.attr(ino)
        if attr is None:
            return
        if attr.nlink == 0:
            self._free(ino)
        elif not attr.resident and self._residency is not None:
            self._residency.released(ino)

    async def _end_generation(self, ino: int, *, mapped: bool) -> None:
        recorded = self.index.attr(ino)
        if recorded is None:
            return
        try:
            attr = self.content.observe(recorded)
        except FileNotFoundError:
            return
        changed = (attr.size, attr.mtime_ns) != (recorded.size, recorded.mtime_ns)
        known = recorded.generation > 0  # a file that was only made has its first generation now
        if known and not changed and not mapped and attr.blocks == recorded.blocks:
            return
        if changed and self.content.drops_privileges(ino):
            attr = self._without_privileges(attr)
        attr = attr._replace(generation=recorded.generation + 1)
        await self.catalog.set_attr(attr)
        self.content.ended(attr)

    # directories

    def opendir(self, ino: int) -> int:
        """A handle that survives the worker: the inode number."""
        return ino

    async def readdir(self, ino: int, after_cookie: int) -> list[DirEntry]:
        """Entries behind a cookie, a bounded number; empty at the end. See readdir_stopped."""
        changes, rows = self._scans.pop((ino, after_cookie), (-1, []))
        if changes != self.index.changes:
            rows = await self.catalog.entries(ino, after_cookie, SCAN_ROWS)
        writing = self.content.has_writers
        return [
            row._replace(attr=self._current(row.attr)) if writing(row.attr.ino) else row
            for row in rows
        ]

    def readdir_stopped(self, ino: int, rest: list[DirEntry], after_cookie: int) -> None:
        """The reader's buffer was full; it will come back for *rest* at *after_cookie*.

        Kept only as long as nothing at all changes: the kernel believes what a listing says of a file.
        """
        if rest:
            self._scans[ino, after_cookie] = self.index.changes, rest
            while len(self._scans) > SCANS_KEPT:
                self._scans.popitem(last=False)

    def parent(self, ino: int) -> Attr:
        """The directory above a directory; the root's is the root."""
        return self._attr(self.index.parent(ino))

    # the rest

    def space(self) -> SpaceUse:
        """The budget, for statfs."""
        return self.arena.space()

    def getxattr(self, ino: int, name: bytes, op: Op) -> bytes:
        """A value; ENODATA when there is none.

        Also asked on behalf of a setxattr with XATTR_CREATE or XATTR_REPLACE. When that was executed
        before and is sent again, the answer is what it was then: there only if it was replaced.
        """
        _require_known(name)
        if name.startswith(VIRTUAL_XATTRS):
            told = self.virtual_xattrs.get(self._attr(ino), name)
            if told is not None:
                return told
        value = self.index.xattr(ino, name)
        created_before = op.resent and (self.index.recorded_op(op.op_id) or 0) < 0
        if value is None and name == SELINUX_XATTR:
            # `ls -l` asks for it on every file, and on ENODATA goes on asking
            raise FsError(errno.EOPNOTSUPP, "no SELinux labels here")
        if value is None or created_before:
            raise FsError(errno.ENODATA)
        return value

    def listxattr(self, ino: int, op: Op) -> list[bytes]:
        """Names; trusted ones are for root."""
        names = self.index.xattr_names(ino)
        return [name for name in names if op.uid == 0 or not name.startswith(b"trusted.")]

    async def setxattr(self, ino: int, name: bytes, value: bytes, op: Op) -> None:
        """Set or replace a value."""
        _require_known(name)
        if name.startswith(VIRTUAL_XATTRS) and not self.virtual_xattrs.setting(
            self._attr(ino), name, value
        ):
            return
        await self.catalog.set_xattr(ino, name, value, self.arena.now_ns(), op)
        self.virtual_xattrs.was_changed(ino, name, value)

    async def removexattr(self, ino: int, name: bytes, op: Op) -> None:
        """Remove a value; ENODATA when there is none."""
        _require_known(name)
        self.virtual_xattrs.removing(name)
        await self.catalog.set_xattr(ino, name, None, self.arena.now_ns(), op)
        self.virtual_xattrs.was_changed(ino, name, None)
