"""The bytes of one generation of a file, wherever in the durable tier they are at the moment.

What it keeps true:
- A failure that may pass is tried again, with growing waits and full jitter, until a deadline. Then, and at once
  where trying again cannot help, it is an error that names the object: never "no such file", never other bytes.
- Objects move (a file was renamed) and are replaced while somebody reads: which object holds the generation is looked
  up again before each attempt, and only bytes of the version that was noted are taken.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from fs.checksums import Digests
from fs.errors import FsError
from fs.index import Index
from fs.objects import parse_metadata
from fs.objecttable import DurableObject, ObjectTable
from fs.retry import Backoff
from fs.tiers.tier import (
    ObjectInfo,
    Tier,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
)
from fs.types import Attr

log = logging.getLogger("ckptfs.fetch")

T = TypeVar("T")
GONE_ATTEMPTS = 3
GONE_WAIT_S = 0.2
BAD_ATTEMPTS = 3


class Unreadable(FsError):
    """The bytes cannot be had. *final*: nor will they be by trying again soon."""

    def __init__(self, what: str, *, final: bool, code: int = errno.EIO) -> None:
        super().__init__(code, what)
        self.final = final


class Source:
    """Objects that hold one generation of an inode. *is_clean* says whether nothing is under way for it."""

    def __init__(
        self,
        tier: Tier,
        objects: ObjectTable,
        is_clean: Callable[[int], bool],
        limiter: trio.CapacityLimiter,
        attr: Attr,
    ) -> None:
        self._tier = tier
        self._objects = objects
        self._is_clean = is_clean
        self._limiter = limiter
        self._ino = attr.ino
        self._generation = attr.generation
        self._last: DurableObject | None = None

    def _object(self) -> DurableObject | None:
        rows = [row for row in self._objects.of(self._ino) if row.generation == self._generation]
        if rows:
            # the one that worked before, as long as it is there
            same = [row for row in rows if self._last and row.key == self._last.key]
            self._last = (same or rows)[0]
        return self._last

    @property
    def keys(self) -> set[str]:
        """Keys under which the generation lies, or lay last."""
        rows = self._objects.of(self._ino)
        keys = {row.key for row in rows if row.generation == self._generation}
        return keys or ({self._last.key} if self._last else set())

    async def ask(self, call: Callable[[DurableObject], T], *, timeout_s: float, what: str) -> T:
        """What *call* (run in a thread) returns at last. Raises Unreadable.

        TierBadBytes counts as damage: after `BAD_ATTEMPTS` it is final.
        """
        deadline = trio.current_time() + timeout_s
        backoff = Backoff()
        gone = bad = 0
        while True:
            found = self._object()
            if found is None:
                raise self._unreadable(
                    f"no object of the durable tier holds generation {self._generation} of "
                    f"inode {self._ino}",
                    final=True,
                )
            url = self._tier.url(found.key)
            try:
                return await trio.to_thread.run_sync(
                    call, found, limiter=self._limiter, abandon_on_cancel=True
                )
            except (TierObjectMissing, TierObjectChanged) as error:
                gone += 1
                wait_s = GONE_WAIT_S
                failed: TierError = error
                moving = self._object() != found or not self._is_clean(self._ino)
                over = gone >= GONE_ATTEMPTS and not moving
            except TierBadBytes as error:
                bad += 1
                wait_s = backoff.next_s()
                failed = error
                over = bad >= BAD_ATTEMPTS
                log.warning("%s: %s (attempt %d of %d)", url, error, bad, BAD_ATTEMPTS)
            except TierError as error:
                wait_s = min(backoff.next_s(), 5.0)
                failed = error
                over = False
                if backoff.attempts == 1:
                    log.warning("%s %s: %s; trying again", what, url, error)
                if isinstance(error, TierRefused):
                    wait_s = max(wait_s, 1.0)
            if over:
                raise self._unreadable(f"{what} {url}: {failed}", final=True)
            if trio.current_time() + wait_s > deadline:
                raise self._unreadable(
                    f"{what} {url}: {failed}; given up after {timeout_s:.0f} s", final=False
                )
            await trio.sleep(wait_s)

    def _unreadable(self, what: str, *, final: bool) -> Unreadable:
        log.error("%s; readers get EIO", what)
        return Unreadable(what, final=final)

    async def digests(self, index: Index, timeout_s: float) -> Digests | None:
        """Digests of the generation: from the index, or else from the object's metadata."""
        known = self._objects.digests(self._ino, self._generation)
        if known is not None:
            return known
        info = await self.ask(self._head, timeout_s=timeout_s, what="asking for")
        digests = parse_metadata(info.meta, info.size).digests
        if digests is not None:
            with index.transaction():
                self._objects.set_digests(self._ino, self._generation, digests)
        return digests

    def _head(self, found: DurableObject) -> ObjectInfo:
        info = self._tier.head(found.key)
        if info.etag != found.etag or info.size != found.size:
            raise TierObjectChanged(
                f"{self._tier.url(found.key)}: replaced by somebody else since it was found"
            )
        return info
