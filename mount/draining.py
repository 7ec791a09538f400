"""Draining: upload now whatever policy would still let wait, for a bounded time.

What it keeps true: policy holds nothing back as long as somebody drains, and does again when the last one is done or
has given up. What policy does not want at all is not uploaded for that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import trio

from fs.durable import SKIPPED, Durable, Unsaved
from fs.journal import State

log = logging.getLogger("ckptfs.drain")

LISTED = 20  # of what is left
HURRY_S = 2.0  # somebody waits: what failed is tried again sooner than it would be
PAGE_ROWS = 256


class Drainer:
    """For one durable tier."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._count = 0

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Policy holds nothing back inside."""
        writeback = self._durable.writeback
        self._count += 1
        writeback.schedule.draining = True
        writeback.hurry()
        try:
            yield
        finally:
            self._count -= 1
            writeback.schedule.draining = self._count > 0
            writeback.poke()

    async def drained(self, timeout_s: float) -> bool:
        """Whether everything that policy wants was durable within *timeout_s*."""
        writeback = self._durable.writeback
        with self.draining(), trio.move_on_after(timeout_s):
            while not self._is_done():
                with trio.move_on_after(HURRY_S):
                    await writeback.wait_until(self._is_done)
                writeback.hurry()
        return self._is_done()

    def _is_done(self) -> bool:
        query = "SELECT 1 FROM journal WHERE state=? LIMIT 1"
        row = self._durable.store.index.db.execute(query, (State.LIVE,)).fetchone()
        return row is None

    async def before_the_end(self, timeout_s: float) -> int:
        """For a supervisor that is about to stop: drain, log what is left; how much that is."""
        log.info("draining for at most %.0f s", timeout_s)
        if await self.drained(timeout_s):
            log.info("everything is durable")
            return 0
        left = 0
        async for unsaved in below(self._durable, ""):
            if unsaved.state == SKIPPED:
                continue
            left += 1
            if left <= LISTED:
                log.warning("not durable: %s (%s)", unsaved.key, unsaved.reason or unsaved.state)
        log.warning("%d changes are not durable; they are kept, a later mount goes on", left)
        return left


async def below(durable: Durable, prefix: str) -> AsyncIterator[Unsaved]:
    """What is not durable at or below a key, each key once; others get their turn meanwhile."""
    seen: set[tuple[str, bool]] = set()
    found = list(durable.unsaved_written(prefix))
    after_seq = 0
    while True:
        for unsaved in found:
            what = unsaved.key, unsaved.state == SKIPPED
            if what not in seen:
                seen.add(what)
                yield unsaved
        await trio.lowlevel.checkpoint()
        page = durable.unsaved_page(prefix, after_seq, PAGE_ROWS)
        if not page:
            return
        found = [unsaved for _, unsaved in page]
        after_seq = page[-1][0]
