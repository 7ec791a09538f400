"""One large file on its way: hashed, its parts sent side by side, ready to be made visible.

What it keeps true:
- The digests that the object's metadata claim are those of the bytes that were sent: each part is digested as it
  leaves and compared. A file that changed meanwhile is begun anew, never completed.
- The upload is in the ledger before the tier is asked for it. After a crash the parts that the tier has are not
  sent again, if the file is still the same.
- Memory is one buffer for each part under way, whatever the file's size.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import trio

from fs.body import FileBody
from fs.checksums import Digests, hash_file
from fs.journal import Kind, Row
from fs.ledger import Entry, own_orphans
from fs.objects import metadata_of
from fs.store import Store
from fs.tiers.tier import Meta, Tier, TierRefused, TierUploadMissing
from fs.types import Attr

log = logging.getLogger("ckptfs.writeback")

AGAIN_S = 0.5


class Stale(Exception):
    """The file is no longer what it was when its upload began."""


class Ready(NamedTuple):
    """An upload with all its parts. *attr*: what its metadata were made from, None when that was before a crash."""

    entry_id: int
    upload_id: str
    parts: list[tuple[int, str]]
    attr: Attr | None
    digests: Digests


def part_bytes_for(size: int, wanted_bytes: int, max_parts: int) -> int:
    """The part size of a file: *wanted_bytes* (a power of two), doubled until *max_parts* are enough."""
    part_bytes = wanted_bytes
    while size > part_bytes * max_parts:
        part_bytes *= 2
    return part_bytes


class Upload:
    """The upload of what *row* stands for. `run` ends with `ready` set, or when it is told to `stop`."""

    def __init__(self, store: Store, row: Row) -> None:
        self.row = row
        self.ready: Ready | None = None
        self.done = trio.Event()
        self.sent_bytes = 0
        self.size = 0
        self.entry_id = 0
        self._store = store
        self._scope = trio.CancelScope()
        self._stopping = False

    def stop(self) -> None:
        """It is of no use any more. What was begun is left to `Janitor`."""
        self._stopping = True
        self._scope.cancel()

    async def run(self) -> None:
        """Until all parts are there, however often the tier fails or the file changes."""
        try:
            with self._scope:
                while self.ready is None:
                    try:
                        self.ready = await self._attempt()
                    except (Stale, TierUploadMissing, EOFError, InterruptedError) as error:
                        log.info("upload of %s begins anew: %s", self.row.key, error or "stopped")
                        self._forget_entry()
                        await trio.sleep(AGAIN_S)
                    except FileNotFoundError:
                        log.error("%s: its bytes are gone from the arena", self.row.key)
                        await trio.sleep_forever()
                    except Exception:
                        log.exception("upload of %s failed; it is tried again", self.row.key)
                        await trio.sleep(AGAIN_S)
        finally:
            self.done.set()

    def _forget_entry(self) -> None:
        # its digests fit no longer: nothing matches it, so the janitor aborts it
        if self.entry_id:
            index = self._store.index
            with index.transaction():
                index.db.execute("UPDATE upload SET ino=0 WHERE id=?", (self.entry_id,))
        self.entry_id = 0

    async def _attempt(self) -> Ready:
        store, row = self._store, self.row
        attr = store.index.attr(row.ino)
        if attr is None:
            raise FileNotFoundError(row.ino)
        limits = store.tier.limits
        part_bytes = part_bytes_for(attr.size, store.sizes.part_bytes, limits.max_parts)
        fd = store.arena.open(row.ino, os.O_RDONLY)
        try:
            digests, wanted = await trio.to_thread.run_sync(
                lambda: hash_file(
                    fd, attr.size, part_bytes=part_bytes, stop=lambda: self._stopping
                ),
                limiter=store.hashing,
            )
            store.fault("upload:hashed")
            self.size = attr.size
            entry_id, upload_id, sent, fresh = await self._begin(attr, digests, part_bytes)
            self.entry_id = entry_id
            await self._send(fd, upload_id, part_bytes, wanted, sent)
        finally:
            os.close(fd)
        return Ready(entry_id, upload_id, sorted(sent.items()), attr if fresh else None, digests)

    async def _begin(
        self, attr: Attr, digests: Digests, part_bytes: int
    ) -> tuple[int, str, dict[int, str], bool]:
        """(ledger id, upload id, ETags of parts that are there, whether it was begun now)."""
        store, row = self._store, self.row
        for entry in store.ledger.entries():
            if _continues(entry, row, digests, part_bytes):
                assert entry.upload_id is not None
                sent = await self._resume(entry, attr.size, part_bytes)
                return entry.id, entry.upload_id, sent, False
        before = await store.call(row, "listing uploads of", self._listed)
        entry_id = store.ledger.begin(
            row.key, row.ino, row.generation, digests.whole, part_bytes, before, store.now_ns()
        )
        self.entry_id = entry_id
        store.fault("upload:intended")
        meta = metadata_of(attr, digests)
        (entry,) = (entry for entry in store.ledger.entries() if entry.id == entry_id)
        upload_id = await store.call(
            row, "beginning the upload of", _starting(store.tier, entry, meta)
        )
        store.fault("upload:started")
        store.ledger.named(entry_id, upload_id)
        store.fault("upload:named")
        return entry_id, upload_id, {}, True

    def _listed(self) -> list[str] | None:
        try:
            found = self._store.tier.uploads(self.row.key)
            return [upload.upload_id for upload in found if upload.key == self.row.key]
        except TierRefused:  # who may not list may still begin
            return None

    async def _resume(self, entry: Entry, size: int, part_bytes: int) -> dict[int, str]:
        store, upload_id = self._store, entry.upload_id
        assert upload_id is not None
        self.entry_id = entry.id
        known = store.ledger.parts(entry.id)
        there = await store.call(
            self.row, "listing the parts of", lambda: store.tier.parts(entry.key, upload_id)
        )
        sent = {}
        for part in there:
            expected = min(part_bytes, size - (part.number - 1) * part_bytes)
            if known.get(part.number) == part.etag and part.size == expected:
                sent[part.number] = part.etag
        log.info("upload of %s goes on: %d parts are there", entry.key, len(sent))
        return sent

    async def _send(
        self, fd: int, upload_id: str, part_bytes: int, wanted: list[bytes], sent: dict[int, str]
    ) -> None:
        numbers = [number for number in range(1, len(wanted) + 1) if number not in sent]
        self.sent_bytes = self.size - sum(
            min(part_bytes, self.size - (number - 1) * part_bytes) for number in numbers
        )
        room = trio.Semaphore(self._store.caller.limiter.total_tokens.__ceil__())

        given_up: list[Exception] = []

        async def send(number: int) -> None:
            offset = (number - 1) * part_bytes
            body = FileBody(fd, offset, min(part_bytes, self.size - offset))
            try:
                etag = await self._send_part(upload_id, number, body, wanted[number - 1])
            except (Stale, TierUploadMissing) as error:
                given_up.append(error)
                nursery.cancel_scope.cancel()
                return
            sent[number] = etag
            self.sent_bytes += len(body)
            room.release()

        async with trio.open_nursery() as nursery:
            for number in numbers:
                await room.acquire()
                nursery.start_soon(send, number)
        if given_up:
            raise given_up[0]

    async def _send_part(self, upload_id: str, number: int, body: FileBody, wanted: bytes) -> str:
        store, row = self._store, self.row

        def put() -> str:
            body.seek(0)
            return store.tier.put_part(row.key, upload_id, number, body)

        etag = await store.call(row, f"uploading part {number} of", put)
        if body.digest() != wanted:
            raise Stale("the file is being changed")
        store.ledger.sent(self.entry_id, number, etag)
        store.fault("upload:part")
        return etag


def _starting(tier: Tier, entry: Entry, meta: Meta) -> Callable[[], str]:
    """Begins the upload; when tried again, after giving up what an attempt began whose answer was lost."""
    asked = False

    def start() -> str:
        nonlocal asked
        if asked and entry.before is not None:
            with contextlib.suppress(TierRefused):  # who may not list or abort may still begin
                for upload_id in own_orphans(entry, tier.uploads(entry.key)):
                    tier.abort(entry.key, upload_id)
                    log.info("upload of %s was begun twice; one is aborted", entry.key)
        asked = True
        return tier.start(entry.key, meta)

    return start


def _continues(entry: Entry, row: Row, digests: Digests, part_bytes: int) -> bool:
    mine = (entry.key, entry.ino, entry.generation) == (row.key, row.ino, row.generation)
    same = (entry.whole, entry.part_bytes) == (digests.whole, part_bytes)
    return mine and same and entry.upload_id is not None


class Janitor:
    """Aborts the uploads in the ledger that no row needs any more; nobody else's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.aborted = 0

    async def sweep(self, in_use: set[int]) -> None:
        """Once over the ledger. *in_use*: ledger ids of uploads under way."""
        entries = self._store.ledger.entries()
        # their ids are not known yet: what is listed may be theirs
        beginning = {each.key for each in entries if each.id in in_use and each.upload_id is None}
        for entry in entries:
            if entry.id in in_use or self._is_wanted(entry):
                continue
            if entry.upload_id is None and entry.key in beginning:
                continue
            if entry.upload_id is None:
                await self._abort_unnamed(entry)
            else:
                await self._abort(entry, entry.upload_id)
            self._store.fault("janitor:aborted")
            with self._store.index.transaction():
                self._store.ledger.over(entry.id)

    def _is_wanted(self, entry: Entry) -> bool:
        if entry.upload_id is None:
            return False
        return any(
            row.kind == Kind.PUT and (row.ino, row.generation) == (entry.ino, entry.generation)
            for row in self._store.journal.at(entry.key)
        )

    async def _abort(self, entry: Entry, upload_id: str) -> None:
        tier = self._store.tier
        await self._store.caller.call(
            entry.key, "aborting the upload of", lambda: tier.abort(entry.key, upload_id)
        )
        self.aborted += 1
        log.info("upload of %s (generation %d) aborted", entry.key, entry.generation)

    async def _abort_unnamed(self, entry: Entry) -> None:
        listed = await self._store.caller.call(
            entry.key, "listing uploads of", lambda: list(self._store.tier.uploads(entry.key))
        )
        known = {each.upload_id for each in self._store.ledger.entries()}
        unknown = [found for found in listed if found.upload_id not in known]
        for upload_id in own_orphans(entry, unknown):
            await self._abort(entry, upload_id)
