"""Making one row of the journal visible in the durable tier, and writing down that it is.

What it keeps true:
- Before the request that may make something visible the row is marked; after it, in one transaction, the object is
  noted and the row is gone. A crash in between is settled by asking the tier what is there.
- What is made visible is what its metadata say: bytes are digested as they are sent, and a file that has
  changed since is not completed.
- Each step may be executed again.
"""

from __future__ import annotations

import logging
import os
import stat

import trio

from fs.checksums import MIN_BLOCK_BYTES, Digests, digest, hash_file
from fs.journal import BEGUN, Kind, Row, State
from fs.objects import metadata_of, parse_metadata
from fs.objecttable import DurableObject
from fs.store import Store
from fs.tiers.tier import (
    ObjectInfo,
    TierObjectChanged,
    TierObjectMissing,
    TierUploadMissing,
)
from fs.types import Attr
from fs.upload import Ready, Upload

log = logging.getLogger("ckptfs.writeback")

LOST = "the bytes are neither in the arena nor in the durable tier"


class Committer:
    """Executes rows, one at a time within a tree."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._begun: set[int] = set()  # rows marked by this process
        self.committed_rows = 0
        self.committed_bytes = 0

    async def commit(self, row: Row, upload: Upload | None) -> None:
        """Execute a row, or leave it as it is when it is no longer what it was."""
        if row.committing == BEGUN and row.seq not in self._begun and not await self._settle(row):
            return
        if row.kind == Kind.DELETE:
            await self._delete(row)
        elif row.kind == Kind.COPY:
            await self._copy(row)
        elif row.kind == Kind.META:
            await self._meta(row)
        else:
            await self._put(row, upload)

    def needs_upload(self, row: Row) -> bool:
        """Whether a row is a file so large that its parts are sent ahead of its turn."""
        if row.kind != Kind.PUT or row.key.endswith("/"):
            return False
        attr = self._store.index.attr(row.ino)
        if attr is None or not stat.S_ISREG(attr.mode) or not attr.resident:
            return False
        return attr.size > self._store.sizes.single_put_bytes

    # crash

    async def _settle(self, row: Row) -> bool:
        """A row was marked by a worker that is gone. Whether there is still something to do."""
        if row.kind == Kind.DELETE:
            return True
        found = await self._head(row.key)
        digests = None if found is None else await self._digests_of(row)
        if found is not None and digests is not None and _is(found, row, digests):
            log.info("%s was committed before the worker ended", row.key)
            self._finish(row, found.size, found.etag, digests, None)
            return False
        with self._store.index.transaction():
            self._store.journal.uncommit(row)
        return False

    async def _digests_of(self, row: Row) -> Digests | None:
        """Of the generation that a row stands for; None when that is not to be had, or not a file's."""
        store = self._store
        attr = store.index.attr(row.ino)
        if attr is None or not stat.S_ISREG(attr.mode) or row.kind == Kind.META:
            return None
        if not attr.resident:
            return store.objects.digests(row.ino, row.generation)
        try:
            fd = store.arena.open(row.ino, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            digests, _ = await trio.to_thread.run_sync(
                lambda: hash_file(fd, attr.size), limiter=store.hashing
            )
        except EOFError:
            return None
        finally:
            os.close(fd)
        return digests

    async def _head(self, key: str) -> ObjectInfo | None:
        try:
            return await self._store.caller.call(
                key, "asking for", lambda: self._store.tier.head(key)
            )
        except TierObjectMissing:
            return None

    # steps

    def _begin(self, row: Row) -> bool:
        """Mark the row; False when it is no longer what it was."""
        store = self._store
        now = store.journal.row(row.seq)
        if now is None or now[:7] != row[:7] or now.state != State.LIVE:
            return False
        store.fault("commit:before_begin")
        if row.seq not in self._begun:
            with store.index.transaction():
                store.journal.begin_commit(row)
            self._begun.add(row.seq)
        store.fault("commit:begun")
        return True

    def _finish(
        self, row: Row, size: int, etag: str, digests: Digests | None, sent: Attr | None
    ) -> None:
        """It is visible. *sent*: the attributes that went with it; when they differ by now, they go again."""
        store = self._store
        store.fault("commit:visible")
        with store.index.transaction():
            store.objects.put(
                DurableObject(row.key, row.ino, row.generation, size, etag, store.now_ns())
            )
            if digests is not None:
                store.objects.set_digests(row.ino, row.generation, digests)
            store.journal.committed(row)
            attr = store.index.attr(row.ino)
            if attr is not None and attr.nlink and (sent is None or _stored(attr) != _stored(sent)):
                store.journal.meta(attr)
        self._begun.discard(row.seq)
        self.committed_rows += 1
        self.committed_bytes += size
        store.fault("commit:finished")

    def _drop(self, row: Row, why: str) -> None:
        log.error("%s cannot be made durable: %s", row.key, why)
        with self._store.index.transaction():
            self._store.journal.committed(row)
        self._begun.discard(row.seq)

    async def _put(self, row: Row, upload: Upload | None) -> None:
        store = self._store
        attr = store.index.attr(row.ino)
        if attr is None:
            self._drop(row, "its inode is gone")
        elif stat.S_ISREG(attr.mode) and not attr.resident:
            await self._put_elsewhere(row, attr)
        elif upload is not None and upload.ready is not None:
            await self._complete(row, upload, upload.ready)
        elif stat.S_ISREG(attr.mode):
            await self._put_small(row, attr)
        else:
            target = store.index.target(row.ino) if stat.S_ISLNK(attr.mode) else None
            await self._put_bytes(row, attr, target or b"", target)

    async def _put_small(self, row: Row, attr: Attr) -> None:
        try:
            data = await trio.to_thread.run_sync(
                lambda: self._read(row.ino, attr.size), limiter=self._store.hashing
            )
        except FileNotFoundError:
            self._drop(row, LOST)
            return
        if len(data) < attr.size:
            log.info("%s is being changed; its upload waits", row.key)
            await trio.sleep(0.1)
            return
        await self._put_bytes(row, attr, data, None)

    def _read(self, ino: int, size: int) -> bytes:
        fd = self._store.arena.open(ino, os.O_RDONLY)
        try:
            return os.pread(fd, size, 0) if size else b""
        finally:
            os.close(fd)

    async def _put_bytes(self, row: Row, attr: Attr, data: bytes, target: bytes | None) -> None:
        store = self._store
        digests = None
        if stat.S_ISREG(attr.mode):
            whole = digest(data)
            digests = Digests(len(data), whole, MIN_BLOCK_BYTES, whole if data else b"")
        meta = metadata_of(attr, digests, target)
        if not self._begin(row):
            return
        etag = await store.call(row, "uploading", lambda: store.tier.put(row.key, data, meta))
        self._finish(row, len(data), etag, digests, attr)

    async def _complete(self, row: Row, upload: Upload, ready: Ready) -> None:
        store = self._store
        if store.content.may_be_mapped(row.ino) and not await self._is_unchanged(row, ready):
            upload.ready = None
            return
        if not self._begin(row):
            return
        try:
            etag = await store.call(
                row,
                "completing the upload of",
                lambda: store.tier.complete(row.key, ready.upload_id, ready.parts),
            )
        except TierUploadMissing:
            found = await self._head(row.key)
            if found is None or not _is(found, row, ready.digests):
                log.warning("the upload of %s is gone from the tier; it begins anew", row.key)
                upload.ready = None
                return
            etag = found.etag
        with store.index.transaction():
            store.ledger.over(ready.entry_id)
        self._finish(row, ready.digests.size, etag, ready.digests, ready.attr)

    async def _is_unchanged(self, row: Row, ready: Ready) -> bool:
        """Whether stores through a mapping have left the bytes as they were sent."""
        store = self._store
        fd = store.arena.open(row.ino, os.O_RDONLY)
        try:
            digests, _ = await trio.to_thread.run_sync(
                lambda: hash_file(fd, ready.digests.size), limiter=store.hashing
            )
        except EOFError:
            return False
        finally:
            os.close(fd)
        return digests.whole == ready.digests.whole

    async def _put_elsewhere(self, row: Row, attr: Attr) -> None:
        """Another name for bytes that are in the tier only: a copy there."""
        sources = [
            found
            for found in self._store.objects.of(row.ino)
            if found.generation == row.generation and found.key != row.key
        ]
        if not sources:
            self._drop(row, LOST)
            return
        await self._copy_from(row, sources[0].key, sources[0].etag)

    async def _copy(self, row: Row) -> None:
        assert row.source is not None
        source = self._store.objects.get(row.source)
        await self._copy_from(row, row.source, None if source is None else source.etag)

    async def _copy_from(self, row: Row, source: str, etag: str | None) -> None:
        store = self._store
        attr = store.index.attr(row.ino)
        if attr is None:
            self._drop(row, "its inode is gone")
            return
        meta = self._meta_of(row, attr)
        if not self._begin(row):
            return
        try:
            made = await store.call(
                row, "copying to", lambda: store.tier.copy(source, row.key, meta, etag)
            )
        except (TierObjectMissing, TierObjectChanged) as error:
            await self._copy_failed(row, attr, error)
            return
        size = 0 if not stat.S_ISREG(attr.mode) else attr.size
        self._finish(row, size, made, None, attr)

    def _meta_of(self, row: Row, attr: Attr) -> dict[str, str]:
        store = self._store
        target = store.index.target(row.ino) if stat.S_ISLNK(attr.mode) else None
        digests = None
        if stat.S_ISREG(attr.mode):
            digests = store.objects.digests(row.ino, row.generation)
        return metadata_of(attr._replace(generation=row.generation), digests, target)

    async def _copy_failed(self, row: Row, attr: Attr, error: Exception) -> None:
        """The source is gone or another; what is in memory is uploaded instead."""
        if stat.S_ISREG(attr.mode) and not attr.resident:
            self._drop(row, f"{error}; {LOST}")
            return
        with self._store.index.transaction():
            self._store.journal.as_put(row)
        self._begun.discard(row.seq)

    async def _meta(self, row: Row) -> None:
        store = self._store
        attr = store.index.attr(row.ino)
        known = store.objects.get(row.key)
        if attr is None or known is None:
            with store.index.transaction():
                store.journal.committed(row)
            return
        meta = self._meta_of(row._replace(generation=known.generation), attr)
        if not self._begin(row):
            return
        try:
            etag = await store.call(
                row,
                "setting the attributes of",
                lambda: store.tier.copy(row.key, row.key, meta, known.etag),
            )
        except (TierObjectMissing, TierObjectChanged) as error:
            # somebody else's object, or an earlier copy whose answer was lost: the tier tells which
            found = await self._head(row.key)
            if (
                found is None
                or parse_metadata(found.meta, found.size).generation != known.generation
            ):
                await self._copy_failed(row, attr, error)
                return
            with store.index.transaction():
                store.objects.put(known._replace(etag=found.etag))
            return
        self._finish(row._replace(generation=known.generation), known.size, etag, None, attr)

    async def _delete(self, row: Row) -> None:
        store = self._store
        if not self._begin(row):
            return
        await store.call(row, "deleting", lambda: store.tier.delete(row.key))
        store.fault("commit:visible")
        with store.index.transaction():
            store.journal.committed(row)
        self._begun.discard(row.seq)
        self.committed_rows += 1
        store.fault("commit:finished")


def _is(found: ObjectInfo, row: Row, digests: Digests) -> bool:
    known = parse_metadata(found.meta, found.size)
    return known.generation == row.generation and known.digests == digests


def _stored(attr: Attr) -> tuple[int, int, int, int]:
    return attr.mode, attr.uid, attr.gid, attr.mtime_ns
