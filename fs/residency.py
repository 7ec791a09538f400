"""What the vfs, and whoever answers reads, ask about files whose bytes are not in the arena.

Pure declarations: the vfs knows a durable tier by these names only, and works without one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class AtHand(NamedTuple):
    """Bytes that can be read now, without waiting: *length* bytes (0: the end of the file) behind *fd*.

    The descriptor is only good until whoever got it waits for something.
    """

    fd: int
    length: int


class Residency(Protocol):
    """Getting bytes into the arena, and keeping them, as the vfs sees it.

    Errors are FsError: EIO, or ENOSPC where memory is missing.
    """

    def keeps(self, ino: int) -> bool:
        """Whether the bytes of an inode without links are still to be uploaded."""
        ...

    async def ensure_resident(self, ino: int) -> None:
        """Return when every byte is in the arena, and the index says so."""
        ...

    async def before_writing(self, ino: int) -> None:
        """A file has been opened for writing: make room for what it is expected to grow to, briefly."""
        ...

    def drop(self, ino: int) -> None:
        """What is cached of a file that is not resident is not wanted any more."""
        ...

    def released(self, ino: int) -> None:
        """Nobody has it open now."""
        ...

    def unlinked(self, ino: int) -> None:
        """The last name of a file that is open and not resident is gone: its bytes may leave the tier."""
        ...


class Elsewhere(Protocol):
    """Reads of files that are not resident, as the session sees them. Errors are FsError."""

    def is_resident(self, ino: int) -> bool:
        """Whether every byte is in the backing file."""
        ...

    def size(self, ino: int) -> int:
        """The file's length in bytes."""
        ...

    def at_hand(self, ino: int, offset: int, size: int) -> AtHand | None:
        """The bytes, if they are in the arena already; None when they have to be fetched."""
        ...

    async def fetched(self, ino: int, offset: int, size: int) -> AtHand | None:
        """The bytes, once they are in the arena; None when the whole file is resident by then."""
        ...


class Room(Protocol):
    """Room in the arena, as whoever writes there in the application's place sees it."""

    full_wait_s: float

    def may_pass(self, fh: int) -> bool:
        """Whether the kernel may move the bytes of an open itself: then nobody can hold its writes back."""
        ...

    def may_write(self, size: int) -> bool:
        """Whether there is room for so many bytes beside what writers that cannot be held back will take."""
        ...

    async def wait_for(self, size: int, timeout_s: float) -> None:
        """Ask for room; return when there may be some, or after *timeout_s*."""
        ...
