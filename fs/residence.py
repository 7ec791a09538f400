"""Which bytes are in the arena: fetching, eviction and admission of writers, put together for one node.

What it keeps true:
- The kernel moves the bytes of a writer only if there is room for what it is expected to write, beside what other such
  writers are still expected to write: nobody can stop it then. Any other writes through the worker, which can
  hold it back until there is room.
- What a file is expected to hold is what files of the same path, numbers aside, held before.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import trio

from fs.arena import Arena
from fs.catalog import Fault, no_fault
from fs.content import Content
from fs.evict import Evictor
from fs.evictplan import (
    SIZES_KEPT,
    Standing,
    may_be_let_loose,
    predicted_bytes,
    shape_of,
    to_come_bytes,
)
from fs.fetch import Fetcher, Progress
from fs.index import Index
from fs.objecttable import ObjectTable
from fs.paths import Paths
from fs.tiers.tier import Tier
from fs.types import BLOCK_BYTES, FH_INO_MASK, FH_WRITABLE, Attr

SHAPES_KEPT = 1 << 14
ADMISSION_WAIT_S = 1.0
TO_COME_FRESH_S = 0.05


class Options(NamedTuple):
    """Settings. *reserve_share*: of the arena, kept free at least. Times in seconds."""

    fetch_concurrency: int = 8
    read_timeout_s: float = 60.0
    full_wait_s: float = 60.0
    reserve_share: float = 0.05


class Residence:
    """What the vfs (fs.residency.Residency) and the session (Room; *fetcher* is its Elsewhere) ask, once `run` runs.

    *keeps*, *is_clean*: of the journal. *standing*: of policy.
    """

    def __init__(
        self,
        index: Index,
        arena: Arena,
        content: Content,
        objects: ObjectTable,
        paths: Paths,
        tier: Tier,
        *,
        keeps: Callable[[int], bool],
        is_clean: Callable[[int], bool],
        standing: Callable[[int], Standing] = lambda ino: Standing.PLAIN,
        fault: Fault = no_fault,
        options: Options | None = None,
    ) -> None:
        options = options or Options()
        self.full_wait_s = options.full_wait_s
        self._arena = arena
        self._content = content
        self._paths = paths
        self._sizes: OrderedDict[str, list[int]] = OrderedDict()
        self._shapes: dict[int, str] = {}  # of files that are open for writing
        self._loose: dict[int, int] = {}  # inodes whose writers cannot be held back: bytes expected
        self._held: set[int] = set()  # inodes whose writers can be
        self._to_come = (float("-inf"), 0)
        self.fetcher = Fetcher(
            index,
            arena,
            content,
            objects,
            tier,
            keeps=keeps,
            is_clean=is_clean,
            concurrency=options.fetch_concurrency,
            timeout_s=options.read_timeout_s,
        )
        self.evictor = Evictor(
            index,
            arena,
            content,
            objects,
            self.fetcher,
            is_clean=is_clean,
            standing=standing,
            fault=fault,
            share=options.reserve_share,
        )
        self.evictor.to_come_bytes = self.to_come
        content.generation_ended.append(self._note_size)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch and evict, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.fetcher.run)
            nursery.start_soon(self.evictor.run)
            nursery.start_soon(self.evictor.tidy)
            task_status.started()

    # fs.residency.Residency

    def keeps(self, ino: int) -> bool:
        """Whether the bytes of an inode without links are still to be uploaded."""
        return self.fetcher.keeps(ino)

    async def ensure_resident(self, ino: int, progress: Progress | None = None) -> None:
        """Fetch what is missing of a file. Raises FsError ESTALE, EIO, ENOSPC."""
        await self.fetcher.ensure_resident(ino, progress)

    def drop(self, ino: int) -> None:
        """What is cached of a file that is not resident is not wanted any more."""
        self.fetcher.drop(ino)

    def released(self, ino: int) -> None:
        """Nobody has it open now."""
        self.fetcher.released(ino)

    def unlinked(self, ino: int) -> None:
        """The last name of a file that is open and not resident is gone."""
        self.fetcher.unlinked(ino)

    async def before_writing(self, ino: int) -> None:
        """Make room for what a file is expected to grow to, and decide how its bytes go there."""
        expected = self._expected(ino)
        if not self._fits(expected):
            await self._make_room(ino, expected)
        if self._fits(expected):
            self._loose[ino] = expected
            self._held.discard(ino)
        else:
            self._held.add(ino)
        self._to_come = (float("-inf"), 0)

    async def _make_room(self, ino: int, expected: int) -> None:
        deadline_s = trio.current_time() + ADMISSION_WAIT_S
        space = self._arena.space()
        short_bytes = expected + self.to_come() - space.free_bytes
        if short_bytes < space.size_bytes:
            with trio.move_on_at(deadline_s):
                await self.evictor.free(short_bytes)

    def _fits(self, expected: int) -> bool:
        return may_be_let_loose(self._arena.space().free_bytes, self._counted(), expected)

    def _expected(self, ino: int) -> int:
        """Bytes that a writer of this file is expected to add."""
        keys = self._paths.keys(ino)
        shape = shape_of(keys[0]) if keys else ""
        self._shapes[ino] = shape
        expected = predicted_bytes(self._sizes.get(shape), self._arena.space().size_bytes)
        return max(0, expected - self._written(ino))

    def _written(self, ino: int) -> int:
        try:
            return self._arena.stat(ino).st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def _note_size(self, attr: Attr) -> None:
        shape = self._shapes.get(attr.ino)
        if not shape:
            return
        sizes = self._sizes.setdefault(shape, [])
        sizes.append(attr.size)
        del sizes[:-SIZES_KEPT]
        self._sizes.move_to_end(shape)
        if len(self._sizes) > SHAPES_KEPT:
            self._sizes.popitem(last=False)

    # fs.residency.Room

    def may_pass(self, fh: int) -> bool:
        """Whether the kernel may move the bytes of an open itself."""
        return not fh & FH_WRITABLE or fh & FH_INO_MASK not in self._held

    def may_write(self, size: int) -> bool:
        """Whether there is room for so many bytes beside what is expected of writers that cannot be held back."""
        return may_be_let_loose(self._arena.space().free_bytes, self.to_come(), size)

    async def wait_for(self, size: int, timeout_s: float) -> None:
        """Ask for room; return when there may be some, or after *timeout_s*."""
        asker = id(trio.lowlevel.current_task())
        self.evictor.demands[asker] = size
        self.evictor.wake()
        try:
            await self.evictor.wait_freed(timeout_s)
        finally:
            del self.evictor.demands[asker]

    def to_come(self) -> int:
        """What writers that cannot be held back are still expected to write, in bytes."""
        at_s, known = self._to_come
        now_s = time.monotonic()
        if now_s - at_s < TO_COME_FRESH_S:
            return known
        known = self._counted()
        self._to_come = now_s, known
        return known

    def _counted(self) -> int:
        writing = set(self._content.writing_inodes())
        for table in (self._loose, self._shapes):
            for ino in [ino for ino in table if ino not in writing]:
                del table[ino]
        self._held &= writing
        return sum(
            to_come_bytes(expected, self._written(ino)) for ino, expected in self._loose.items()
        )
