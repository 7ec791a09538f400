"""Reading an object of the durable tier from one end to the other, for its digests and nothing else.

What it keeps true: memory is `DEPTH` buffers of `READ_BYTES` whatever the object's size; ranges are fetched side by
side and digested in order; only bytes of the version that was named count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio
import xxhash

from fs.asking import Asker
from fs.checksums import MIN_BLOCK_BYTES, Digests
from fs.errors import FsError
from fs.objecttable import DurableObject
from fs.tiers.tier import Tier, TierError

READ_BYTES = MIN_BLOCK_BYTES  # ranges lie within blocks
DEPTH = 3


class _Turns:
    def __init__(self) -> None:
        self._at = 0
        self._moved = trio.Event()

    async def wait(self, offset: int) -> None:
        """Return when everything before *offset* is done."""
        while self._at != offset:
            await self._moved.wait()

    def done(self, offset: int) -> None:
        """Everything before *offset* is done."""
        self._at = offset
        self._moved.set()
        self._moved = trio.Event()


class _Sums:
    """Digests of bytes that come in order."""

    def __init__(self, size: int, block_bytes: int) -> None:
        self._size = size
        self._block_bytes = block_bytes
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._blocks: list[bytes] = []

    def add(self, offset: int, view: memoryview) -> None:
        """The bytes at *offset*, which do not cross a block's end."""
        self._whole.update(view)
        self._block.update(view)
        end = offset + len(view)
        if end % self._block_bytes == 0 or end == self._size:
            self._blocks.append(self._block.digest())
            self._block.reset()

    def digests(self) -> Digests:
        """Of all of it."""
        return Digests(self._size, self._whole.digest(), self._block_bytes, b"".join(self._blocks))


async def digests_of_object(
    tier: Tier, asker: Asker, found: DurableObject, block_bytes: int, tell: Callable[[int], None]
) -> Digests:
    """Digests of an object's bytes. *tell*: told how many more were read.

    Raises FsError EIO (it cannot be read for now), TierObjectMissing, TierObjectChanged, TierBadBytes (too few).
    """
    sums = _Sums(found.size, block_bytes)
    await _read(tier, asker, found, range(0, found.size, READ_BYTES), sums, tell)
    return sums.digests()


async def digest_of_block(
    tier: Tier, asker: Asker, found: DurableObject, block: int, block_bytes: int
) -> bytes:
    """The digest of one block, read again. Raises as `digests_of_object`."""
    begin, end = block * block_bytes, min((block + 1) * block_bytes, found.size)
    sums = _Sums(found.size, block_bytes)
    await _read(tier, asker, found, range(begin, end, READ_BYTES), sums, lambda _: None)
    return sums.digests().blocks


async def _read(
    tier: Tier,
    asker: Asker,
    found: DurableObject,
    offsets: range,
    sums: _Sums,
    tell: Callable[[int], None],
) -> None:
    turns = _Turns()
    turns.done(offsets.start)
    rest = iter(offsets)
    errors: list[FsError | TierError] = []

    async def some(buffer: bytearray) -> None:
        for offset in rest:
            length = min(READ_BYTES, found.size - offset)
            with memoryview(buffer)[:length] as view:
                fetch = partial(tier.read_into, found.key, offset, view, found.etag)
                await asker.ask("reading", found.key, fetch)
                await turns.wait(offset)
                await trio.to_thread.run_sync(sums.add, offset, view)
            turns.done(offset + length)
            tell(length)

    async def some_or_error(scope: trio.CancelScope) -> None:
        try:
            await some(bytearray(min(READ_BYTES, found.size)))
        except (FsError, TierError) as error:
            errors.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(DEPTH, len(offsets))):
            nursery.start_soon(some_or_error, nursery.cancel_scope)
    if errors:
        raise errors[0]
