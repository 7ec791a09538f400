"""Digests of a file's bytes: XXH3-128 of the whole and of each block, in big-endian (canonical) bytes.

What it keeps true: a file has at most `MAX_BLOCKS` blocks, so that its digests fit into an object's metadata;
blocks are `MIN_BLOCK_BYTES` times a power of two, so that a part that is a power of two lies within one block or
is made of whole ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import xxhash

DIGEST_BYTES = 16
MIN_BLOCK_BYTES = 8 << 20
MAX_BLOCKS = 64
_PIECE_BYTES = 1 << 20


class Digests(NamedTuple):
    """Of *size* bytes: *whole*, and *blocks* (16 bytes for each *block_bytes*, the last may be shorter)."""

    size: int
    whole: bytes
    block_bytes: int
    blocks: bytes

    def block(self, number: int) -> bytes:
        """The digest of block *number*, from 0."""
        return self.blocks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @property
    def block_count(self) -> int:
        """How many blocks there are."""
        return len(self.blocks) // DIGEST_BYTES


def block_bytes_for(size: int) -> int:
    """The block size of a file of *size* bytes."""
    block_bytes = MIN_BLOCK_BYTES
    while size > block_bytes * MAX_BLOCKS:
        block_bytes *= 2
    return block_bytes


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of bytes in memory."""
    return xxhash.xxh3_128_digest(data)


def hash_file(
    fd: int, size: int, *, part_bytes: int = 0, stop: Callable[[], bool] | None = None
) -> tuple[Digests, list[bytes]]:
    """Digests of the first *size* bytes behind *fd*, and of each *part_bytes* (0: none wanted).

    Reads by pread; memory is one small buffer. Raises InterruptedError when *stop* says so (asked once a
    block), EOFError when the file is shorter.
    """
    block_bytes = block_bytes_for(size)
    whole, blocks, parts = xxhash.xxh3_128(), [], []
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    part = xxhash.xxh3_128()
    block = xxhash.xxh3_128()
    offset = 0
    while offset < size:
        want = min(_PIECE_BYTES, size - offset)
        count = os.preadv(fd, [view[:want]], offset)
        if count < want:
            raise EOFError(f"the file ends at {offset + count} of {size} bytes")
        # pieces never cross a block or a part: both are multiples of the piece
        piece = view[:count]
        whole.update(piece)
        block.update(piece)
        offset += count
        if part_bytes:
            part.update(piece)
            if offset % part_bytes == 0 or offset == size:
                parts.append(part.digest())
                part.reset()
        if offset % block_bytes == 0 or offset == size:
            blocks.append(block.digest())
            block.reset()
            if stop is not None and stop():
                raise InterruptedError
    return Digests(size, whole.digest(), block_bytes, b"".join(blocks)), parts
