"""One node with a durable tier, without a mount: the vfs as the kernel would drive it, and writeback on trio."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog, Fault, no_fault
from fs.content import Content
from fs.index import Index
from fs.journal import Journal
from fs.ledger import Ledger
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.recorder import Recorder
from fs.retry import Caller
from fs.schedule import Schedule
from fs.store import Sizes, Store
from fs.tiers.tier import Tier
from fs.types import FH_INO_MASK, ROOT_INO, Attr, Change, Op
from fs.vfs import Vfs
from fs.writeback import Writeback

OP = Op(0, 0)
MIB = 1 << 20


class DurableNode:
    """Paths are text, relative to the root, "/" between parts."""

    def __init__(
        self, directory: Path, tier: Tier, *, fault: Fault = no_fault, sizes: Sizes | None = None
    ) -> None:
        for name in ("arena", "index"):
            (directory / name).mkdir(exist_ok=True, parents=True)
        fresh = not (directory / "index" / "index.sqlite").exists()
        self.tier = tier
        self.index = Index(directory / "index" / "index.sqlite")
        self.index.index_names()
        self.arena = Arena(directory / "arena")
        self.objects = ObjectTable(self.index)
        self.paths = Paths(self.index)
        self.journal = Journal(self.index, self.objects, self.paths, self.arena.now_ns)
        recorder = Recorder(
            self.index,
            self.journal,
            self.objects,
            self.paths,
            self.arena,
            tier.limits.max_key_bytes,
        )
        content = Content(self.arena)
        self.vfs = Vfs(self.index, EmbeddedCatalog(self.index, fault, recorder), content, fault)
        self.store = Store(
            self.index,
            self.arena,
            content,
            self.objects,
            self.paths,
            self.journal,
            Ledger(self.index),
            tier,
            Caller(trio.CapacityLimiter(8)),
            fault,
            sizes or Sizes(),
        )
        self.writeback = Writeback(self.store, Schedule(self.store))
        self.fresh = fresh

    def close(self) -> None:
        self.index.close()
        self.arena.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writeback, until the block ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.writeback.run)
            yield
            nursery.cancel_scope.cancel()

    async def drained(self, timeout_s: float = 30.0) -> None:
        """Return when nothing is left to do."""
        with trio.fail_after(timeout_s):
            await self.writeback.wait_until(lambda: not self.journal.trees())

    async def tidied(self, timeout_s: float = 10.0) -> None:
        """Return when no upload is known of that is not over."""
        with trio.fail_after(timeout_s):
            while self.store.ledger.entries():  # noqa: ASYNC110 (nothing tells)
                await trio.sleep(0.01)

    # the filesystem, by path

    async def find(self, path: str) -> Attr | None:
        attr: Attr | None = self.vfs.getattr(ROOT_INO)
        for part in path.split("/"):
            if attr is None:
                return None
            if part:
                attr = await self.vfs.lookup(attr.ino, os.fsencode(part))
        return attr

    async def _place(self, path: str) -> tuple[int, bytes]:
        parent, _, name = path.rpartition("/")
        attr = await self.find(parent)
        assert attr is not None, parent
        return attr.ino, os.fsencode(name)

    async def write(self, path: str, data: bytes, *, truncate: bool = True) -> int:
        """open(O_CREAT | O_TRUNC), write, close: the inode."""
        attr = await self.find(path)
        if attr is None:
            fh, _ = await self.vfs.create(*await self._place(path), 0o644, os.O_WRONLY, OP)
        else:
            flags = os.O_WRONLY | (os.O_TRUNC if truncate else 0)
            fh = await self.vfs.open(attr.ino, flags, OP)
        self.store_bytes(fh & FH_INO_MASK, data)
        await self.vfs.flush(fh)
        await self.vfs.release(fh)
        return fh & FH_INO_MASK

    def store_bytes(self, ino: int, data: bytes) -> None:
        """As the kernel does it, past the vfs."""
        fd = self.arena.open(ino)
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)

    async def mkdir(self, path: str) -> None:
        await self.vfs.mkdir(*await self._place(path), 0o755, OP)

    async def symlink(self, path: str, target: bytes) -> None:
        await self.vfs.symlink(*await self._place(path), target, OP)

    async def unlink(self, path: str) -> None:
        await self.vfs.unlink(*await self._place(path), OP)

    async def rmdir(self, path: str) -> None:
        await self.vfs.rmdir(*await self._place(path), OP)

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        await self.vfs.rename(await self._place(old), await self._place(new), flags, OP)

    async def link(self, old: str, new: str) -> None:
        attr = await self.find(old)
        assert attr is not None
        await self.vfs.link(attr.ino, *await self._place(new), OP)

    async def chmod(self, path: str, mode: int) -> None:
        attr = await self.find(path)
        assert attr is not None
        await self.vfs.setattr(attr.ino, Change(mode=mode), OP)

    async def tree(self) -> dict[str, bytes]:
        """What an object store must hold at the end: key -> bytes ("dir/" -> b"")."""
        found: dict[str, bytes] = {}

        async def walk(ino: int, prefix: str) -> None:
            cookie = 0
            while rows := self.vfs.catalog.scan(ino, cookie, 1000):
                for row in rows:
                    await look(row.attr, prefix + os.fsdecode(row.name))
                    cookie = row.cookie

        async def look(attr: Attr, path: str) -> None:
            if attr.mode & 0o170000 == 0o040000:
                found[path + "/"] = b""
                await walk(attr.ino, path + "/")
            elif attr.mode & 0o170000 == 0o120000:
                found[path] = self.vfs.readlink(attr.ino)
            else:
                fd = self.arena.open(attr.ino)
                found[path] = os.pread(fd, attr.size, 0) if attr.size else b""
                os.close(fd)

        await walk(ROOT_INO, "")
        return found


def contents(tier: Tier) -> dict[str, bytes]:
    """Every object of a tier: key -> bytes."""
    found: dict[str, bytes] = {}
    token = None
    while True:
        page = tier.list("", deep=True, token=token)
        for listed in page.objects:
            data = bytearray(listed.size)
            if data:
                tier.read_into(listed.key, 0, memoryview(data), None)
            found[listed.key] = bytes(data)
        token = page.next_token
        if token is None:
            return found


def run(function: Callable[[], object]) -> None:
    """A test's coroutine function, on trio, with an end."""

    async def bounded() -> None:
        with trio.fail_after(60):
            await function()  # type: ignore[misc]

    trio.run(bounded)
