"""Verifying a file: every copy of its bytes is read again and held against its digests.

What it keeps true:
- A copy is the backing file, and each object that holds the current generation (one for each name). All of a copy is
  read; what is wrong is told by block. A block of an object that came wrong is read once more before it is called so.
- What moves meanwhile (written, renamed, uploaded) is looked at again, and told as "changed" when it does not come to
  rest. It is never called damaged for that.
- What cannot be read for now is "unknown", not damaged, and never whole.
- Nothing is repaired here, and nothing is changed.

Memory: `fs.rereading` says how much for one file; the caller decides how many files at once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

import trio

from fs.arena import Arena
from fs.asking import Asker
from fs.checksums import Digests, block_bytes_for, hash_file
from fs.content import Content
from fs.errors import FsError
from fs.index import Index
from fs.objects import parse_metadata
from fs.objecttable import DurableObject, ObjectTable
from fs.rereading import digest_of_block, digests_of_object
from fs.tiers.tier import (
    ObjectInfo,
    Tier,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
)
from fs.types import Attr

OK, DAMAGED, CHANGED, UNKNOWN = "ok", "damaged", "changed", "unknown"
MEMORY = "memory"
LOOKS = 3  # at what does not come to rest
REST_S = 0.2
READ_AGAIN = 4  # wrong blocks that are read once more; so many do not go wrong on the way
TOLD_BLOCKS = 8

Tell = Callable[[int, int], None]


class Copy(NamedTuple):
    """One copy of a file: *where* it is ("memory", or the object's URL), and what was found."""

    where: str
    outcome: str
    text: str


class Finding(NamedTuple):
    """What verifying one file found: the worst *outcome* of its *copies*, and in words."""

    outcome: str
    text: str
    state: str
    copies: tuple[Copy, ...]


class _Moved(Exception):
    """What was read is no longer what it was."""


class Verifier:
    """*state_of*: of fs.durable, one word. *is_clean*: of fs.journal, whether nothing is under way for an inode."""

    def __init__(
        self,
        index: Index,
        arena: Arena,
        content: Content,
        objects: ObjectTable,
        tier: Tier,
        *,
        state_of: Callable[[Attr], str],
        is_clean: Callable[[int], bool],
        concurrency: int = 8,
        timeout_s: float = 60.0,
    ) -> None:
        self._index = index
        self._arena = arena
        self._content = content
        self._objects = objects
        self._tier = tier
        self._state_of = state_of
        self._is_clean = is_clean
        self._asker = Asker(tier, concurrency=concurrency, timeout_s=timeout_s)
        self._hashing = trio.CapacityLimiter(2)

    async def verify(self, ino: int, progress: Tell | None = None) -> Finding:
        """Read every copy of a file. *progress*: told (bytes done, size), counted over all copies.

        Raises FsError ESTALE (it is gone), EINVAL (no regular file).
        """
        for _ in range(LOOKS):
            attr = self._index.attr(ino)
            if attr is None:
                raise FsError(errno.ESTALE)
            if not stat.S_ISREG(attr.mode):
                raise FsError(errno.EINVAL, "only regular files have bytes to verify")
            if self._content.has_writers(ino):
                return Finding(CHANGED, "it is open for writing", self._state_of(attr), ())
            try:
                return await _Look(self, attr, progress).finding()
            except _Moved:
                await trio.sleep(REST_S)
        attr = self._index.attr(ino)
        state = "" if attr is None else self._state_of(attr)
        return Finding(CHANGED, "it was written or moved while it was verified", state, ())


class _Look:
    """One look at one generation."""

    def __init__(self, verifier: Verifier, attr: Attr, progress: Tell | None) -> None:
        self._of = verifier
        self._attr = attr
        self._rows = self._holding()
        self._progress = progress
        self._copies = max(1, len(self._rows) + attr.resident)
        self._done = 0

    def _holding(self) -> list[DurableObject]:
        rows = self._of._objects.of(self._attr.ino)
        return sorted(row for row in rows if row.generation == self._attr.generation)

    def _tell(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            size = self._attr.size
            self._progress(min(size, self._done // self._copies), size)

    def _require_rest(self) -> None:
        """Raise _Moved unless everything is as it was when the look began."""
        of, attr = self._of, self._attr
        now = of._index.attr(attr.ino)
        if (
            now is None
            or (now.generation, now.size, now.resident)
            != (attr.generation, attr.size, attr.resident)
            or of._content.has_writers(attr.ino)
            or self._holding() != self._rows
        ):
            raise _Moved

    def _require_quiet(self) -> None:
        """As _require_rest, and nothing may be under way either: before an object is called damaged."""
        self._require_rest()
        if not self._of._is_clean(self._attr.ino):
            raise _Moved

    async def finding(self) -> Finding:
        """What this look finds. Raises _Moved."""
        attr, of = self._attr, self._of
        expected = of._objects.digests(attr.ino, attr.generation)
        copies: list[Copy] = []
        here: Digests | None = None
        if attr.resident:
            here, copy = await self._memory(expected)
            copies.append(copy)
        for row in self._rows:
            copies.append(await self._object(row, expected, here))
        self._require_rest()
        state = of._state_of(attr)
        outcome = next(
            kind for kind in (DAMAGED, UNKNOWN, OK) if kind in {c.outcome for c in copies} | {OK}
        )
        told = [f"{c.where}: {c.text}" for c in copies if c.text]
        if not self._rows:
            told.append("it is not durable: there is no other copy")
            if not attr.resident:
                self._require_quiet()
                outcome, told = DAMAGED, ["there is no copy at all"]
        return Finding(outcome, "; ".join(told), state, tuple(copies))

    # memory

    async def _memory(self, expected: Digests | None) -> tuple[Digests | None, Copy]:
        of, attr = self._of, self._attr
        try:
            fd = of._arena.open(attr.ino, os.O_RDONLY)
        except FileNotFoundError:
            self._require_rest()
            return None, Copy(MEMORY, DAMAGED, "the backing file is gone")
        try:
            before = os.fstat(fd)
            here = await trio.to_thread.run_sync(self._hash, fd, limiter=of._hashing)
            after = os.fstat(fd)
        except EOFError as error:
            self._require_rest()
            return None, Copy(MEMORY, DAMAGED, str(error))
        finally:
            os.close(fd)
        self._require_rest()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise _Moved
        if after.st_size != attr.size:
            return here, Copy(MEMORY, DAMAGED, f"it has {after.st_size} of {attr.size} bytes")
        if expected is None:
            return here, Copy(MEMORY, OK, "no digests are known yet" if self._rows else "")
        wrong = differing(here, expected)
        return here, Copy(MEMORY, DAMAGED if wrong else OK, wrong)

    def _hash(self, fd: int) -> Digests:
        def stop() -> bool:
            trio.from_thread.run_sync(self._tell, block_bytes)
            return False

        block_bytes = block_bytes_for(self._attr.size)
        return hash_file(fd, self._attr.size, stop=stop)[0]

    # an object

    async def _object(
        self, row: DurableObject, expected: Digests | None, here: Digests | None
    ) -> Copy:
        url = self._of._tier.url(row.key)
        try:
            return Copy(url, *await self._compare(row, expected, here))
        except TierObjectMissing:
            self._require_quiet()
            return Copy(url, DAMAGED, "there is no such object any more")
        except TierObjectChanged:
            self._require_quiet()
            return Copy(url, DAMAGED, "somebody else has replaced it")
        except TierBadBytes as error:
            self._require_quiet()
            return Copy(url, DAMAGED, str(error))
        except (FsError, TierError) as error:
            self._require_rest()
            text = error.strerror if isinstance(error, FsError) else None
            return Copy(url, UNKNOWN, text or str(error))

    async def _compare(
        self, row: DurableObject, expected: Digests | None, here: Digests | None
    ) -> tuple[str, str]:
        of, attr = self._of, self._attr
        info: ObjectInfo = await of._asker.ask(
            "asking for", row.key, lambda: of._tier.head(row.key)
        )
        if info.etag != row.etag:
            raise TierObjectChanged(row.key)
        if info.size != attr.size:
            self._require_quiet()
            return DAMAGED, f"it has {info.size} of {attr.size} bytes"
        named = parse_metadata(info.meta, info.size).digests
        if expected is not None and named is not None and named != expected:
            self._require_quiet()
            return DAMAGED, "its metadata name digests of other bytes"
        wanted = expected or named or here
        block_bytes = block_bytes_for(attr.size) if wanted is None else wanted.block_bytes
        there = await digests_of_object(of._tier, of._asker, row, block_bytes, self._tell)
        if wanted is None:
            return OK, "all of it could be read; it has no digests to be compared with"
        wrong = await self._still_wrong(row, there, wanted)
        if not wrong:
            return OK, ""
        self._require_quiet()
        if expected or named:
            return DAMAGED, wrong
        return DAMAGED, f"it differs from what is in memory: {wrong}"

    async def _still_wrong(self, row: DurableObject, there: Digests, wanted: Digests) -> str:
        """What is wrong with the bytes of an object, when those that came wrong are read again."""
        wrong = wrong_blocks(there, wanted)
        if not 0 < len(wrong) <= READ_AGAIN:
            return differing(there, wanted)
        blocks = bytearray(there.blocks)
        size = len(there.blocks) // there.block_count
        for block in wrong:
            again = await digest_of_block(
                self._of._tier, self._of._asker, row, block, there.block_bytes
            )
            blocks[block * size : (block + 1) * size] = again
        second = there._replace(blocks=bytes(blocks))
        if not wrong_blocks(second, wanted):
            return ""  # it went wrong on the way, once
        return differing(second, wanted)


def wrong_blocks(found: Digests, expected: Digests) -> list[int]:
    """Numbers of the blocks that differ; empty where the blocks cannot be compared."""
    if (found.size, found.block_bytes) != (expected.size, expected.block_bytes):
        return []
    return [n for n in range(found.block_count) if found.block(n) != expected.block(n)]


def differing(found: Digests, expected: Digests) -> str:
    """Where bytes differ from what they should be, in words; "" for nowhere."""
    if found.size != expected.size:
        return f"it has {found.size} of {expected.size} bytes"
    wrong = wrong_blocks(found, expected)
    if not wrong:
        return "" if found.whole == expected.whole else "its bytes as a whole are others"
    places = ", ".join(
        f"{n * found.block_bytes}+{min(found.block_bytes, found.size - n * found.block_bytes)}"
        for n in wrong[:TOLD_BLOCKS]
    )
    more = "" if len(wrong) <= TOLD_BLOCKS else f" and {len(wrong) - TOLD_BLOCKS} more"
    return f"other bytes than were stored, at {places}{more}"
