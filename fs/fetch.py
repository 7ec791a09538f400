"""Reading back: bytes of files that are not resident come from the durable tier into the arena, block by block.

What it keeps true:
- No byte is served before its block has been verified: against the digest of the block where there is one, else
  against the object's version and length. A wrong block is fetched again, then it is an error: never wrong bytes,
  never zeros.
- What is read at random fetches what is asked for; who reads forward has ever more fetched ahead; a block is fetched
  once, however many wait for it, and whoever stops waiting stops nothing.
- Memory is one buffer of `RANGE_BYTES` for each call under way, whatever the file's size. The backing file is
  written by pwrite, never through a mapping: a full arena is an error then, not a signal.
- A file is resident when every block is there, its times set again to what the index says. Until then its blocks
  are a cache, lost with the worker, given up (least recently used first) when the arena needs the room.
- A backing file that is given up is removed, never reused: what a thread still writes goes nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator

import trio
import xxhash

from fs.arena import Arena
from fs.checksums import MIN_BLOCK_BYTES, Digests, digest
from fs.content import Content
from fs.errors import FsError
from fs.index import Index
from fs.objecttable import DurableObject, ObjectTable
from fs.readahead import Streams
from fs.residency import AtHand
from fs.source import BAD_ATTEMPTS, Source, Unreadable
from fs.tiers.tier import Tier, TierBadBytes
from fs.types import Attr

log = logging.getLogger("ckptfs.fetch")

RANGE_BYTES = MIN_BLOCK_BYTES
HASH_PIECE_BYTES = 1 << 20
FAILED_KEPT_S = 2.0  # the kernel asks several times for what its read-ahead did not get
IDLE_KEPT = 256  # files that nobody has open, with a part of their bytes here
ROOM_WAIT_S = 30.0

Progress = Callable[[int, int], None]
MakeRoom = Callable[[int, bool], Awaitable[bool]]


class _File:
    """One generation of a file of which some blocks are here."""

    def __init__(
        self,
        attr: Attr,
        source: Source,
        digests: Digests | None,
        fd: int,
        capacity_bytes: int,
        depth_bytes: int,
    ) -> None:
        self.ino = attr.ino
        self.generation = attr.generation
        self.size = attr.size
        self.source = source
        self.digests = digests
        self.fd = fd
        self.block_bytes = RANGE_BYTES if digests is None else digests.block_bytes
        self.count = -(-attr.size // self.block_bytes)
        self.valid = bytearray(self.count)
        self.valid_count = 0
        self.used = [0] * self.count  # by the fetcher's clock
        self.pins: Counter[int] = Counter()
        self.under_way: dict[int, trio.Event] = {}
        self.failed: dict[int, tuple[float, Unreadable]] = {}
        self.streams = Streams()
        self.ahead: set[int] = set()  # blocks in the fetcher's queue
        self.wanted_whole = 0
        self.roomy = attr.size <= capacity_bytes // 2  # others need not go first
        self.depth_bytes = max(depth_bytes, self.block_bytes)
        if not self.roomy:
            self.depth_bytes = min(self.depth_bytes, max(self.block_bytes, capacity_bytes // 4))
        self._gone = False
        self._lock = threading.Lock()

    @property
    def gone(self) -> bool:
        """Whether it was dropped, or is resident by now."""
        return self._gone

    def close(self) -> None:
        """Let go of the backing file; threads have descriptors of their own."""
        with self._lock:
            self._gone = True
            self.ahead.clear()
            os.close(self.fd)

    def descriptor(self) -> int | None:
        """A descriptor for a thread, which closes it; None when the file is gone."""
        with self._lock:
            return None if self._gone else os.dup(self.fd)

    def blocks(self, offset: int, size: int) -> range:
        """Blocks that hold these bytes (*size* above 0)."""
        return range(offset // self.block_bytes, (offset + size - 1) // self.block_bytes + 1)

    def extent(self, block: int) -> tuple[int, int]:
        """(offset, length) of a block."""
        offset = block * self.block_bytes
        return offset, min(self.block_bytes, self.size - offset)

    def has(self, blocks: range) -> bool:
        """Whether all of these are here."""
        return all(self.valid[block] for block in blocks)


class Fetcher:
    """What the vfs and the session ask of the durable tier (fs.residency). `run` must be running.

    *concurrency*: calls to the tier at once. *timeout_s*: how long a reader waits for a tier that does not answer.
    *keeps*, *is_clean*: of the journal: bytes that are still to be uploaded; nothing pending for an inode.
    """

    def __init__(
        self,
        index: Index,
        arena: Arena,
        content: Content,
        objects: ObjectTable,
        tier: Tier,
        *,
        keeps: Callable[[int], bool],
        is_clean: Callable[[int], bool],
        concurrency: int = 8,
        timeout_s: float = 60.0,
    ) -> None:
        self._index = index
        self._arena = arena
        self._content = content
        self._objects = objects
        self._tier = tier
        self._keeps = keeps
        self._is_clean = is_clean
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._limiter = trio.CapacityLimiter(concurrency)
        self._hashing = trio.CapacityLimiter(2)
        self._files: dict[int, _File] = {}
        self._opening: dict[int, trio.Event] = {}
        self._queue: deque[tuple[_File, int]] = deque()
        self._ranges = 0  # under way
        self._clock = 0
        self._buffers: list[bytearray] = []
        self._nursery: trio.Nursery | None = None
        self._leaving: set[int] = set()
        self.make_room: MakeRoom = self._own_room
        self.became_resident: Callable[[int], None] = lambda ino: None
        self.fetched_bytes = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch for whoever asks, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # fs.residency

    def keeps(self, ino: int) -> bool:
        """Whether the bytes of an inode without links are still to be uploaded."""
        return self._keeps(ino)

    def is_resident(self, ino: int) -> bool:
        """Whether every byte is in the backing file."""
        return bool(self._attr(ino).resident)

    def size(self, ino: int) -> int:
        """The file's length in bytes."""
        return self._attr(ino).size

    def _attr(self, ino: int) -> Attr:
        attr = self._index.attr(ino)
        if attr is None:
            raise FsError(errno.ESTALE)
        return attr

    def at_hand(self, ino: int, offset: int, size: int) -> AtHand | None:
        """The bytes, if they are here already."""
        file = self._files.get(ino)
        if file is None:
            return None
        count = max(0, min(size, file.size - offset))
        if count == 0:
            return AtHand(file.fd, 0)
        blocks = file.blocks(offset, count)
        if not file.has(blocks):
            return None
        self._used(file, offset, count, blocks)
        return AtHand(file.fd, count)

    async def fetched(self, ino: int, offset: int, size: int) -> AtHand | None:
        """The bytes, once they are here; None when the whole file is resident. Raises FsError."""
        deadline = trio.current_time() + self._timeout_s
        while True:
            file = await self._file(ino)
            if file is None:
                return None
            count = max(0, min(size, file.size - offset))
            if count == 0:
                return AtHand(file.fd, 0)
            blocks = file.blocks(offset, count)
            file.pins.update(blocks)
            try:
                missing = [block for block in blocks if not file.valid[block]]
                for block in missing:
                    self._start(file, block)
                self._used(file, offset, count, blocks)
                for block in missing:
                    await self._landed(file, block, deadline)
            finally:
                file.pins.subtract(blocks)
            if not file.gone and file.has(blocks):
                return AtHand(file.fd, count)

    async def ensure_resident(self, ino: int, progress: Progress | None = None) -> None:
        """Fetch what is missing of the whole file. *progress*: told (bytes here, bytes in all).

        Raises FsError ESTALE, EIO, ENOSPC (larger than the arena, or no room to be had).
        """
        while True:
            file = await self._file(ino)
            if file is None:
                return
            if file.size > self._arena.space().size_bytes:
                raise FsError(errno.ENOSPC, f"inode {ino} is larger than the arena")
            file.wanted_whole += 1
            try:
                await self._fetch_all(file, progress)
            finally:
                file.wanted_whole -= 1

    async def _fetch_all(self, file: _File, progress: Progress | None) -> None:
        for block in range(file.count):
            self._enqueue(file, block)
        for block in range(file.count):
            if not file.valid[block] and not file.gone:
                self._start(file, block)
                await self._landed(file, block, 0.0)
            if file.gone:
                return
            if progress is not None:
                progress(min(file.valid_count * file.block_bytes, file.size), file.size)

    def drop(self, ino: int) -> None:
        """What is cached of a file that is not resident is not wanted any more."""
        file = self._files.pop(ino, None)
        if file is None:
            return
        self._arena.remove(ino)
        file.close()

    def released(self, ino: int) -> None:
        """Nobody has it open now: nothing more is fetched ahead, what is here stays as long as there is room."""
        self._leaving.discard(ino)
        file = self._files.get(ino)
        if file is None:
            return
        if not file.wanted_whole:
            file.ahead.clear()
        if not file.valid_count and not file.under_way:
            self.drop(ino)
            return
        idle = [ino for ino in self._files if not self._busy(self._files[ino])]
        for old in idle[: max(0, len(idle) - IDLE_KEPT)]:
            self.drop(old)

    def unlinked(self, ino: int) -> None:
        """Its last name is gone while it is open: fetch the rest before the tier forgets it (`holds`)."""
        self._leaving.add(ino)
        if self._nursery is not None:
            self._nursery.start_soon(self._rescue, ino)

    async def _rescue(self, ino: int) -> None:
        try:
            await self.ensure_resident(ino)
        except FsError as error:
            # too large, or the tier is away: its objects stay until the last release
            log.warning("inode %d was removed while it is being read: %s", ino, error)

    def holds(self, key: str) -> bool:
        """Whether somebody still reads what lies under *key*, though its file has no name any more.

        Until then the object must be neither deleted nor replaced.
        """
        if not self._leaving:
            return False
        found = self._objects.get(key)
        if found is None or found.ino not in self._leaving:
            return False
        attr = self._index.attr(found.ino)
        held = attr is not None and not attr.resident and self._content.is_open(found.ino)
        if not held:
            self._leaving.discard(found.ino)
        return held

    def is_fetching(self, ino: int) -> bool:
        """Whether there is a cache of a file that is not resident."""
        return ino in self._files

    def _busy(self, file: _File) -> bool:
        return bool(file.under_way or file.wanted_whole or self._content.is_open(file.ino))

    # one file

    async def _file(self, ino: int) -> _File | None:
        """The state of a file that is not resident; None when it is."""
        while True:
            file = self._files.get(ino)
            if file is not None:
                return file
            attr = self._attr(ino)
            if attr.resident:
                return None
            opening = self._opening.get(ino)
            if opening is not None:
                await opening.wait()
                continue
            opening = self._opening[ino] = trio.Event()
            try:
                await self._open(attr)
            finally:
                del self._opening[ino]
                opening.set()

    async def _open(self, attr: Attr) -> None:
        source = Source(self._tier, self._objects, self._is_clean, self._limiter, attr)
        digests = None
        if attr.size:
            digests = await source.digests(self._index, self._timeout_s)
        now = self._index.attr(attr.ino)
        if now is None or now.resident or now.generation != attr.generation:
            return
        if digests is not None and digests.size != attr.size:
            raise Unreadable(f"inode {attr.ino}: digests of another length", final=True)
        # a new file, also where an old one was left: that one may still be written to
        self._arena.remove(attr.ino)
        self._arena.create(attr.ino)
        fd = self._arena.open(attr.ino)
        os.ftruncate(fd, attr.size)
        file = self._files[attr.ino] = _File(
            now,
            source,
            digests,
            fd,
            self._arena.space().size_bytes,
            2 * self._concurrency * RANGE_BYTES,
        )
        if file.count == 0:
            self._complete(file)

    def _complete(self, file: _File) -> None:
        """Every block is here."""
        del self._files[file.ino]
        attr = self._index.attr(file.ino)
        if attr is not None and not attr.resident and attr.generation == file.generation:
            self._arena.set_times(file.ino, attr.atime_ns, attr.mtime_ns)
            blocks = os.fstat(file.fd).st_blocks
            with self._index.transaction():
                self._index.set_resident(file.ino, 1, blocks)
            self.became_resident(file.ino)
        file.close()

    # one block

    def _used(self, file: _File, offset: int, size: int, blocks: range) -> None:
        self._clock += 1
        for block in blocks:
            file.used[block] = self._clock
        ahead = file.streams.note(offset, size, file.depth_bytes)
        end = min(file.size, offset + size + ahead)
        if ahead and end > offset + size:
            for block in file.blocks(offset + size, end - offset - size):
                self._enqueue(file, block)
            self._pump()

    def _enqueue(self, file: _File, block: int) -> None:
        if file.valid[block] or block in file.under_way or block in file.ahead:
            return
        file.ahead.add(block)
        self._queue.append((file, block))

    def _pump(self) -> None:
        while self._queue and self._ranges < self._concurrency:
            file, block = self._queue.popleft()
            if block not in file.ahead:
                continue
            file.ahead.discard(block)
            if file.gone or file.valid[block] or self._failed(file, block) is not None:
                continue
            self._start(file, block)

    def _failed(self, file: _File, block: int) -> Unreadable | None:
        at_s, failure = file.failed.get(block, (0.0, None))
        if failure is None or trio.current_time() - at_s > FAILED_KEPT_S:
            return None
        return failure

    def _start(self, file: _File, block: int) -> None:
        """Fetch a block, unless that is under way, or failed a moment ago."""
        if file.gone or file.valid[block] or block in file.under_way:
            return
        failure = self._failed(file, block)
        if failure is not None:
            raise failure
        if self._nursery is None:
            raise FsError(errno.EIO, "nothing is fetched before the worker serves")
        file.ahead.discard(block)
        file.under_way[block] = trio.Event()
        self._ranges += self._ranges_of(file, block)
        self._nursery.start_soon(self._fetch, file, block)

    def _ranges_of(self, file: _File, block: int) -> int:
        return min(self._concurrency, -(-file.extent(block)[1] // RANGE_BYTES))

    async def _landed(self, file: _File, block: int, deadline: float) -> None:
        """Return when a block under way is here, or its file is gone. Raises Unreadable."""
        while not file.gone and not file.valid[block]:
            event = file.under_way.get(block)
            if event is None:
                self._start(file, block)
                continue
            await event.wait()
            _, failure = file.failed.get(block, (0.0, None))
            if failure is None or file.valid[block] or file.gone:
                continue
            if failure.final or trio.current_time() >= deadline - FAILED_KEPT_S:
                raise failure
            del file.failed[block]  # another's patience ended, not ours

    async def _fetch(self, file: _File, block: int) -> None:
        try:
            await self._fetch_block(file, block)
        except Unreadable as error:
            file.failed[block] = trio.current_time(), error
        except Exception as error:
            log.exception("fetching block %d of inode %d failed; readers get EIO", block, file.ino)
            failure = Unreadable(f"{type(error).__name__}: {error}", final=True)
            file.failed[block] = trio.current_time(), failure
        else:
            self._arrived(file, block)
        finally:
            self._ranges -= self._ranges_of(file, block)
            file.under_way.pop(block).set()
            if not self._ranges and not self._queue:
                self._buffers.clear()
            self._pump()

    def _arrived(self, file: _File, block: int) -> None:
        file.failed.pop(block, None)
        if file.gone:
            return
        self._clock += 1
        file.used[block] = self._clock
        file.valid[block] = 1
        file.valid_count += 1
        self.fetched_bytes += file.extent(block)[1]
        if file.valid_count == file.count:
            self._complete(file)

    async def _fetch_block(self, file: _File, block: int) -> None:
        offset, length = file.extent(block)
        fits = file.roomy or file.wanted_whole > 0
        expected = None if file.digests is None else file.digests.block(block)
        for attempt in range(BAD_ATTEMPTS):
            if not await self.make_room(length, fits):
                what = f"no room in the arena for {length} bytes of inode {file.ino}"
                log.error("%s: it is full of bytes that may not be dropped", what)
                code = errno.ENOSPC if file.wanted_whole else errno.EIO
                raise Unreadable(what, final=True, code=code)
            # found free and taken in one step: blocks that arrive side by side must not count on the same room
            with self._reserved(length):
                if length <= RANGE_BYTES:
                    await self._range(file, offset, length, expected)
                    return
                await self._ranges_side_by_side(file, offset, length)
            if expected is None or await self._block_digest(file, offset, length) == expected:
                return
            log.warning(
                "%s: wrong bytes in %d+%d (attempt %d of %d)",
                self._urls(file), offset, length, attempt + 1, BAD_ATTEMPTS,
            )  # fmt: skip
        what = f"{self._urls(file)}: the bytes at {offset}+{length} are not those that were stored"
        log.error("%s; readers get EIO", what)
        raise Unreadable(what, final=True)

    @contextlib.contextmanager
    def _reserved(self, length: int) -> Iterator[None]:
        self._arena.reserved_bytes += length
        try:
            yield
        finally:
            self._arena.reserved_bytes -= length

    def _urls(self, file: _File) -> str:
        return ", ".join(self._tier.url(key) for key in sorted(file.source.keys))

    async def _ranges_side_by_side(self, file: _File, offset: int, length: int) -> None:
        starts = iter(range(offset, offset + length, RANGE_BYTES))
        errors: list[Unreadable] = []

        async def some(starts: Iterator[int]) -> None:
            for start in starts:
                if errors or file.gone:
                    return
                try:
                    size = min(RANGE_BYTES, offset + length - start)
                    await self._range(file, start, size, None)
                except Unreadable as error:
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._concurrency, -(-length // RANGE_BYTES))):
                nursery.start_soon(some, starts)
        if errors:
            raise errors[0]

    async def _range(self, file: _File, offset: int, length: int, expected: bytes | None) -> None:
        """One call's bytes into the backing file, if they have the digest that is expected."""

        def fetch(found: DurableObject) -> None:
            fd = file.descriptor()
            if fd is None:
                return
            buffer = self._buffers.pop() if self._buffers else bytearray(RANGE_BYTES)
            try:
                with memoryview(buffer)[:length] as view:
                    self._tier.read_into(found.key, offset, view, found.etag)
                    if expected is not None and digest(view) != expected:
                        raise TierBadBytes(
                            f"the bytes at {offset}+{length} are not those that were stored"
                        )
                    _pwrite_all(fd, view, offset)
            finally:
                self._buffers.append(buffer)
                os.close(fd)

        for _ in range(BAD_ATTEMPTS):
            try:
                await file.source.ask(fetch, timeout_s=self._timeout_s, what="reading")
                return
            except OSError as error:
                if error.errno != errno.ENOSPC or isinstance(error, FsError):
                    raise
            # somebody else took the room
            if not await self.make_room(length, True):
                break
        raise Unreadable(
            f"no room in the arena for inode {file.ino}", final=True, code=errno.ENOSPC
        )

    async def _block_digest(self, file: _File, offset: int, length: int) -> bytes:
        def compute() -> bytes:
            fd = file.descriptor()
            if fd is None:
                return b""
            try:
                return _digest_of(fd, offset, length)
            finally:
                os.close(fd)

        return await trio.to_thread.run_sync(compute, limiter=self._hashing, abandon_on_cancel=True)

    # room

    def give_up(self, need_bytes: int, *, opened: bool) -> int:
        """Let cached blocks go, least recently used first: how many bytes. *opened*: also of files in use."""
        blocks = [
            (file.used[block], file.ino, block)
            for file in self._files.values()
            if not file.wanted_whole and (opened or not self._content.is_open(file.ino))
            for block in range(file.count)
            if file.valid[block] and file.pins[block] <= 0
        ]
        done = 0
        for _, ino, block in sorted(blocks):
            if done >= need_bytes:
                break
            file = self._files[ino]  # there as long as it has blocks
            offset, length = file.extent(block)
            self._arena.punch(file.fd, offset, length)
            file.valid[block] = 0
            file.valid_count -= 1
            done += length
            if not file.valid_count and not self._busy(file):
                self.drop(ino)
        return done

    async def _own_room(self, need_bytes: int, fits: bool) -> bool:
        """Room by what is cached here alone."""
        deadline = trio.current_time() + ROOM_WAIT_S
        while True:
            free_bytes = self._arena.space().free_bytes
            if free_bytes >= need_bytes:
                return True
            if not self.give_up(need_bytes - free_bytes, opened=True):
                if trio.current_time() > deadline:
                    return False
                await trio.sleep(0.05)


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _digest_of(fd: int, offset: int, length: int) -> bytes:
    state = xxhash.xxh3_128()
    buffer = bytearray(HASH_PIECE_BYTES)
    with memoryview(buffer) as view:
        while length:
            count = os.preadv(fd, [view[: min(HASH_PIECE_BYTES, length)]], offset)
            if count == 0:
                break
            state.update(view[:count])
            offset, length = offset + count, length - count
    return state.digest()
