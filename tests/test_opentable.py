"""The open table, as the next worker finds it: whatever instruction the last one was killed at."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fs import opentable, relay
from fs.opentable import OpenTable
from fs.types import FH_RESIDENT, FH_WRITABLE

READ = FH_RESIDENT
WRITE = FH_RESIDENT | FH_WRITABLE


def reopened(directory: Path) -> OpenTable:
    return OpenTable(directory, fresh=False)


def test_opens_are_found_again(tmp_path: Path) -> None:
    table = OpenTable(tmp_path, fresh=True)
    for fh, backing_id in ((5 | READ, 1), (5 | WRITE, 1), (5 | READ, 1), (6 | WRITE, 2)):
        table.add(fh, backing_id, b"reply")
        table.settled()
    again = reopened(tmp_path)
    assert dict(again.opens()) == {5 | READ: 2, 5 | WRITE: 1, 6 | WRITE: 1}
    assert again.backing_id(5) == 1
    assert again.backing_id(7) is None
    assert again.backing_ids() == {1, 2}
    assert not again.drop(5 | READ, b"")
    assert not again.drop(5 | READ, b"")
    assert again.drop(5 | WRITE, b"")
    again.forget(5)
    again.settled()
    last = reopened(tmp_path)
    assert dict(last.opens()) == {6 | WRITE: 1}
    assert last.idle() == []
    assert last.redo_reply == b""
    assert OpenTable(tmp_path, fresh=True).opens() == []


def test_reply_and_change_are_one(tmp_path: Path) -> None:
    """Killed after the log was written: the change is made once and the reply is given again."""
    table = OpenTable(tmp_path, fresh=True)
    table.add(5 | READ, 1, b"the reply")
    for _ in range(3):
        again = reopened(tmp_path)
        assert again.redo_reply == b"the reply"
        assert dict(again.opens()) == {5 | READ: 1}
    again.settled()
    assert again.drop(5 | READ, b"released")
    again = reopened(tmp_path)
    assert again.redo_reply == b"released"
    assert again.opens() == []
    assert again.idle() == [(5, 1)]


def test_request_in_hand_is_found_and_counted(tmp_path: Path) -> None:
    table = OpenTable(tmp_path, fresh=True)
    assert table.unfinished() == 0
    relay.REQUEST_HEADER.pack_into(table.request, 0, 40, relay.MKDIR, 42, 1)
    for deaths in range(1, 4):
        again = reopened(tmp_path)
        assert again.unfinished() == 42
        assert again.suspect() == (42, deaths)
    again.done(42)
    assert reopened(tmp_path).unfinished() == 0
    relay.REQUEST_HEADER.pack_into(table.request, 0, 40, relay.MKDIR, 44 | 1 << 63, 1)
    assert again.unfinished() == 44 | 1 << 63
    assert again.suspect() == (44, 1)


def test_init_is_kept(tmp_path: Path) -> None:
    table = OpenTable(tmp_path, fresh=True)
    assert table.init_request == b""
    table.init_request = b"i" * 104
    table.last_backing_id = 17
    assert reopened(tmp_path).init_request == b"i" * 104
    assert reopened(tmp_path).last_backing_id == 17


def test_it_grows(tmp_path: Path) -> None:
    table = OpenTable(tmp_path, fresh=True)
    count = 40_000
    for ino in range(2, count + 2):
        table.add(ino | READ, ino, b"")
    table.settled()
    again = reopened(tmp_path)
    assert len(again.opens()) == count
    for ino in range(2, count + 2):
        assert again.drop(ino | READ, b"")
        again.forget(ino)
    assert again.opens() == []


class Killed(Exception):
    pass


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(2, 4), st.booleans()), max_size=12), st.integers()
)
def test_killed_between_any_two_stores(
    tmp_path_factory: object, steps: list[tuple[bool, int, bool]], when: int
) -> None:
    """Stores go through struct's pack_into: end at each of them in turn, and compare with what was told."""
    directory = tmp_path_factory.mktemp("t")  # type: ignore[attr-defined]
    expected: dict[int, int] = {}
    stores = [when % 40]

    class Failing:
        def __init__(self, real: struct.Struct) -> None:
            self._real = real
            self.size = real.size

        def pack_into(self, *args: object) -> None:
            if stores[0] == 0:
                raise Killed
            stores[0] -= 1
            self._real.pack_into(*args)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    real = {name: getattr(opentable, name) for name in ("_U64", "_REDO")}
    table = OpenTable(directory, fresh=True)
    told: dict[int, int] = {}
    try:
        for name, value in real.items():
            setattr(opentable, name, Failing(value))
        for is_open, ino, writable in steps:
            fh = ino | (WRITE if writable else READ)
            if is_open:
                expected[fh] = expected.get(fh, 0) + 1
                table.add(fh, ino, b"r")
            elif expected.get(fh, 0):
                expected[fh] -= 1
                if table.drop(fh, b"r"):
                    told = dict(expected)
                    table.forget(ino)
            told = dict(expected)  # the reply went out
            table.settled()
    except Killed:
        pass
    finally:
        for name, value in real.items():
            setattr(opentable, name, value)
    again = OpenTable(directory, fresh=False)
    found = dict(again.opens())
    before = {fh: count for fh, count in told.items() if count}
    after = {fh: count for fh, count in expected.items() if count}
    assert found in (before, after)
    if found != before:
        assert again.redo_reply == b"r", "the kernel would not learn of the change"
