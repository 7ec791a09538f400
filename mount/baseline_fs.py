"""The yardstick: a bare pyfuse3 memory filesystem, as one is written after pyfuse3's own examples.

`ckptfs bench` mounts it for the length of a run and holds metadata operations against it. What it
keeps true: nothing in it is done for our sake. Dictionaries in one process, no supervisor, no
recovery, times set at creation, entries and attributes cached by the kernel for 300 s, pyfuse3's
default options (writeback cache is off among them, which makes small files faster here than on:
the harder yardstick).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
import time

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

CACHE_TIMEOUT_S = 300.0


class Inode:
    """A file, a directory or a symbolic link."""

    def __init__(self, ino: int, mode: int, uid: int, gid: int) -> None:
        self.ino, self.mode, self.uid, self.gid = ino, mode, uid, gid
        self.nlink = 1
        self.opens = 0
        self.rdev = 0
        self.atime_ns = self.mtime_ns = self.ctime_ns = time.time_ns()
        self.data = bytearray()
        self.target = b""
        self.children: dict[bytes, int] = {}


class BaselineFs(pyfuse3.Operations):
    """Dictionaries of inodes and names."""

    def __init__(self) -> None:
        super().__init__()
        root = Inode(pyfuse3.ROOT_INODE, stat.S_IFDIR | 0o755, os.getuid(), os.getgid())
        self.inodes = {root.ino: root}
        self.numbers = itertools.count(root.ino + 1)
        self.handles = itertools.count(1)
        self.listings: dict[int, list[tuple[bytes, int]]] = {}

    def _attributes(self, inode: Inode) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode.ino
        entry.generation = 0
        entry.entry_timeout = CACHE_TIMEOUT_S
        entry.attr_timeout = CACHE_TIMEOUT_S
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = len(inode.data)
        entry.st_blksize = 512
        entry.st_blocks = (len(inode.data) + 511) // 512
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        return entry

    def _node(self, ino: int) -> Inode:
        node = self.inodes.get(ino)
        if node is None:
            raise FUSEError(errno.ENOENT)
        return node

    def _child(self, parent: int, name: bytes) -> Inode:
        ino = self.inodes[parent].children.get(name)
        if ino is None:
            raise FUSEError(errno.ENOENT)
        return self.inodes[ino]

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self._child(parent_inode, name))

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(self._node(inode))

    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        node = self._node(inode)
        if fields.update_size:
            missing = attr.st_size - len(node.data)
            if missing > 0:
                node.data.extend(bytes(missing))
            else:
                del node.data[attr.st_size :]
        if fields.update_mode:
            node.mode = attr.st_mode
        if fields.update_uid:
            node.uid = attr.st_uid
        if fields.update_gid:
            node.gid = attr.st_gid
        if fields.update_atime:
            node.atime_ns = attr.st_atime_ns
        if fields.update_mtime:
            node.mtime_ns = attr.st_mtime_ns
        node.ctime_ns = attr.st_ctime_ns if fields.update_ctime else time.time_ns()
        return self._attributes(node)

    def _make(self, parent: int, name: bytes, mode: int, ctx: RequestContext) -> Inode:
        children = self.inodes[parent].children
        if name in children:
            raise FUSEError(errno.EEXIST)
        node = Inode(next(self.numbers), mode, ctx.uid, ctx.gid)
        self.inodes[node.ino] = node
        children[name] = node.ino
        return node

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._make(parent_inode, name, mode, ctx)
        node.rdev = rdev
        return self._attributes(node)

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._attributes(self._make(parent_inode, name, mode | stat.S_IFDIR, ctx))

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx)
        node.target = target
        return self._attributes(node)

    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.inodes[inode].target

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        node = self._node(inode)
        self.inodes[new_parent_inode].children[new_name] = inode
        node.nlink += 1
        return self._attributes(node)

    def _drop(self, node: Inode) -> None:
        node.nlink -= 1
        if node.nlink == 0 and node.opens == 0:
            del self.inodes[node.ino]

    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        node = self._child(parent_inode, name)
        del self.inodes[parent_inode].children[name]
        self._drop(node)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        node = self._child(parent_inode, name)
        if node.children:
            raise FUSEError(errno.ENOTEMPTY)
        del self.inodes[parent_inode].children[name]
        self._drop(node)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        if flags:
            raise FUSEError(errno.EINVAL)
        node = self._child(parent_inode_old, name_old)
        target = self.inodes[parent_inode_new].children
        if name_new in target:
            replaced = self.inodes[target[name_new]]
            if replaced.children:
                raise FUSEError(errno.ENOTEMPTY)
            self._drop(replaced)
        del self.inodes[parent_inode_old].children[name_old]
        target[name_new] = node.ino

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        self._node(inode).opens += 1
        return FileInfo(fh=inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        node = self._make(parent_inode, name, mode, ctx)
        node.opens += 1
        return FileInfo(fh=node.ino), self._attributes(node)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return bytes(self.inodes[fh].data[off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        data = self.inodes[fh].data
        if off > len(data):
            data.extend(bytes(off - len(data)))
        data[off : off + len(buf)] = buf
        return len(buf)

    async def release(self, fh: int) -> None:
        node = self.inodes[fh]
        node.opens -= 1
        if node.nlink == 0 and node.opens == 0:
            del self.inodes[fh]

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        handle = next(self.handles)
        self.listings[handle] = list(self.inodes[inode].children.items())
        return handle

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        entries = self.listings[fh]
        for position in range(start_id, len(entries)):
            name, ino = entries[position]
            node = self.inodes.get(ino)
            if node is None:
                continue
            if not pyfuse3.readdir_reply(token, name, self._attributes(node), position + 1):
                return

    async def releasedir(self, fh: int) -> None:
        del self.listings[fh]

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 512
        data.f_blocks = data.f_bfree = data.f_bavail = 1 << 21
        data.f_files = data.f_ffree = data.f_favail = 1 << 20
        data.f_namemax = 255
        return data


def main() -> None:
    """Serve the mountpoint given until it is unmounted."""
    options = set(pyfuse3.default_options) | {"fsname=ckptfs-baseline"}
    pyfuse3.init(BaselineFs(), sys.argv[1], options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
