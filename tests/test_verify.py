"""Every copy is read again: in memory, and in a directory whose files are spoilt as a bad disk does it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import trio

from fs.durable import Durable
from fs.errors import FsError
from fs.tiers.directory import DirectoryTier
from fs.tiers.faults import Call, FaultPlan
from fs.tiers.memory import MemoryTier
from fs.tiers.tier import Tier, TierError
from fs.types import ROOT_INO
from fs.verify import Finding, Verifier
from tests.discovery_node import DiscoveryNode, filled
from tests.durable_node import MIB, OP, DurableNode, run

BLOCK = 8 * MIB


def verifier(node: DurableNode, **options: float) -> Verifier:
    return Verifier(
        node.index,
        node.arena,
        node.store.content,
        node.objects,
        node.tier,
        state_of=Durable(node.store, node.writeback).state_of,
        is_clean=node.journal.is_clean,
        **options,  # type: ignore[arg-type]
    )


def flip(path: Path, offset: int) -> None:
    """One bit, and nothing else that anybody could notice."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Place:
    """A node whose tier is a directory that can be spoilt."""

    def __init__(self, tmp_path: Path) -> None:
        self.kept = tmp_path / "tier"
        self.kept.mkdir()
        self.node = DurableNode(tmp_path / "node", DirectoryTier(str(self.kept)))

    async def saved(self, path: str, data: bytes) -> int:
        ino = await self.node.write(path, data)
        async with self.node.running():
            await self.node.drained()
        return ino

    def in_memory(self, ino: int) -> Path:
        return self.node.arena.root / "data" / str(ino)

    def evict(self, ino: int) -> None:
        with self.node.index.transaction():
            self.node.index.set_resident(ino, 0, 0)
        self.node.arena.remove(ino)

    async def verify(self, ino: int) -> Finding:
        return await verifier(self.node).verify(ino)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def data_of(size: int) -> bytes:
    return os.urandom(min(size, MIB)) * -(-size // MIB) if size else b""


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK + 12345])
def test_whole_copies_are_whole(place: Place, size: int) -> None:
    async def main() -> None:
        data = data_of(size)[:size]
        ino = await place.saved("f", data)
        await place.node.link("f", "other name")
        async with place.node.running():
            await place.node.drained()
        told: list[tuple[int, int]] = []
        finding = await verifier(place.node).verify(
            ino, lambda done, all_: told.append((done, all_))
        )
        assert (finding.outcome, finding.text, finding.state) == ("ok", "", "durable")
        assert [copy.outcome for copy in finding.copies] == ["ok"] * 3
        wheres = {copy.where for copy in finding.copies}
        assert wheres == {"memory", f"file://{place.kept}/f", f"file://{place.kept}/other name"}
        if size:
            assert told[-1] == (size, size)
            assert [done for done, _ in told] == sorted(done for done, _ in told)
        place.evict(ino)
        finding = await place.verify(ino)
        assert (finding.outcome, finding.state, len(finding.copies)) == ("ok", "remote", 2)

    run(main)


@pytest.mark.parametrize("offset", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 99])
def test_a_flipped_bit_in_memory(place: Place, offset: int) -> None:
    async def main() -> None:
        ino = await place.saved("f", data_of(2 * BLOCK + 100)[: 2 * BLOCK + 100])
        flip(place.in_memory(ino), offset)
        finding = await place.verify(ino)
        assert finding.outcome == "damaged"
        memory, kept = finding.copies
        assert (memory.outcome, kept.outcome) == ("damaged", "ok")
        begin = offset // BLOCK * BLOCK
        assert f"at {begin}+{min(BLOCK, 2 * BLOCK + 100 - begin)}" in memory.text
        assert finding.text.startswith("memory: other bytes than were stored")

    run(main)


@pytest.mark.parametrize("resident", [True, False])
def test_a_flipped_bit_in_the_tier(place: Place, resident: bool) -> None:
    async def main() -> None:
        ino = await place.saved("f", data_of(2 * BLOCK + 100)[: 2 * BLOCK + 100])
        if not resident:
            place.evict(ino)
        flip(place.kept / "f", BLOCK + 7)
        finding = await place.verify(ino)
        assert finding.outcome == "damaged"
        assert [copy.outcome for copy in finding.copies] == ["ok", "damaged"][not resident :]
        assert (
            f"file://{place.kept}/f: other bytes than were stored, at {BLOCK}+{BLOCK}"
            in finding.text
        )

    run(main)


def test_one_bad_name_of_several(place: Place) -> None:
    async def main() -> None:
        ino = await place.saved("f", b"bytes")
        await place.node.link("f", "g")
        async with place.node.running():
            await place.node.drained()
        (place.kept / "g").unlink()
        finding = await place.verify(ino)
        outcomes = {copy.where: copy.outcome for copy in finding.copies}
        assert outcomes[f"file://{place.kept}/g"] == "damaged"
        assert outcomes[f"file://{place.kept}/f"] == outcomes["memory"] == "ok"
        assert "no such object" in finding.text

    run(main)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place, ino: (place.kept / "f").write_bytes(b"others"), "somebody else"),
        (lambda place, ino: (place.kept / "f").unlink(), "no such object"),
        (lambda place, ino: place.in_memory(ino).unlink(), "the backing file is gone"),
        (lambda place, ino: os.truncate(place.in_memory(ino), 2), "2 of 6 bytes"),
        (lambda place, ino: os.truncate(place.in_memory(ino), 7), "7 of 6 bytes"),
    ],
)
def test_copies_that_are_gone_or_of_another_length(
    place: Place, spoil: Callable[[Place, int], None], said: str
) -> None:
    async def main() -> None:
        ino = await place.saved("f", b"stored")
        spoil(place, ino)
        finding = await place.verify(ino)
        assert finding.outcome == "damaged"
        assert said in finding.text

    run(main)


def test_what_is_not_durable_is_told_and_is_no_damage(place: Place) -> None:
    async def main() -> None:
        ino = await place.node.write("f", b"new")
        finding = await place.verify(ino)
        assert (finding.outcome, finding.state) == ("ok", "local")
        assert "not durable" in finding.text
        place.evict(ino)
        place.node.journal.is_clean = lambda ino: True  # type: ignore[method-assign]
        finding = await place.verify(ino)
        assert (finding.outcome, finding.text) == ("damaged", "there is no copy at all")

    run(main)


def test_a_file_that_is_being_written_is_left_alone(place: Place) -> None:
    async def main() -> None:
        ino = await place.saved("f", b"stored")
        fh = await place.node.vfs.open(ino, os.O_WRONLY, OP)
        place.node.store_bytes(ino, b"half")
        finding = await place.verify(ino)
        assert (finding.outcome, finding.state) == ("changed", "writing")
        await place.node.vfs.flush(fh)
        await place.node.vfs.release(fh)
        async with place.node.running():
            await place.node.drained()
        assert (await place.verify(ino)).outcome == "ok"

    run(main)


def test_what_is_no_regular_file_or_gone(place: Place) -> None:
    async def main() -> None:
        for ino, code in ((ROOT_INO, errno.EINVAL), (4000, errno.ESTALE)):
            with pytest.raises(FsError) as error:
                await place.verify(ino)
            assert error.value.errno == code

    run(main)


# a tier that fails, and files that move


def held_up(operation: str) -> tuple[FaultPlan, threading.Event, threading.Event]:
    """The first such call has its answer late: (plan, it has come, let it go on)."""
    held, go = threading.Event(), threading.Event()

    def decide(call: Call, when: str) -> None:
        if call.operation == operation and when == "before" and not held.is_set():
            held.set()
            assert go.wait(10)

    return FaultPlan(decide), held, go


@pytest.mark.parametrize("what", ["rename", "rewrite", "unlink", "chmod"])
@pytest.mark.parametrize("at", ["head", "read_into"])
def test_a_file_that_moves_meanwhile_is_never_called_damaged(
    tmp_path: Path, what: str, at: str
) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = DurableNode(tmp_path, tier)
        async with node.running():
            ino = await node.write("f", b"bytes")
            await node.drained()
            tier.plan, held, go = held_up(at)
            findings: list[Finding | FsError] = []

            async def verify() -> None:
                try:
                    findings.append(await verifier(node).verify(ino))
                except FsError as error:
                    findings.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(verify)
                assert await trio.to_thread.run_sync(held.wait, 10)
                if what == "rename":
                    await node.rename("f", "g")
                elif what == "rewrite":
                    await node.write("f", b"other bytes")
                elif what == "unlink":
                    await node.unlink("f")
                else:
                    await node.chmod("f", 0o600)
                await node.drained()
                node.vfs.sweep()
                go.set()
            [finding] = findings
            if isinstance(finding, FsError):
                assert what == "unlink"
                assert finding.errno == errno.ESTALE
            else:
                assert finding.outcome == ("changed" if what == "unlink" else "ok"), finding
        node.close()

    run(main)


def test_an_object_whose_attributes_are_just_being_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier has the object under another ETag already, and the node does not know yet."""
    tier = MemoryTier()
    copied, go = threading.Event(), threading.Event()
    copy = tier.copy

    def copy_late(source: str, key: str, meta: Mapping[str, str], etag: str | None) -> str:
        copy(source, key, meta, etag)
        tier._objects[key] = tier._objects[key]._replace(etag="another")
        copied.set()
        assert go.wait(10)
        return "another"

    monkeypatch.setattr(tier, "copy", copy_late)

    async def main() -> None:
        node = DurableNode(tmp_path, tier)
        async with node.running():
            ino = await node.write("f", b"bytes")
            await node.drained()
            await node.chmod("f", 0o600)
            assert await trio.to_thread.run_sync(copied.wait, 10)
            assert (await verifier(node).verify(ino)).outcome == "changed"
            go.set()
            await node.drained()
            assert (await verifier(node).verify(ino)).outcome == "ok"
        node.close()

    run(main)


def test_a_tier_that_does_not_answer_is_no_damage(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = DurableNode(tmp_path, tier)
        async with node.running():
            ino = await node.write("f", b"bytes")
            await node.drained()
        tier.plan.fail("read_into", times=2)
        tier.plan.fail("head", times=2)
        assert (await verifier(node).verify(ino)).outcome == "ok"
        tier.plan.fail("", times=-1, error=TierError("503 SlowDown"))
        finding = await verifier(node, timeout_s=0.3).verify(ino)
        assert finding.outcome == "unknown"
        assert "503 SlowDown" in finding.text and "memory:f" in finding.text
        node.close()

    run(main)


def test_bytes_that_went_wrong_on_the_way_once_are_no_damage(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = DurableNode(tmp_path, tier)
        async with node.running():
            ino = await node.write("f", b"bytes")
            await node.drained()
        tier.plan.flip(2, key="f", times=1)
        assert (await verifier(node).verify(ino)).outcome == "ok"
        tier.plan.flip(2, key="f", times=-1)
        assert (await verifier(node).verify(ino)).outcome == "damaged"
        node.close()

    run(main)


def test_objects_of_others_have_no_digests(tmp_path: Path) -> None:
    tier = filled({"f": b"by others"})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        async with node.running():
            found = await node.find("f")
            assert found is not None
            finding = await verifier(node).verify(found.ino)
            assert finding.outcome == "ok"
            assert "no digests" in finding.text
            assert await node.read("f") == b"by others"
            finding = await verifier(node).verify(found.ino)
            assert (finding.outcome, len(finding.copies)) == ("ok", 2)
            flip(node.arena.root / "data" / str(found.ino), 3)
            finding = await verifier(node).verify(found.ino)
            assert finding.outcome == "damaged"
            assert "differs from what is in memory" in finding.text
        node.close()

    run(main)


def test_memory_is_bounded_and_ranges_overlap(tmp_path: Path) -> None:
    """40 MiB are read through a few buffers, several at a time."""
    tier: Tier = MemoryTier()
    size = 5 * BLOCK
    at_once = most = 0
    buffers: set[int] = set()
    lock = threading.Lock()
    read_into = tier.read_into

    def watched(key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            buffers.add(id(buffer.obj))
            assert len(buffer) <= BLOCK
        time.sleep(0.02 if offset else 0.1)  # the first comes last
        read_into(key, offset, buffer, etag)
        with lock:
            at_once -= 1

    async def main() -> None:
        node = DurableNode(tmp_path, tier)
        async with node.running():
            ino = await node.write("f", data_of(size))
            await node.drained()
        tier.read_into = watched  # type: ignore[method-assign]
        assert (await verifier(node).verify(ino)).outcome == "ok"
        assert 1 < most <= 3
        assert len(buffers) <= 3
        node.close()

    run(main)
