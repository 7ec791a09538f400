"""Eviction: files that are durable give their memory up before somebody needs it.

What it keeps true:
- Only what is durable, clean, closed, named and not pinned is evicted; that is looked at in the step that evicts it.
- The index says that a file's bytes are elsewhere before they are removed from the arena: a crash in between leaves
  bytes that nobody reads, which are removed later, never a file without its bytes.
- Room is made ahead: writers whose bytes do not pass through here would be refused, not held back.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import trio
import trio.lowlevel

from fs.arena import Arena
from fs.catalog import Fault, no_fault
from fs.content import Content
from fs.evictplan import Candidate, Standing, in_order, reserve_bytes
from fs.fetch import Fetcher
from fs.index import Index
from fs.objecttable import ObjectTable
from fs.types import BLOCK_BYTES

log = logging.getLogger("ckptfs.evict")

LOOK_S, IDLE_LOOK_S = 0.1, 2.0  # with and without writers
LOOK_BOUND_S = 0.5  # where the room is found by looking at every file
SCAN_INOS = 4096
RESCAN_S, RESCAN_ANYWAY_S = 0.25, 5.0
SCAN_SHARE = 0.1  # of the time, at most, is spent looking for candidates
RATE_KEEPS = 0.7
USED_KEPT = 1 << 16
ROOM_WAIT_S = 30.0

_SQL_CANDIDATES = f"""
SELECT i.ino,i.blocks,max(i.mtime_ns,i.atime_ns) FROM inode i
WHERE i.ino>? AND i.ino<=? AND i.resident=1 AND i.blocks>0 AND i.nlink>0
  AND i.mode & {0o170000} = {stat.S_IFREG}
  AND EXISTS(SELECT 1 FROM object o WHERE o.ino=i.ino AND o.generation=i.generation)
  AND NOT EXISTS(SELECT 1 FROM journal j WHERE j.ino=i.ino)"""


class Evictor:
    """Keeps room free in *arena*. `run` must be running.

    *is_clean*: nothing is to be done in the tier for an inode. *standing*: what policy says of a file. *share*: of the
    arena, kept free at least; *ahead_s*: for how many seconds of writing.
    """

    def __init__(
        self,
        index: Index,
        arena: Arena,
        content: Content,
        objects: ObjectTable,
        fetcher: Fetcher,
        *,
        is_clean: Callable[[int], bool],
        standing: Callable[[int], Standing] = lambda ino: Standing.PLAIN,
        fault: Fault = no_fault,
        share: float = 0.05,
        ahead_s: float = 3.0,
    ) -> None:
        self._index = index
        self._arena = arena
        self._content = content
        self._objects = objects
        self._fetcher = fetcher
        self._is_clean = is_clean
        self._standing = standing
        self._fault = fault
        self._share = share
        self._ahead_s = ahead_s
        self._woken = trio.Event()
        self._freed = trio.Event()
        self._one_at_a_time = trio.Lock()
        self._candidates: deque[Candidate] = deque()
        self._scan_again_s = 0.0
        self._scanned_s = float("-inf")
        self._changed = True
        self._used_ns: OrderedDict[int, int] = OrderedDict()
        self._rate_bytes_s = 0.0
        self._last = (0.0, 0)  # when, bytes in use then
        self.to_come_bytes: Callable[[], int] = lambda: 0
        self.demands: dict[int, int] = {}  # room that somebody waits for, by whoever asks
        self.pressed = False
        self.on_pressure: list[Callable[[bool], None]] = []
        self.evicted_files = 0
        self.evicted_bytes = 0
        content.used.append(self.used)
        fetcher.make_room = self.make_room

    # what happens

    def used(self, ino: int) -> None:
        """Somebody has opened or closed a file."""
        self._changed = True
        self._used_ns[ino] = time.time_ns()
        self._used_ns.move_to_end(ino)
        if len(self._used_ns) > USED_KEPT:
            self._used_ns.popitem(last=False)

    def wake(self) -> None:
        """Look now: a writer has come, or something has become durable."""
        self._changed = True
        self._woken.set()

    async def run(self) -> None:
        """Keep the reserve free, until cancelled."""
        while True:
            self._woken = trio.Event()
            await self._look()
            with trio.move_on_after(self._pause_s()):
                await self._woken.wait()
            await trio.lowlevel.checkpoint()

    def _pause_s(self) -> float:
        if not (self._content.writing_inodes() or self.demands):
            return IDLE_LOOK_S
        return LOOK_BOUND_S if self._arena.is_bound else LOOK_S

    async def _look(self) -> None:
        space = self._arena.space()
        self._note_rate(space.used_bytes)
        reserve = reserve_bytes(space.size_bytes, self._share, self._rate_bytes_s, self._ahead_s)
        wanted = max(reserve, self.to_come_bytes()) + sum(self.demands.values())
        short_bytes = min(wanted, space.size_bytes) - space.free_bytes
        freed = await self.free(short_bytes) if short_bytes > 0 else 0
        self._press(freed < short_bytes)

    def _note_rate(self, used_bytes: int) -> None:
        now_s = trio.current_time()
        then_s, then_bytes = self._last
        self._last = now_s, used_bytes
        if now_s > then_s:
            rate = max(0.0, (used_bytes - then_bytes) / (now_s - then_s)) if then_s else 0.0
            self._rate_bytes_s = max(rate, self._rate_bytes_s * RATE_KEEPS)

    def _press(self, pressed: bool) -> None:
        if pressed == self.pressed:
            return
        self.pressed = pressed
        if pressed:
            log.info("the arena is nearly full of bytes that may not be dropped")
        for listener in self.on_pressure:
            listener(pressed)

    # room

    async def make_room(self, need_bytes: int, fits: bool) -> bool:
        """Wait until so much is free; False when it cannot be had in time.

        *fits*: others make room for it. Else it is part of a file that is larger than what should be taken from them.
        """
        deadline_s = trio.current_time() + ROOM_WAIT_S
        while True:
            short_bytes = need_bytes - self._arena.space().free_bytes
            if short_bytes <= 0:
                return True
            if await self.free(short_bytes, fits=fits) >= short_bytes:
                continue
            if trio.current_time() > deadline_s:
                return False
            await self.wait_freed(LOOK_S)

    async def wait_freed(self, timeout_s: float) -> None:
        """Return when something has been evicted, or after *timeout_s*."""
        with trio.move_on_after(timeout_s):
            await self._freed.wait()

    async def free(self, need_bytes: int, *, fits: bool = True) -> int:
        """Give up cached blocks and evict files: how many bytes that made free."""
        async with self._one_at_a_time:
            done = self._fetcher.give_up(need_bytes, opened=False)
            if not fits:
                done += self._fetcher.give_up(need_bytes - done, opened=True)
            if done < need_bytes:
                done += await self._evict_some(need_bytes - done)
            if done < need_bytes:
                done += self._fetcher.give_up(need_bytes - done, opened=True)
        if done:
            self._freed.set()
            self._freed = trio.Event()
        return done

    async def _evict_some(self, need_bytes: int) -> int:
        done = 0
        scanned = False
        while done < need_bytes:
            if not self._candidates:
                if scanned or not self._may_scan():
                    break
                await self._scan()
                scanned = True
                continue
            candidate = self._candidates.popleft()
            if self.why_not(candidate.ino) is None:
                done += await self._evict(candidate.ino)
        return done

    def _may_scan(self) -> bool:
        now_s = trio.current_time()
        if now_s - self._scanned_s > RESCAN_ANYWAY_S:
            return True
        return self._changed and now_s >= self._scan_again_s

    async def _scan(self) -> None:
        """Look for candidates, a bounded number of rows at a time."""
        began_s = trio.current_time()
        self._changed = False
        found: list[Candidate] = []
        last = self._index.db.execute("SELECT max(ino) FROM inode").fetchone()[0]
        for after in range(0, last, SCAN_INOS):
            rows = self._index.db.execute(_SQL_CANDIDATES, (after, after + SCAN_INOS)).fetchall()
            for ino, blocks, changed_ns in rows:
                if not self._content.is_open(ino):
                    used_ns = max(changed_ns, self._used_ns.get(ino, 0))
                    standing = self._standing(ino)
                    found.append(Candidate(ino, blocks * BLOCK_BYTES, used_ns, standing))
            await trio.lowlevel.checkpoint()
        self._candidates = deque(in_order(found))
        self._scanned_s = trio.current_time()
        took_s = self._scanned_s - began_s
        self._scan_again_s = self._scanned_s + max(RESCAN_S, took_s / SCAN_SHARE)

    # one file

    def why_not(self, ino: int) -> str | None:
        """Why a file may not be evicted; None when it may."""
        attr = self._index.attr(ino)
        if attr is None or not attr.nlink:
            return "it has no name any more"
        if not stat.S_ISREG(attr.mode):
            return "it is no regular file"
        if not attr.resident:
            return "its bytes are not in memory"
        if self._content.is_open(ino):
            return "it is open"
        if not self._is_clean(ino) or not self._objects.is_durable(ino, attr.generation):
            return "it is not durable yet"
        if self._standing(ino) >= Standing.PINNED:
            return "it is pinned"
        return None

    async def evict(self, ino: int) -> str | None:
        """Evict one file now; why that may not be, or None when its memory is free."""
        attr = self._index.attr(ino)
        if attr is not None and not attr.resident and not self._content.is_open(ino):
            self._fetcher.drop(ino)
            return None
        reason = self.why_not(ino)
        if reason is None:
            await self._evict(ino)
        return reason

    async def _evict(self, ino: int) -> int:
        try:
            fd = self._arena.open(ino, os.O_RDONLY)
        except FileNotFoundError:
            log.error("the bytes of inode %d were gone from the arena; they are in the tier", ino)
            fd = os.open(os.devnull, os.O_RDONLY)
        freed = os.fstat(fd).st_blocks * BLOCK_BYTES
        self._fault("evict:before_commit")
        with self._index.transaction():
            self._index.set_resident(ino, 0, 0)
        self._fault("evict:after_commit")
        self._arena.remove(ino)
        self._fault("evict:after_remove")
        self.evicted_files += 1
        self.evicted_bytes += freed
        # the memory goes with the last descriptor, and for a large file that takes a while
        await trio.to_thread.run_sync(os.close, fd)
        return freed

    async def tidy(self) -> None:
        """Remove what a worker that was killed has left of files that are not resident."""
        for position, ino in enumerate(self._arena.inodes()):
            attr = self._index.attr(ino)
            if attr is not None and not attr.resident and not self._fetcher.is_fetching(ino):
                self._arena.remove(ino)
            if position % 256 == 0:
                await trio.lowlevel.checkpoint()
