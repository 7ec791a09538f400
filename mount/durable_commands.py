"""The control socket's commands about the durable tier: wait, persist, evict, prefetch, verify, drain, unsaved.

What it keeps true: nothing here runs for longer than its client listens, and a walk over many files lets the
filesystem's requests in between. What goes wrong with one file is told, and the others are gone on with.
"""

from __future__ import annotations

import math
import stat
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import trio

from fs.durable import SKIPPED, Durable, Unsaved
from fs.errors import CkptfsError, FsError
from fs.journal import State
from fs.objects import key_part
from fs.retry import Trouble
from fs.types import Attr
from fs.vfs import Vfs
from mount.control import (
    PAGE_ENTRIES,
    Answer,
    DurableSide,
    FileResult,
    Job,
    Long,
    Quick,
    Request,
    UnsavedReport,
    walk,
)
from mount.draining import LISTED, Drainer, below

SIDE_BY_SIDE = 4  # files at once
BATCH = 100  # results in one line
LOOK_S = 1.0
WRITERS_LOOK_S = 0.1
TOLD = 20  # troubles, and uploads under way
GONE_ERRNOS = (2, 116)  # ENOENT, ESTALE: removed meanwhile


class Fetching(Protocol):
    """Of fs.fetch.Fetcher."""

    fetched_bytes: int

    async def ensure_resident(
        self, ino: int, progress: Callable[[int, int], None] | None = None
    ) -> None: ...


class Evicting(Protocol):
    """Of fs.evict.Evictor."""

    evicted_files: int
    evicted_bytes: int

    async def evict(self, ino: int) -> str | None: ...


class Finding(Protocol):
    """What verifying one file found: *outcome* "ok", "damaged", "repaired", "changed" or "unknown", and in words."""

    @property
    def outcome(self) -> str: ...

    @property
    def text(self) -> str: ...


class Verifying(Protocol):
    """Re-reads every copy of a file and compares."""

    async def verify(
        self, ino: int, progress: Callable[[int, int], None] | None = None
    ) -> Finding: ...


class DurableCommands(DurableSide):
    """Of one mount that has a durable tier. *drain_s*: how long `drain` waits unless it is told."""

    def __init__(
        self,
        vfs: Vfs,
        durable: Durable,
        fetcher: Fetching,
        evictor: Evicting,
        verifier: Verifying | None = None,
        *,
        drainer: Drainer | None = None,
        drain_s: float = 60.0,
    ) -> None:
        self._vfs = vfs
        self._durable = durable
        self._fetcher = fetcher
        self._evictor = evictor
        self._verifier = verifier
        self._drain_s = drain_s
        self.drainer = drainer or Drainer(durable)

    def quick_commands(self) -> dict[str, Quick]:
        """Commands that are answered at once."""
        return {"unsaved": self._unsaved, "persist": self._persist}

    def long_commands(self) -> dict[str, Long]:
        """Commands that may take their time."""
        return {
            "wait": self._wait,
            "evict": self._evict,
            "prefetch": self._prefetch,
            "verify": self._verify,
            "drain": self._drain,
        }

    # status

    def status(self) -> dict[str, Any]:
        """How the durable tier is doing."""
        troubles = self._durable.troubles()
        tier = self._durable.store.tier.describe()
        return (
            {"tier": tier}
            | self._progress()
            | {
                "troubles": [_plain(trouble) for trouble in troubles[:TOLD]],
                "trouble_count": len(troubles),
                "draining": self._durable.writeback.schedule.draining,
                "evicted_files": self._evictor.evicted_files,
                "evicted_bytes": self._evictor.evicted_bytes,
                "fetched_bytes": self._fetcher.fetched_bytes,
            }
        )

    def _progress(self) -> dict[str, Any]:
        progress = self._durable.progress()
        now_ns = time.time_ns()
        uploading = [
            {"key": key, "sent_bytes": sent, "size_bytes": size}
            for key, sent, size in progress.uploading[:TOLD]
        ]
        first = next(iter(self._durable.troubles()), None)
        oldest_ns = progress.oldest_ns
        return {
            "pending_rows": progress.pending_rows,
            "pending_bytes": progress.pending_bytes,
            "oldest_age_s": None if oldest_ns is None else max(0, now_ns - oldest_ns) / 1e9,
            "committed_rows": progress.committed_rows,
            "committed_bytes": progress.committed_bytes,
            "uploading": uploading,
            "retries": progress.retries,
            "aborted_uploads": progress.aborted_uploads,
            "trouble": None if first is None else _plain(first),
        }

    def describe(self, attr: Attr) -> tuple[str, int, str]:
        """A file's state, since when it waits (ns; 0: it does not), and digest."""
        state = self._durable.state_of(attr)
        since_ns = self._durable.since_ns(attr) or 0
        return state, since_ns, (self._durable.digest_of(attr) or "" if state else "")

    # what is not durable

    async def _target(self, path: bytes) -> tuple[Attr, str]:
        attr, _ = await walk(self._vfs, path)
        parts = (part for part in path.split(b"/") if part not in (b"", b"."))
        return attr, "/".join(key_part(part) for part in parts)

    async def _unsaved(self, request: Request) -> Answer:
        """A page of it, in order; what is being written comes with the first."""
        _, key = await self._target(request.path)
        after = max(0, request.after_cookie)
        found = list(self._durable.unsaved_written(key)) if after == 0 else []
        page = self._durable.unsaved_page(key, after, PAGE_ENTRIES)
        found += [unsaved for _, unsaved in page]
        return Answer(
            unsaved=[self._report(unsaved) for unsaved in found],
            next_cookie=page[-1][0] if len(page) == PAGE_ENTRIES else 0,
        )

    def _report(self, unsaved: Unsaved) -> UnsavedReport:
        reason = unsaved.reason
        troubles = self._durable.troubles() if not reason else []
        if troubles:
            reason = f"it waits; {troubles[0].key}: {troubles[0].reason}"
        return UnsavedReport(
            unsaved.key,
            unsaved.size,
            unsaved.since_ns,
            unsaved.state,
            reason or "it is its turn later",
        )

    async def _left(self, key: str) -> Answer:
        """The first of what is not durable, of what policy wants and of what it does not, and how many there are."""
        listed: list[UnsavedReport] = []
        counts = {"unsaved": 0, "skipped": 0}
        async for unsaved in below(self._durable, key):
            kind = "skipped" if unsaved.state == SKIPPED else "unsaved"
            counts[kind] += 1
            if counts[kind] <= LISTED:
                listed.append(self._report(unsaved))
        return Answer(unsaved=listed, counts=counts)

    # wait, persist, drain

    async def _wait(self, request: Request, job: Job) -> Answer:
        _, key = await self._target(request.path)
        if request.until == "local":
            return Answer()
        if request.until != "durable":
            return Answer(error=f"cannot wait until {request.until!r}: local or durable")
        job.look = self._progress
        self._durable.writeback.hurry()
        timeout_s = math.inf if request.timeout_s is None else max(0.0, request.timeout_s)
        with trio.move_on_after(timeout_s):
            if await self._saved_or_skipped(key):
                return Answer()
        answer = await self._left(key)
        answer.timed_out = not answer.counts["skipped"]
        return answer

    async def _saved_or_skipped(self, key: str) -> bool:
        """Return when it is durable, or (False) part of it is not wanted by policy."""
        writeback = self._durable.writeback
        while not self._is_skipped(key):
            with trio.move_on_after(LOOK_S):
                await writeback.wait_until(lambda: self._durable.is_saved(key))
                if not self._is_written(key):
                    return True
                await trio.sleep(WRITERS_LOOK_S)
        return False

    def _is_written(self, key: str) -> bool:
        store = self._durable.store
        return any(
            not key or name == key or name.startswith(key + "/")
            for ino in store.content.writing_inodes()
            for name in store.paths.keys(ino)
        )

    def _is_skipped(self, key: str) -> bool:
        query = (
            "SELECT 1 FROM journal WHERE state=? AND (?='' OR key=? OR (key>=? AND key<?)) LIMIT 1"
        )
        values = (State.SKIPPED, key, key, key + "/", key + "0")
        return self._durable.store.index.db.execute(query, values).fetchone() is not None

    async def _persist(self, request: Request) -> Answer:
        _, key = await self._target(request.path)
        return Answer(counts={"changes": self._durable.persist(key)})

    async def _drain(self, request: Request, job: Job) -> Answer:
        timeout_s = self._drain_s if request.timeout_s is None else max(0.0, request.timeout_s)
        job.look = self._progress
        drained = await self.drainer.drained(timeout_s)
        answer = await self._left("")
        answer.timed_out = not drained
        return answer

    # files

    async def _files(
        self, path: bytes, attr: Attr, *, ask: bool
    ) -> AsyncIterator[tuple[bytes, Attr]]:
        """Regular files at or below a path. *ask*: also those that only the tier knows of so far."""
        if stat.S_ISREG(attr.mode):
            yield path, attr
        waiting = [(path, attr.ino)] if stat.S_ISDIR(attr.mode) else []
        catalog = self._vfs.catalog
        while waiting:
            directory, ino = waiting.pop()
            if ask:
                await catalog.listed(ino)
            cookie = 0
            while rows := catalog.scan(ino, cookie, PAGE_ENTRIES):
                await trio.lowlevel.checkpoint()
                for row in rows:
                    name = row.name if directory in (b"", b".") else directory + b"/" + row.name
                    if stat.S_ISDIR(row.attr.mode):
                        waiting.append((name, row.attr.ino))
                    elif stat.S_ISREG(row.attr.mode):
                        yield name, row.attr
                cookie = rows[-1].cookie

    async def _evict(self, request: Request, job: Job) -> Answer:
        attr, _ = await walk(self._vfs, request.path)
        if stat.S_ISDIR(attr.mode) and not request.recursive:
            return Answer(error="it is a directory: pass -r for all that is below it")
        counts = {"evicted": 0, "evicted_bytes": 0, "kept": 0}
        job.look = lambda: dict(counts)
        results = _Results(job)
        async for path, found in self._files(request.path, attr, ask=False):
            reason = await self._evictor.evict(found.ino)
            if not found.resident:
                continue
            if reason is None:
                counts["evicted"] += 1
                counts["evicted_bytes"] += found.size
            else:
                counts["kept"] += 1
                await results.add(FileResult(path, "kept", reason, found.size))
        await results.flush()
        return Answer(counts=counts)

    async def _prefetch(self, request: Request, job: Job) -> Answer:
        attr, _ = await walk(self._vfs, request.path)
        wanted = [
            (path, found)
            async for path, found in self._files(request.path, attr, ask=True)
            if not found.resident
        ]
        total_bytes = sum(found.size for _, found in wanted)
        if total_bytes > self._vfs.space().size_bytes:
            return Answer(
                error=f"{total_bytes} bytes are to be fetched, and the arena has room for "
                f"{self._vfs.space().size_bytes} in all: choose less, or mount with a larger --size"
            )

        async def fetch(path: bytes, found: Attr, tell: Callable[[int, int], None]) -> None:
            await self._fetcher.ensure_resident(found.ino, tell)

        return await self._each(job, wanted, fetch)

    async def _verify(self, request: Request, job: Job) -> Answer:
        verifier = self._verifier
        if verifier is None:
            return Answer(error="this mount cannot verify")
        attr, _ = await walk(self._vfs, request.path)
        wanted = [each async for each in self._files(request.path, attr, ask=True)]
        results = _Results(job)

        async def verify(path: bytes, found: Attr, tell: Callable[[int, int], None]) -> None:
            finding = await verifier.verify(found.ino, tell)
            await results.add(FileResult(path, finding.outcome, finding.text, found.size))

        answer = await self._each(job, wanted, verify)
        await results.flush()
        return answer

    async def _each(self, job: Job, wanted: list[tuple[bytes, Attr]], work: Any) -> Answer:
        """Do something to some files at once; how many it was done to, and what it failed for."""
        counts = {
            "files": len(wanted),
            "bytes": sum(found.size for _, found in wanted),
            "done": 0,
            "done_bytes": 0,
            "failed": 0,
        }
        under_way: dict[int, int] = {}

        def look() -> dict[str, Any]:
            return counts | {"done_bytes": counts["done_bytes"] + sum(under_way.values())}

        job.look = look
        results = _Results(job)
        rest = iter(wanted)

        async def some() -> None:
            for path, found in rest:
                under_way[found.ino] = 0

                def tell(done: int, _: int, ino: int = found.ino) -> None:
                    under_way[ino] = done

                try:
                    await work(path, found, tell)
                    counts["done"] += 1
                except FsError as error:
                    if error.errno in GONE_ERRNOS:
                        counts["done"] += 1
                    else:
                        counts["failed"] += 1
                        text = error.strerror or str(error)
                        await results.add(FileResult(path, "failed", text, found.size))
                except CkptfsError as error:
                    counts["failed"] += 1
                    await results.add(FileResult(path, "failed", str(error), found.size))
                finally:
                    under_way.pop(found.ino, None)
                counts["done_bytes"] += found.size

        async with trio.open_nursery() as nursery:
            for _ in range(SIDE_BY_SIDE):
                nursery.start_soon(some)
        await results.flush()
        return Answer(counts=counts)


class _Results:
    """Results on their way to the client, some in a line."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._waiting: list[FileResult] = []

    async def add(self, result: FileResult) -> None:
        """One more."""
        self._waiting.append(result)
        if len(self._waiting) >= BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Send what waits."""
        results, self._waiting = self._waiting, []
        if results:
            await self._job.send(Answer(final=False, results=results))


def _plain(trouble: Trouble) -> dict[str, Any]:
    return {
        "key": trouble.key,
        "reason": trouble.reason,
        "since_ns": trouble.since_ns,
        "age_s": max(0, time.time_ns() - trouble.since_ns) / 1e9,
        "attempts": trouble.attempts,
        "permanent": trouble.permanent,
    }
