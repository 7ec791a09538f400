"""pyfuse3's handlers: the errno boundary, and nothing else.

What it keeps true: a handler answers. FsError becomes its errno; anything unexpected is logged with its
operation and becomes EIO, because any other exception would end pyfuse3's loop.

The session (mount.session) puts the request's number into the header's pid field (bit 31: sent again), so ``ctx.pid``
is a request number here, not a process.
"""

from __future__ import annotations

import errno
import functools
import logging
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from fs.errors import FsError
from fs.types import NAME_MAX_BYTES, Attr, Change, Op
from fs.vfs import Vfs

log = logging.getLogger(__name__)

BLOCK_SIZE_BYTES = 4096
DOT_COOKIE = 1
DOTDOT_COOKIE = 2
_RESENT = 0x80000000

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def answered(handler: Handler) -> Handler:
    """Let *handler* raise FUSEError only."""

    @functools.wraps(handler)
    async def guarded(*args: Any) -> Any:
        try:
            return await handler(*args)
        except FsError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except FUSEError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise FUSEError(error.errno) from None
            log.exception("%s failed; the application gets EIO", handler.__name__)
            raise FUSEError(errno.EIO) from None
        except Exception:
            log.exception("%s failed; the application gets EIO", handler.__name__)
            raise FUSEError(errno.EIO) from None

    return cast(Handler, guarded)


def _op(ctx: RequestContext) -> Op:
    # pid_t is signed: bit 31 makes it negative
    return Op(ctx.uid, ctx.gid, ctx.pid & ~_RESENT & 0xFFFFFFFF, bool(ctx.pid & _RESENT))


class FuseOps(pyfuse3.Operations):
    """The vfs, as libfuse calls it."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, vfs: Vfs) -> None:
        super().__init__()
        self._vfs = vfs
        self._timeout_s = vfs.catalog.cache_timeout_s

    def _entry(self, attr: Attr) -> EntryAttributes:
        entry = EntryAttributes()
        self._fill(entry, attr)
        entry.entry_timeout = self._timeout_s
        entry.attr_timeout = self._timeout_s
        entry.st_blksize = BLOCK_SIZE_BYTES
        return entry

    def _fill(self, entry: EntryAttributes, attr: Attr) -> None:
        entry.st_ino = attr.ino
        entry.st_mode = attr.mode
        entry.st_nlink = attr.nlink
        entry.st_uid = attr.uid
        entry.st_gid = attr.gid
        entry.st_rdev = attr.rdev
        entry.st_size = attr.size
        entry.st_blocks = attr.blocks
        entry.st_atime_ns = attr.atime_ns
        entry.st_mtime_ns = attr.mtime_ns
        entry.st_ctime_ns = attr.ctime_ns

    @answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        attr = await self._vfs.lookup(parent_inode, name)
        if attr is None:
            entry = EntryAttributes()  # inode 0: "not there", which the kernel may remember
            entry.st_ino = 0
            entry.entry_timeout = self._timeout_s
            return entry
        return self._entry(attr)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        return None

    @answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(self._vfs.getattr(inode))

    @answered
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        change = Change(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return self._entry(await self._vfs.setattr(inode, change, _op(ctx)))

    @answered
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self._vfs.readlink(inode)

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._vfs.mknod(parent_inode, name, mode, rdev, _op(ctx)))

    @answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        attr = await self._vfs.mkdir(parent_inode, name, stat.S_IMODE(mode), _op(ctx))
        return self._entry(attr)

    @answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._vfs.unlink(parent_inode, name, _op(ctx))

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._vfs.rmdir(parent_inode, name, _op(ctx))

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._vfs.symlink(parent_inode, name, target, _op(ctx)))

    @answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        source, destination = (parent_inode_old, name_old), (parent_inode_new, name_new)
        await self._vfs.rename(source, destination, flags, _op(ctx))

    @answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._vfs.link(inode, new_parent_inode, new_name, _op(ctx)))

    @answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=await self._vfs.open(inode, flags, _op(ctx)))

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        fh, attr = await self._vfs.create(parent_inode, name, mode, flags, _op(ctx))
        return FileInfo(fh=fh), self._entry(attr)

    @answered
    async def flush(self, fh: int) -> None:
        await self._vfs.flush(fh)

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._vfs.fsync(fh)

    @answered
    async def release(self, fh: int) -> None:
        await self._vfs.release(fh)

    @answered
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return self._vfs.opendir(inode)

    @answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if start_id < DOTDOT_COOKIE and not self._reply_dots(fh, start_id, token):
            return
        last = max(start_id, DOTDOT_COOKIE)
        rows = await self._vfs.readdir(fh, last)
        for position, row in enumerate(rows):
            if not pyfuse3.readdir_reply(token, row.name, self._entry(row.attr), row.cookie):
                self._vfs.readdir_stopped(fh, rows[position:], last)
                return
            last = row.cookie

    def _reply_dots(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> bool:
        dots = ((b".", DOT_COOKIE, self._vfs.getattr), (b"..", DOTDOT_COOKIE, self._vfs.parent))
        for name, cookie, attr_of in dots:
            if start_id < cookie and not pyfuse3.readdir_reply(
                token, name, self._entry(attr_of(fh)), cookie
            ):
                return False
        return True

    @answered
    async def releasedir(self, fh: int) -> None:
        return None

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        return None

    @answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        space = self._vfs.space()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_SIZE_BYTES
        data.f_blocks = space.size_bytes // BLOCK_SIZE_BYTES
        data.f_bfree = data.f_bavail = space.free_bytes // BLOCK_SIZE_BYTES
        data.f_files = space.inodes
        data.f_ffree = data.f_favail = space.free_inodes
        data.f_namemax = NAME_MAX_BYTES
        return data

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        return self._vfs.getxattr(inode, name, _op(ctx))

    @answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> list[bytes]:
        return self._vfs.listxattr(inode, _op(ctx))

    @answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await self._vfs.setxattr(inode, name, value, _op(ctx))

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._vfs.removexattr(inode, name, _op(ctx))
