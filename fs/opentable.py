"""What a worker must leave behind when it is killed: which opens the kernel holds, and what it was doing.

Two files in shared memory. A store of eight aligned bytes is whole, or not there, when the process is
killed between two instructions; the steps below are ordered so that whatever they leave can be completed.

What it keeps true:
- A change of the opens and the reply that tells the kernel are one: both are written down before either is
  done (a redo log of one entry), and the next worker does both again. Twice is the same as once.
- A backing id is in its slot as long as it is registered.
- The device is read into ``request``. Unless its number is the one answered last, it is owed:
  ``unfinished`` finds it, wherever between reading and answering the worker was killed, and counts how many
  workers it has cost.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from fs.relay import (
    ANSWERED_OFFSET,
    READ_BUFFER_BYTES,
    REQUEST_OFFSET,
    RESENT_UNIQUE,
    request_in_hand,
)
from fs.types import FH_INO_MASK, FH_RESIDENT, FH_WRITABLE

_U64 = struct.Struct("<Q")
_SUSPECT = struct.Struct("<QQ")  # unique deaths
_REDO = struct.Struct("<QIiI")  # fh count backing_id reply_length; the reply follows
_SLOT = struct.Struct("<QIi")  # fh count backing_id
_SUSPECT_AT, _LAST_ID, _INIT_AT = 8, 24, 64
_REDO_VALID, _REDO_AT = 2048, 2056
_INIT_ROOM, _REPLY_ROOM = 1024, 1024
_FIRST_SLOTS = 1 << 14


class _Inode:
    __slots__ = ("backing_id", "opens")

    def __init__(self, backing_id: int) -> None:
        self.backing_id = backing_id
        self.opens = 0


class OpenTable:
    """The files ``session`` and ``opens`` in *directory*; *fresh* begins them anew (a new mount)."""

    def __init__(self, directory: Path, *, fresh: bool) -> None:
        self._session = _mapped(directory / "session", REQUEST_OFFSET + READ_BUFFER_BYTES, fresh)
        self._slots = _mapped(directory / "opens", _FIRST_SLOTS * _SLOT.size, fresh)
        self.request = memoryview(self._session)[REQUEST_OFFSET:]
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._inodes: dict[int, _Inode] = {}
        self._load()
        self.redo_reply = self._redo()

    def _load(self) -> None:
        for slot in reversed(range(len(self._slots) // _SLOT.size)):
            fh, count, backing_id = _SLOT.unpack_from(self._slots, slot * _SLOT.size)
            if fh == 0:
                self._free.append(slot)
                continue
            self._slot_of[fh] = slot
            inode = self._inodes.setdefault(fh & FH_INO_MASK, _Inode(backing_id))
            inode.opens += count

    def _redo(self) -> bytes:
        """Complete the change that was under way; the reply that belongs to it, to be sent again."""
        if not _U64.unpack_from(self._session, _REDO_VALID)[0]:
            return b""
        fh, count, backing_id, length = _REDO.unpack_from(self._session, _REDO_AT)
        self._apply(fh, count, backing_id)
        start = _REDO_AT + _REDO.size
        return bytes(self._session[start : start + length])

    # the request in hand

    def done(self, unique: int) -> None:
        """A request is answered; one that had waited may be another than the one read last."""
        if unique == self.last_read():
            _U64.pack_into(self._session, ANSWERED_OFFSET, unique)

    def last_read(self) -> int:
        """The number of the request that was read last."""
        return int(_U64.unpack_from(self._session, REQUEST_OFFSET + 8)[0])

    def is_in_hand(self) -> bool:
        """Whether the request that was read last is not answered yet."""
        return request_in_hand(self._session) != 0

    def unfinished(self) -> int:
        """The request that the last worker died with, 0 for none; counts the death against it."""
        unique = request_in_hand(self._session)
        if unique == 0:
            return 0
        base = unique & ~RESENT_UNIQUE
        suspect, deaths = self.suspect()
        _SUSPECT.pack_into(self._session, _SUSPECT_AT, base, deaths + 1 if suspect == base else 1)
        return unique

    def suspect(self) -> tuple[int, int]:
        """The request that workers died with last, and how many of them."""
        unique, deaths = _SUSPECT.unpack_from(self._session, _SUSPECT_AT)
        return int(unique), int(deaths)

    @property
    def init_request(self) -> bytes:
        """The kernel's INIT, to be replayed; empty before it came."""
        size = _U64.unpack_from(self._session, _INIT_AT)[0]
        return bytes(self._session[_INIT_AT + 8 : _INIT_AT + 8 + size])

    @init_request.setter
    def init_request(self, request: bytes) -> None:
        if len(request) > _INIT_ROOM:
            raise ValueError(f"INIT of {len(request)} bytes")
        self._session[_INIT_AT + 8 : _INIT_AT + 8 + len(request)] = request
        _U64.pack_into(self._session, _INIT_AT, len(request))

    @property
    def last_backing_id(self) -> int:
        """The id that the kernel gave last; it counts up."""
        return int(_U64.unpack_from(self._session, _LAST_ID)[0])

    @last_backing_id.setter
    def last_backing_id(self, backing_id: int) -> None:
        _U64.pack_into(self._session, _LAST_ID, backing_id)

    # opens

    def backing_id(self, ino: int) -> int | None:
        """The id registered for an inode that is open (0 in the plain lane); None when it is not open."""
        inode = self._inodes.get(ino)
        return None if inode is None else inode.backing_id

    def backing_ids(self) -> set[int]:
        """Every id in use."""
        return {inode.backing_id for inode in self._inodes.values()}

    def opens(self) -> list[tuple[int, int]]:
        """(file handle, count) of every open."""
        counts = [(fh, self._count(slot)) for fh, slot in self._slot_of.items()]
        return [(fh, count) for fh, count in counts if count]

    def _count(self, slot: int) -> int:
        return int(struct.unpack_from("<I", self._slots, slot * _SLOT.size + 8)[0])

    def add(self, fh: int, backing_id: int, reply: bytes | memoryview) -> None:
        """One more open, which *reply* is about to grant."""
        slot = self._slot_of.get(fh)
        count = 1 if slot is None else self._count(slot) + 1
        self._log(fh, count, backing_id, reply)
        self._apply(fh, count, backing_id)

    def drop(self, fh: int, reply: bytes | memoryview) -> bool:
        """One open less, which *reply* is about to confirm; whether the inode has none left.

        Then the caller closes its backing id and calls `forget`.
        """
        slot = self._slot_of.get(fh)
        if slot is None:
            return False
        count = max(0, self._count(slot) - 1)
        inode = self._inodes[fh & FH_INO_MASK]
        self._log(fh, count, inode.backing_id, reply)
        self._apply(fh, count, inode.backing_id)
        return inode.opens == 0

    def _log(self, fh: int, count: int, backing_id: int, reply: bytes | memoryview) -> None:
        assert len(reply) <= _REPLY_ROOM
        start = _REDO_AT + _REDO.size
        _REDO.pack_into(self._session, _REDO_AT, fh, count, backing_id, len(reply))
        self._session[start : start + len(reply)] = reply
        _U64.pack_into(self._session, _REDO_VALID, 1)

    def _apply(self, fh: int, count: int, backing_id: int) -> None:
        slot = self._slot_of.get(fh)
        inode = self._inodes.get(fh & FH_INO_MASK)
        if inode is None:
            inode = self._inodes[fh & FH_INO_MASK] = _Inode(backing_id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slot_of[fh] = self._free.pop()
            struct.pack_into("<Ii", self._slots, slot * _SLOT.size + 8, count, backing_id)
            # the handle last: a slot without one is free
            _U64.pack_into(self._slots, slot * _SLOT.size, fh)
            inode.opens += count
        else:
            inode.opens += count - self._count(slot)
            struct.pack_into("<I", self._slots, slot * _SLOT.size + 8, count)

    def settled(self) -> None:
        """The kernel has the reply that the last change belonged to."""
        _U64.pack_into(self._session, _REDO_VALID, 0)

    def forget(self, ino: int) -> None:
        """Free the slots of an inode without opens, once its id is closed."""
        del self._inodes[ino]
        for fh in _handles(ino):
            slot = self._slot_of.pop(fh, None)
            if slot is not None:
                _U64.pack_into(self._slots, slot * _SLOT.size, 0)
                self._free.append(slot)

    def idle(self) -> list[tuple[int, int]]:
        """(inode, backing id) without opens: a worker died between the last drop and `forget`."""
        return [(ino, entry.backing_id) for ino, entry in self._inodes.items() if not entry.opens]

    def _grow(self) -> None:
        old = len(self._slots) // _SLOT.size
        self._slots.resize(len(self._slots) * 2)
        self._free = list(reversed(range(old, old * 2)))


def _handles(ino: int) -> list[int]:
    return [
        ino | resident | writable for resident in (0, FH_RESIDENT) for writable in (0, FH_WRITABLE)
    ]


def _mapped(path: Path, size_bytes: int, fresh: bool) -> mmap.mmap:
    if fresh:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < size_bytes:
            os.truncate(fd, size_bytes)
        return mmap.mmap(fd, max(size_bytes, os.fstat(fd).st_size))
    finally:
        os.close(fd)
