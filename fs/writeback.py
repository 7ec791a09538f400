"""Writeback: works off the journal, in order within each top-level tree, side by side across trees.

What it keeps true:
- Within a tree rows become visible strictly one after the other. Large files' parts are sent ahead of their turn.
- A deletion, and a file at the top, wait for every earlier row of all trees: what they follow from may lie anywhere.
- What cannot be done for a reason of this node's own (a full index, a bug) is logged and tried again: the mount
  goes on.
- A row that changed while it was under way (rewritten, renamed, removed) is given up, and what was begun of it aborted.
- Nothing here is on the way of a local operation: who changes the namespace writes a row, and pokes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from fs.commit import Committer
from fs.journal import Journal, Kind, Row
from fs.schedule import Schedule
from fs.store import Store
from fs.upload import Janitor, Upload

log = logging.getLogger("ckptfs.writeback")

ROUND_S = 0.02  # changes that come together are looked at together
LOOK_S = 1.0  # policy depends on the time


class Progress(NamedTuple):
    """What is left to do. *oldest_ns*: since when the oldest un-durable thing is so; None: nothing is."""

    pending_rows: int
    pending_bytes: int
    oldest_ns: int | None
    committed_rows: int
    committed_bytes: int
    uploading: list[tuple[str, int, int]]  # key, bytes sent, size
    retries: int
    aborted_uploads: int


class Writeback:
    """Runs until cancelled; whatever it was doing is found again in the journal and the ledger."""

    def __init__(self, store: Store, schedule: Schedule) -> None:
        self.schedule = schedule
        self._store = store
        self._journal: Journal = store.journal
        self._committer = Committer(store)
        self._janitor = Janitor(store)
        self._uploads: dict[int, Upload] = {}
        self._trees: set[str] = set()
        self._frontier: dict[str, int] = {}
        self._poked = trio.Event()
        self._round = trio.Event()
        self._progress = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._journal.listeners.append(self.poke)

    def poke(self) -> None:
        """There may be something to do."""
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._sweeps)
            while True:
                self._stop_useless()
                self._start_trees(nursery)
                self._tell()
                self._round.set()
                self._round = trio.Event()
                with trio.move_on_after(LOOK_S):
                    await self._poked.wait()
                await trio.sleep(ROUND_S)
                self._poked = trio.Event()

    def _free(self) -> None:
        for ino in self._journal.take_unpinned():
            self._store.freed(ino)

    def _stop_useless(self) -> None:
        for seq, upload in list(self._uploads.items()):
            now = self._journal.row(seq)
            if now is None or now[:7] != upload.row[:7]:
                upload.stop()
                del self._uploads[seq]

    def _start_trees(self, nursery: trio.Nursery) -> None:
        new = [tree for tree in self._journal.trees() if tree not in self._trees]
        for tree in new:  # all frontiers first: a deletion must see every tree that is before it
            self._look(tree)
        for tree in new:
            self._trees.add(tree)
            nursery.start_soon(self._tree, tree)

    def _look(self, tree: str) -> list[Row]:
        """The rows of a tree that may go, in order."""
        rows = self.schedule.ready(tree, self._store.sizes.window_rows)
        if rows:
            self._frontier[tree] = rows[0].seq
        else:
            self._frontier.pop(tree, None)
        return rows

    # trees

    async def _tree(self, tree: str) -> None:
        try:
            while True:
                rows = self._look(tree)
                if rows:
                    self._send_ahead(rows)
                    await self._guarded(functools.partial(self._one, rows[0]))
                    self._tell()
                elif self._journal.in_tree(tree, 0, 1):
                    await self._round.wait()  # all is held back
                else:
                    return
        finally:
            self._trees.discard(tree)
            self._frontier.pop(tree, None)
            self._tell()

    async def _guarded(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step; one that fails is no reason to end what serves the mount."""
        try:
            await step()
        except Exception:
            log.exception("writeback failed in a step; it is tried again")
            await trio.sleep(LOOK_S)

    def _tell(self) -> None:
        self._free()
        self._progress.set()
        self._progress = trio.Event()

    async def _one(self, row: Row) -> None:
        upload = None
        if self._committer.needs_upload(row):
            upload = self._upload(row)
            await upload.done.wait()
            self._uploads.pop(row.seq, None)
            if upload.ready is None:
                return
        if not await self._its_turn(row):
            return
        await self._committer.commit(row, upload)
        self._store.stored()
        if upload is not None and upload.ready is not None and self._journal.row(row.seq):
            self._uploads.setdefault(row.seq, upload)  # not committed: its parts are of use still

    async def _its_turn(self, row: Row) -> bool:
        """Wait for what must be visible before it; False when it is no longer what it was."""
        while True:
            now = self._journal.row(row.seq)
            if now is None or now[:7] != row[:7]:
                return False
            if not self._waits(row):
                return True
            await self._progress.wait()

    def _waits(self, row: Row) -> bool:
        if row.kind != Kind.META and self._store.holds(row.key):
            return True
        if (row.kind == Kind.DELETE or row.tree == "") and any(
            seq < row.seq for tree, seq in self._frontier.items() if tree != row.tree
        ):
            return True
        if row.kind == Kind.COPY and row.source is not None:
            return self._journal.precedes(row.source, row.seq)
        return self._journal.waits_for_copy(row.key, row.seq)

    # uploads ahead

    def _send_ahead(self, rows: list[Row]) -> None:
        for row in rows:
            if len(self._uploads) >= self._store.sizes.uploads:
                return
            if self._committer.needs_upload(row) and not row.committing:
                self._upload(row)

    def _upload(self, row: Row) -> Upload:
        upload = self._uploads.get(row.seq)
        if upload is None or upload.row[:7] != row[:7]:
            if upload is not None:
                upload.stop()
            upload = self._uploads[row.seq] = Upload(self._store, row)
            assert self._nursery is not None
            self._nursery.start_soon(upload.run)
        return upload

    async def _sweeps(self) -> None:
        while True:
            in_use = {upload.entry_id for upload in self._uploads.values()}
            await self._guarded(functools.partial(self._janitor.sweep, in_use))
            await trio.sleep(LOOK_S)

    # waiting

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when *condition* holds; it is asked after each commit."""
        while not condition():
            await self._progress.wait()

    def is_uploading(self, row: Row) -> bool:
        """Whether bytes of a row are on their way."""
        return row.seq in self._uploads or bool(row.committing)

    def hurry(self) -> None:
        """Try again at once what waits for the tier."""
        self._store.caller.hurry()
        self.poke()

    def progress(self) -> Progress:
        """What is left, and what was done."""
        rows, size, oldest_ns = self._journal.totals()
        uploading = [
            (upload.row.key, upload.sent_bytes, upload.size) for upload in self._uploads.values()
        ]
        return Progress(
            rows,
            size,
            oldest_ns,
            self._committer.committed_rows,
            self._committer.committed_bytes,
            uploading,
            self._store.caller.retries,
            self._janitor.aborted,
        )
