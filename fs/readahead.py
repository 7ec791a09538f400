"""How far ahead of a reader to fetch. Pure.

What it keeps true: a reader that goes forward has ever more ready for it, up to a bound; one that jumps about in a
large file gets what it asks for and little else. Several readers of one file are told apart by where they are.
"""

from __future__ import annotations

STREAMS_KEPT = 16
NEAR_BYTES = 2 << 20  # the kernel's own read-ahead does not ask in order
FIRST_BYTES = 8 << 20
GROWTH = 8


class _Stream:
    __slots__ = ("next", "run", "used")

    def __init__(self, start: int) -> None:
        self.next = start
        self.run = 0
        self.used = 0


class Streams:
    """Where the readers of one file are."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._clock = 0

    def note(self, offset: int, size: int, depth_bytes: int) -> int:
        """Somebody reads there: how many bytes to have ready behind it, at most *depth_bytes*."""
        stream = self._at(offset)
        end = offset + size
        if end > stream.next:
            stream.run += end - max(stream.next, offset)
            stream.next = end
        self._clock += 1
        stream.used = self._clock
        if stream.run == size and offset:
            return 0  # the first that is seen of it, somewhere in the file
        return max(FIRST_BYTES, min(depth_bytes, stream.run * GROWTH))

    def _at(self, offset: int) -> _Stream:
        for stream in self._streams:
            if abs(offset - stream.next) <= NEAR_BYTES:
                return stream
        if len(self._streams) >= STREAMS_KEPT:
            self._streams.remove(min(self._streams, key=lambda stream: stream.used))
        stream = _Stream(offset)
        self._streams.append(stream)
        return stream
