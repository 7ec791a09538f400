"""Reading back from the durable tier: the right bytes or an error, no more than is needed, and never for ever."""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from fs.errors import FsError
from fs.objecttable import DurableObject
from fs.readahead import FIRST_BYTES, Streams
from fs.source import BAD_ATTEMPTS
from fs.tiers.tier import TierError, TierObjectMissing
from fs.types import FH_RESIDENT, FH_WRITABLE, ROOT_INO, Change
from tests.fetch_node import MIB, OP, FetchNode, OddTier

Make = Callable[..., FetchNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    nodes: list[FetchNode] = []

    def one(**options: Any) -> FetchNode:
        nodes.append(FetchNode(tmp_path, **options))
        return nodes[-1]

    yield one
    for node in nodes:
        node.close()


def run(node: FetchNode, test: Callable[[FetchNode], Awaitable[None]]) -> None:
    async def main() -> None:
        async with node.running():
            await test(node)

    trio.run(main)


DATA = random.Random(1).randbytes(20 * MIB + 12345)


def test_bytes_come_back_and_the_file_is_resident_then(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        before = node.attr(ino)
        assert (before.resident, before.blocks) == (0, 0)
        fh = await node.open(ino)
        assert not fh & FH_RESIDENT
        assert await node.read_all(fh, len(DATA)) == DATA
        after = node.attr(ino)
        assert after.resident and after.blocks * 512 >= len(DATA)
        assert after._replace(resident=0, blocks=0) == before, "nothing else of it has changed"
        status = node.arena.stat(ino)
        assert (status.st_mtime_ns, status.st_size) == (before.mtime_ns, len(DATA))
        # the old handle, and a new one, go on reading
        assert await node.read(fh, 5, 10) == DATA[5:15]
        again = await node.open(ino)
        assert again & FH_RESIDENT
        for each in (fh, again):
            await node.vfs.release(each)
        assert node.attr(ino).generation == before.generation
        # opened for writing and closed, it is no new generation either
        writer = await node.open(ino, os.O_WRONLY)
        await node.vfs.flush(writer)
        await node.vfs.release(writer)
        assert node.attr(ino).generation == before.generation

    run(make(), test)


@pytest.mark.parametrize("digests", [True, False])
def test_random_reads_get_the_bytes_and_little_else(make: Make, digests: bool) -> None:
    rng = random.Random(7)
    data = rng.randbytes(200 * MIB)

    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", data, digests=digests)
        fh = await node.open(ino)
        for offset in (100 * MIB, 7 * MIB, 180 * MIB - 5, 199 * MIB):
            assert await node.read(fh, offset, 4096) == data[offset : offset + 4096]
        assert sum(size for _, _, size in node.tier.reads) <= 6 * 8 * MIB
        assert not node.attr(ino).resident
        assert await node.read(fh, len(data) - 10, 100) == data[-10:]
        assert await node.read(fh, len(data) + 5, 100) == b""

    run(make(), test)


def test_reading_forward_fetches_ahead_in_parallel(make: Make) -> None:
    data = random.Random(3).randbytes(96 * MIB)

    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", data)
        node.tier.before = lambda offset, size: threading.Event().wait(0.03)
        fh = await node.open(ino)
        assert await node.read_all(fh, len(data)) == data
        assert 4 <= node.tier.most_at_once <= 8
        assert len(node.tier.reads) == 12, "each block once"

    run(make(), test)


def test_read_ahead_grows_with_a_run_and_leaves_jumps_alone() -> None:
    streams = Streams()
    assert streams.note(0, 4096, 1 << 30) == FIRST_BYTES
    assert streams.note(500 * MIB, 4096, 1 << 30) == 0
    last = 0
    for at in range(4096, 10 * MIB, 128 << 10):
        last = streams.note(at, 128 << 10, 64 * MIB)
    assert last == 64 * MIB
    assert streams.note(800 * MIB, 4096, 1 << 30) == 0


def test_a_block_is_fetched_once_for_all_who_wait(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        node.tier.before = lambda offset, size: threading.Event().wait(0.1)
        fh = await node.open(ino)
        got: list[bytes] = []

        async def one(offset: int) -> None:
            got.append(await node.read(fh, offset, 1000))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number * 1000)
        assert sorted(got) == sorted(DATA[n * 1000 : n * 1000 + 1000] for n in range(20))
        assert [read for read in node.tier.reads if read[1] == 0] == [("f", 0, 8 * MIB)]

    run(make(), test)


def test_who_stops_waiting_stops_nothing(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        go = threading.Event()
        node.tier.before = lambda offset, size: go.wait(10) and None
        fh = await node.open(ino)
        with trio.move_on_after(0.1):
            await node.read(fh, 0, 10)
            raise AssertionError("there were no bytes to be had")
        go.set()
        assert await node.read(fh, 0, 10) == DATA[:10]
        assert [read[1] for read in node.tier.reads].count(0) == 1

    run(make(), test)


def test_wrong_bytes_are_fetched_again(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        spoilt = iter([True, True])

        def spoil(offset: int, view: memoryview) -> None:
            if offset == 8 * MIB and next(spoilt, False):
                view[77] ^= 1

        node.tier.spoil = spoil
        fh = await node.open(ino)
        assert await node.read_all(fh, len(DATA)) == DATA
        assert [read[1] for read in node.tier.reads].count(8 * MIB) == 3

    run(make(), test)


@pytest.mark.parametrize("size", [20 * MIB, 520 * MIB], ids=["one-range", "many-ranges"])
def test_bytes_that_stay_wrong_are_eio_and_named(
    make: Make, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    data = bytes(size)  # also: zeros that are right must be told from zeros that are made up

    async def test(node: FetchNode) -> None:
        ino = await node.remote("dir-less", data)

        def spoil(offset: int, view: memoryview) -> None:
            if offset == 0:
                view[5] = 1

        node.tier.spoil = spoil
        fh = await node.open(ino)
        with pytest.raises(FsError) as error:
            await node.read(fh, 0, 10)
        assert error.value.errno == errno.EIO
        tries = [read[1] for read in node.tier.reads].count(0)
        assert tries == BAD_ATTEMPTS
        with pytest.raises(FsError):
            await node.read(fh, 100, 10)
        assert [read[1] for read in node.tier.reads].count(0) == tries, "not at every request"
        assert await node.read(fh, len(data) - 10, 10) == bytes(10), "the others are good"
        assert not node.attr(ino).resident

    with caplog.at_level(logging.ERROR):
        run(make(), test)
    assert "dir-less" in caplog.text


def test_a_tier_that_comes_back_is_waited_for(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        left = iter(range(4))

        def before(offset: int, size: int) -> None:
            if next(left, None) is not None:
                raise TierError("503 SlowDown")

        node.tier.before = before
        fh = await node.open(ino)
        assert await node.read_all(fh, len(DATA)) == DATA

    run(make(), test)


def test_a_tier_that_stays_away_is_eio_in_bounded_time(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)

        def before(offset: int, size: int) -> None:
            raise TierError("503 SlowDown")

        node.tier.before = before
        fh = await node.open(ino)
        began = trio.current_time()
        for call in (partial(node.read, fh, 0, 10), partial(node.open, ino, os.O_RDWR)):
            with pytest.raises(FsError) as error:
                await call()
            assert error.value.errno == errno.EIO
        assert trio.current_time() - began < 6
        node.tier.before = lambda offset, size: None
        await trio.sleep(2.1)
        assert await node.read(fh, 0, 10) == DATA[:10]

    with caplog.at_level(logging.ERROR):
        run(make(timeout_s=1.0), test)
    assert "503 SlowDown" in caplog.text


def test_an_object_that_is_gone_is_eio_never_enoent(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        node.tier.delete("f")
        fh = await node.open(ino)
        with pytest.raises(FsError) as error:
            await node.read(fh, 0, 10)
        assert error.value.errno == errno.EIO

    run(make(), test)


def test_an_object_that_moves_while_it_is_read(make: Make) -> None:
    """A rename is a copy under the new key, then the deletion of the old one."""

    async def test(node: FetchNode) -> None:
        ino = await node.remote("old", DATA)
        fh = await node.open(ino)
        assert await node.read(fh, 0, 10) == DATA[:10]
        node.dirty.add(ino)
        etag = node.tier.copy("old", "new", {}, None)
        node.tier.delete("old")
        with node.index.transaction():
            generation = node.attr(ino).generation
            node.objects.put(DurableObject("new", ino, generation, len(DATA), etag, 0))
            node.objects.drop("old")
        assert await node.read_all(fh, len(DATA)) == DATA

    run(make(), test)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND])
def test_open_for_writing_fetches_the_whole_file_first(make: Make, flags: int) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        fh = await node.open(ino, flags)
        assert fh & FH_RESIDENT and fh & FH_WRITABLE
        assert node.backing(ino) == DATA

    run(make(), test)


def test_emptying_a_file_fetches_nothing(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        for name, how in (("a", "open"), ("b", "truncate")):
            ino = await node.remote(name, DATA)
            before = node.attr(ino)
            reader = await node.open(ino)
            assert await node.read(reader, 0, 10) == DATA[:10]
            node.tier.reads.clear()
            if how == "open":
                fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
                assert fh & FH_RESIDENT
            else:
                await node.vfs.setattr(ino, Change(size=0), OP)
            after = node.vfs.getattr(ino)
            assert (after.resident, after.size) == (1, 0)
            assert after.generation > before.generation
            assert node.tier.reads == []
            assert await node.read(reader, 0, 10) == b"", "and who had it open sees that"

    run(make(), test)


def test_a_fetch_under_way_does_not_fill_the_file_that_took_its_place(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        go, began = threading.Event(), threading.Event()

        def before(offset: int, size: int) -> None:
            began.set()
            go.wait(10)

        node.tier.before = before
        reader = await node.open(ino)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.read, reader, 0, 10)
            await trio.to_thread.run_sync(began.wait)
            fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
            fd = node.arena.open(ino)
            os.pwrite(fd, b"new", 0)
            os.close(fd)
            go.set()
        await node.vfs.flush(fh)
        await trio.sleep(0.1)
        assert node.backing(ino) == b"new"

    run(make(), test)


@pytest.mark.parametrize("size", [5, len(DATA) - 1, len(DATA) + MIB])
def test_truncation_keeps_the_other_bytes(make: Make, size: int) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        attr = await node.vfs.setattr(ino, Change(size=size), OP)
        assert (attr.size, attr.resident) == (size, 1)
        assert node.backing(ino) == DATA[:size] + bytes(max(0, size - len(DATA)))

    run(make(), test)


def test_attributes_of_a_file_that_is_elsewhere(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        await node.vfs.setattr(ino, Change(mode=0o600, mtime_ns=123_456_789), OP)
        await node.vfs.link(ino, ROOT_INO, b"second", OP)
        await node.vfs.rename((ROOT_INO, b"f"), (ROOT_INO, b"g"), 0, OP)
        attr = node.vfs.getattr(ino)
        assert stat.S_IMODE(attr.mode) == 0o600
        assert (attr.mtime_ns, attr.nlink, attr.size) == (123_456_789, 2, len(DATA))
        assert node.tier.reads == []
        await node.fetcher.ensure_resident(ino)
        assert node.arena.stat(ino).st_mtime_ns == 123_456_789

    run(make(), test)


def test_empty_files_need_no_tier(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        for flags in (os.O_RDONLY, os.O_RDWR):
            ino = await node.remote(f"f{flags}", b"")
            node.tier.delete(f"f{flags}")
            assert await node.open(ino, flags) & FH_RESIDENT

    run(make(), test)


def test_prefetch_tells_how_far_it_is(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        told: list[tuple[int, int]] = []
        await node.fetcher.ensure_resident(ino, lambda *at: told.append(at))
        assert node.attr(ino).resident
        assert node.backing(ino) == DATA
        assert [at[0] for at in told] == sorted(at[0] for at in told)
        assert all(size == len(DATA) for _, size in told)

    run(make(), test)


def test_a_file_larger_than_the_arena_reads_to_its_end(make: Make) -> None:
    data = random.Random(5).randbytes(150 * MIB)

    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", data)
        fh = await node.open(ino)
        for at in range(0, len(data), 256 << 10):
            assert await node.read(fh, at, 256 << 10) == data[at : at + (256 << 10)]
            if at % (8 * MIB) == 0:
                assert node.arena.space().used_bytes <= 48 * MIB
        assert not node.attr(ino).resident
        with pytest.raises(FsError) as error:
            await node.open(ino, os.O_RDWR)
        assert error.value.errno == errno.ENOSPC

    run(make(size_bytes=48 * MIB), test)


def test_an_unlinked_file_is_read_to_its_end(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        fh = await node.open(ino)
        assert await node.read(fh, 0, 10) == DATA[:10]
        node.tier.before = lambda offset, size: threading.Event().wait(0.1)
        await node.vfs.unlink(ROOT_INO, b"f", OP)
        assert node.fetcher.holds("f"), "it must not be deleted yet"
        while node.fetcher.holds("f"):  # noqa: ASYNC110 (nothing tells)
            await trio.sleep(0.01)
        node.tier.delete("f")
        assert await node.read_all(fh, len(DATA)) == DATA
        await node.vfs.release(fh)
        assert ino not in node.arena.inodes()

    run(make(), test)


def test_bytes_still_to_be_uploaded_outlive_their_name(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.store("f", DATA)
        node.kept.add(ino)
        await node.vfs.unlink(ROOT_INO, b"f", OP)
        node.vfs.sweep()
        node.vfs.recover([], fresh_mount=False)
        assert node.backing(ino) == DATA
        node.kept.clear()
        node.vfs.unpinned(ino)
        assert ino not in node.arena.inodes()
        node.vfs.sweep()
        assert node.index.attr(ino) is None

    run(make(), test)


def test_a_new_worker_fetches_anew(make: Make, tmp_path: Path) -> None:
    """Which blocks were here is lost with the worker; what it left is not believed."""
    tier = OddTier()
    first = make(tier=tier)

    async def begin(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        fh = await node.open(ino)
        assert await node.read(fh, 0, 10) == DATA[:10]
        fd = node.arena.open(ino)
        os.pwrite(fd, b"damage", 0)
        os.close(fd)

    run(first, begin)
    ino = first.arena.inodes()[0]
    first.index.close()
    second = make(tier=tier)

    async def go_on(node: FetchNode) -> None:
        node.vfs.recover([(ino, 1)], fresh_mount=False)
        assert await node.read_all(ino, len(DATA)) == DATA

    run(second, go_on)
    second.index.close()
    third = make(tier=tier)
    third.evict(ino)
    third.arena.create(ino)
    third.vfs.recover([], fresh_mount=True)
    assert third.arena.inodes() == []


def test_digests_are_asked_for_when_they_are_not_known(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)
        node.index.db.execute("DELETE FROM digest")
        spoilt = iter([True])

        def spoil(offset: int, view: memoryview) -> None:
            if next(spoilt, False):
                view[0] ^= 1

        node.tier.spoil = spoil
        fh = await node.open(ino)
        assert await node.read_all(fh, len(DATA)) == DATA
        assert node.objects.digests(ino, node.attr(ino).generation) is not None

    run(make(), test)


def test_a_missing_object_is_told_from_a_tier_that_is_away(make: Make) -> None:
    async def test(node: FetchNode) -> None:
        ino = await node.remote("f", DATA)

        def before(offset: int, size: int) -> None:
            raise TierObjectMissing("not now")

        node.tier.before = before
        node.dirty.add(ino)  # a rename is under way: it will be found under its new key
        fh = await node.open(ino)
        with trio.move_on_after(0.5) as scope:
            await node.read(fh, 0, 1)
        assert scope.cancelled_caught
        node.dirty.clear()
        with pytest.raises(FsError):
            await node.read(fh, 0, 1)

    run(make(), test)
