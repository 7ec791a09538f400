"""A node that mounts, with an empty arena, a durable tier in which there is something already. Without a mount."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import trio

from fs.discovery import DiscoveringCatalog
from fs.fetch import Fetcher
from fs.tiers.memory import MemoryTier
from fs.tiers.tier import Tier
from fs.types import ROOT_INO, Attr
from tests.durable_node import OP, DurableNode

PAGE_ROWS = 1024


class DiscoveryNode(DurableNode):
    """As the worker puts it together. Begins what was not begun, as at mount."""

    def __init__(self, directory: Path, tier: Tier, *, timeout_s: float = 60.0) -> None:
        super().__init__(directory, tier)
        self.catalog = DiscoveringCatalog(
            self.vfs.catalog,  # type: ignore[arg-type]
            self.index,
            self.objects,
            self.paths,
            tier,
            self.journal,
            timeout_s=timeout_s,
        )
        self.begun = self.catalog.begin()
        self.vfs.catalog = self.catalog
        self.fetcher = Fetcher(
            self.index,
            self.arena,
            self.store.content,
            self.objects,
            tier,
            keeps=self.journal.keeps,
            is_clean=self.journal.is_clean,
        )
        self.vfs._residency = self.fetcher  # type: ignore[assignment]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writeback and fetching, until the block ends."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.fetcher.run)
            nursery.start_soon(self.writeback.run)
            yield
            nursery.cancel_scope.cancel()

    async def entries(self, path: str = "") -> dict[str, Attr]:
        """What a reader of the directory is told, in pages as the kernel asks for them."""
        attr = await self.find(path)
        assert attr is not None, path
        found: dict[str, Attr] = {}
        cookie = 0
        while True:
            rows = await self.catalog.entries(attr.ino, cookie, PAGE_ROWS)
            if not rows:
                return found
            for row in rows:
                name = os.fsdecode(row.name)
                assert name not in found, f"{name} is told twice"
                found[name] = row.attr
                cookie = row.cookie

    async def names(self, path: str = "") -> list[str]:
        return sorted(await self.entries(path))

    async def everything(self, path: str = "") -> dict[str, Attr]:
        """Every file, directory and symlink below a path, by its path."""
        found: dict[str, Attr] = {}
        for name, attr in (await self.entries(path)).items():
            inner = f"{path}/{name}" if path else name
            found[inner] = attr
            if stat.S_ISDIR(attr.mode):
                found |= await self.everything(inner)
        return found

    async def read(self, path: str) -> bytes:
        """open, read to the end, close."""
        attr = await self.find(path)
        assert attr is not None, path
        fh = await self.vfs.open(attr.ino, os.O_RDONLY, OP)
        try:
            await self.fetcher.ensure_resident(attr.ino)
            fd = self.arena.open(attr.ino, os.O_RDONLY)
            try:
                return os.pread(fd, attr.size, 0) if attr.size else b""
            finally:
                os.close(fd)
        finally:
            await self.vfs.release(fh)

    async def readlink(self, path: str) -> bytes:
        attr = await self.find(path)
        assert attr is not None and stat.S_ISLNK(attr.mode), path
        return self.vfs.readlink(attr.ino)

    def root(self) -> Attr:
        return self.vfs.getattr(ROOT_INO)


class Facts(NamedTuple):
    """What of a file has to be the same after everything else is lost."""

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    generation: int


def facts(attr: Attr) -> Facts:
    """Of a file or symlink; of a directory the generation means nothing."""
    generation = 0 if stat.S_ISDIR(attr.mode) else attr.generation
    return Facts(attr.mode, attr.uid, attr.gid, attr.size, attr.mtime_ns, generation)


def calls(tier: MemoryTier) -> Counter[str]:
    """How often each operation was called since the last time."""
    counted = Counter(call.operation for call in tier.plan.calls)
    tier.plan.calls.clear()
    return counted


def filled(objects: dict[str, bytes], *, page_size: int = 1000) -> MemoryTier:
    """A tier with plain objects, as other tools put them there."""
    tier = MemoryTier(page_size=page_size)
    for key, data in objects.items():
        tier.put(key, data, {})
    tier.plan.calls.clear()
    return tier
