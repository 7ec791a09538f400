"""A vfs and a fetcher over a tier that can be told to misbehave, without a mount."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog
from fs.checksums import hash_file
from fs.content import Content
from fs.fetch import Fetcher
from fs.index import Index
from fs.objects import metadata_of
from fs.objecttable import DurableObject, ObjectTable
from fs.tiers.memory import MemoryTier
from fs.types import FH_INO_MASK, FH_RESIDENT, ROOT_INO, Attr, Op
from fs.vfs import Vfs

MIB = 1 << 20
OP = Op(0, 0)


class OddTier(MemoryTier):
    """A tier in memory whose reads can be watched, held up, spoilt and refused."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.at_once = self.most_at_once = 0
        self.before: Callable[[int, int], None] = lambda offset, size: None
        self.spoil: Callable[[int, memoryview], None] = lambda offset, view: None
        self._counting = threading.Lock()

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        with self._counting:
            self.reads.append((key, offset, len(buffer)))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.before(offset, len(buffer))
            super().read_into(key, offset, buffer, etag)
            self.spoil(offset, buffer)
        finally:
            with self._counting:
                self.at_once -= 1


class FetchNode:
    """Files of one directory. *options* are the fetcher's."""

    def __init__(
        self,
        directory: Path,
        *,
        size_bytes: int = 1 << 30,
        tier: OddTier | None = None,
        **options: Any,
    ) -> None:
        for name in ("arena", "index"):
            (directory / name).mkdir(exist_ok=True)
        self.tier = tier or OddTier()
        self.arena = Arena(directory / "arena", size_bytes=size_bytes)
        self.index = Index(directory / "index" / "index.sqlite")
        self.content = Content(self.arena)
        self.objects = ObjectTable(self.index)
        self.kept: set[int] = set()
        self.dirty: set[int] = set()
        self.fetcher = Fetcher(
            self.index,
            self.arena,
            self.content,
            self.objects,
            self.tier,
            keeps=lambda ino: ino in self.kept,
            is_clean=lambda ino: ino not in self.dirty,
            **options,
        )
        self.vfs = Vfs(
            self.index, EmbeddedCatalog(self.index), self.content, residency=self.fetcher
        )

    def close(self) -> None:
        self.index.close()
        self.arena.close()

    @asynccontextmanager
    async def running(self, timeout_s: float = 20.0) -> AsyncIterator[None]:
        with trio.fail_after(timeout_s):
            async with trio.open_nursery() as nursery:
                await nursery.start(self.fetcher.run)
                yield
                nursery.cancel_scope.cancel()

    async def store(self, name: str, data: bytes, *, digests: bool = True) -> int:
        """A durable file: its inode."""
        fh, _ = await self.vfs.create(ROOT_INO, name.encode(), 0o640, os.O_WRONLY, OP)
        ino = fh & FH_INO_MASK
        fd = self.arena.open(ino)
        os.pwrite(fd, data, 0)
        await self.vfs.flush(fh)
        await self.vfs.release(fh)
        attr = self.attr(ino)
        known = hash_file(fd, len(data))[0]
        os.close(fd)
        etag = self.tier.put(name, data, metadata_of(attr, known) if digests else {})
        with self.index.transaction():
            self.objects.put(DurableObject(name, ino, attr.generation, len(data), etag, 0))
            if digests:
                self.objects.set_digests(ino, attr.generation, known)
        return ino

    def evict(self, ino: int) -> None:
        with self.index.transaction():
            self.index.set_resident(ino, 0, 0)
        self.arena.remove(ino)

    async def remote(self, name: str, data: bytes, *, digests: bool = True) -> int:
        """A file whose bytes are in the tier only."""
        ino = await self.store(name, data, digests=digests)
        self.evict(ino)
        return ino

    def attr(self, ino: int) -> Attr:
        attr = self.index.attr(ino)
        assert attr is not None
        return attr

    async def open(self, ino: int, flags: int = os.O_RDONLY) -> int:
        return await self.vfs.open(ino, flags, OP)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        """As the session does it."""
        ino = fh & FH_INO_MASK
        if not fh & FH_RESIDENT:
            found = self.fetcher.at_hand(ino, offset, size)
            if found is None:
                found = await self.fetcher.fetched(ino, offset, size)
            if found is not None:
                return os.pread(found.fd, found.length, offset)
        assert self.attr(ino).resident
        return self.backing(ino, offset, size)

    def backing(self, ino: int, offset: int = 0, size: int = 1 << 30) -> bytes:
        fd = self.arena.open(ino, os.O_RDONLY)
        try:
            return os.pread(fd, min(size, os.fstat(fd).st_size), offset)
        finally:
            os.close(fd)

    async def read_all(self, fh: int, size: int, step: int = 128 << 10) -> bytes:
        return b"".join([await self.read(fh, at, step) for at in range(0, size, step)])
