"""Mounting an empty arena on a durable tier that holds something already."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
import trio
from botocore.config import Config
from trio.testing import wait_all_tasks_blocked

from fs.errors import FsError
from fs.objects import key_part
from fs.tiers.directory import DirectoryTier
from fs.tiers.faults import Call, FaultPlan
from fs.tiers.memory import MemoryTier
from fs.tiers.s3 import S3Tier
from fs.tiers.tier import Tier, TierError, TierRefused
from fs.types import RENAME_NOREPLACE, ROOT_INO, Change
from tests.discovery_node import DiscoveryNode, calls, facts, filled
from tests.durable_node import OP, DurableNode, contents, run
from tests.tiers.lib import s3_tier


def code_of(error: pytest.ExceptionInfo[FsError]) -> int | None:
    return error.value.errno


@pytest.fixture(params=["memory", "directory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "memory":
        return MemoryTier(page_size=3)
    (tmp_path / "tier").mkdir()
    return DirectoryTier(str(tmp_path / "tier"))


# what is there comes back


def test_a_tree_comes_back_as_it_was(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        first = DurableNode(tmp_path / "first", tier)
        async with first.running():
            await first.mkdir("run")
            await first.mkdir("run/empty")
            await first.mkdir("run/ckpt-1")
            for number in range(10):
                await first.write(f"run/ckpt-1/shard-{number}", b"x" * number)
            await first.write("latest", b"ckpt-1")
            await first.write("run/two words é\udcff", b"odd")
            await first.symlink("run/last", b"ckpt-1")
            await first.symlink("run/far", b"/" + b"t" * 2000)
            await first.link("latest", "run/other name")
            await first.chmod("run/ckpt-1", 0o2750)
            await first.chmod("run/ckpt-1/shard-3", 0o4711)
            shard = await first.find("run/ckpt-1/shard-4")
            assert shard is not None
            times = Change(uid=12, gid=34, mtime_ns=123_456_789_123_456_789)
            await first.vfs.setattr(shard.ino, times, OP)
            await first.write("run/ckpt-1/shard-5", b"rewritten")
            await first.drained()
        before = {}
        for path in await tree_paths(first):
            attr = await first.find(path)
            assert attr is not None
            before[path] = facts(attr)
        first.close()

        second = DiscoveryNode(tmp_path / "second", tier)
        async with second.running():
            assert second.begun
            after = await second.everything()
            assert {path: facts(attr) for path, attr in after.items()} == before
            for attr in after.values():
                if stat.S_ISREG(attr.mode):
                    assert not attr.resident and attr.blocks == 0
            assert await second.read("run/ckpt-1/shard-5") == b"rewritten"
            assert await second.read("run/two words é\udcff") == b"odd"
            assert await second.read("run/other name") == b"ckpt-1"
            assert await second.read("run/ckpt-1/shard-0") == b""
            assert await second.readlink("run/last") == b"ckpt-1"
            assert await second.readlink("run/far") == b"/" + b"t" * 2000
            # nothing is to be uploaded, and digests came along
            assert not second.journal.trees()
            assert second.objects.digests(after["latest"].ino, after["latest"].generation)
            assert second.root().nlink == 3
            assert after["run"].nlink == 2, "what is below was not known yet"
            assert (await second.entries())["run"].nlink == 4
        second.close()

    run(main)


async def tree_paths(node: DurableNode) -> list[str]:
    return sorted(path.rstrip("/") for path in await node.tree())


def test_names_are_found_without_listing(tmp_path: Path) -> None:
    tier = filled({f"d/sub/f{number:04}": b"." for number in range(5000)} | {"top": b"abc"})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        found = await node.find("d/sub/f4321")
        assert found is not None
        assert (found.size, found.mode, found.resident) == (1, stat.S_IFREG | 0o644, 0)
        assert (found.uid, found.gid) == (os.getuid(), os.getgid())
        assert abs(found.mtime_ns - time.time_ns()) < 60e9
        assert await node.find("top") is not None
        assert await node.find("nothing") is None
        assert await node.find("d/nothing") is None
        counted = calls(tier)
        assert counted["list"] <= 6, counted
        # absence is believed, too
        assert await node.find("nothing") is None
        assert not calls(tier)
        directory = await node.find("d/sub")
        assert directory is not None
        assert (directory.mode, directory.nlink) == (stat.S_IFDIR | 0o755, 2)
        node.close()

    run(main)


def test_what_is_found_by_its_name_alone_is_what_it_is(tmp_path: Path, tier: Tier) -> None:
    tier.put("d/f", b"abc", {})
    tier.put("d/sub/", b"", {})

    async def main() -> None:
        node = DiscoveryNode(tmp_path / "node", tier)
        for path, kind in (("d/f", stat.S_IFREG), ("d/sub", stat.S_IFDIR), ("d", stat.S_IFDIR)):
            found = await node.find(path)
            assert found is not None and stat.S_IFMT(found.mode) == kind, path
        assert await node.find("d/f/below") is None
        node.close()

    run(main)


def test_many_lookups_list_the_directory_along_the_way(tmp_path: Path) -> None:
    tier = filled({f"f{number:04}": b"." for number in range(1000)}, page_size=100)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        for number in range(16):
            assert await node.find(f"absent{number}") is None
        for number in range(10):
            assert await node.find(f"absent2-{number}") is None
        calls(tier)
        # the listing has come to its end
        assert await node.find("absent3") is None
        assert await node.find("f0999") is not None
        assert calls(tier) == {"head": 1}
        node.close()

    run(main)


def test_a_large_directory_is_listed_in_pages_without_a_storm(tmp_path: Path) -> None:
    """100,000 objects in one directory: what is asked of the tier goes with what is read, not with what is there."""
    count = 100_000
    tier = filled({f"big/{number:06}": b"" for number in range(count)})

    async def main() -> None:
        began_s = time.monotonic()
        node = DiscoveryNode(tmp_path, tier)
        assert await node.names() == ["big"]
        assert time.monotonic() - began_s < 5
        counted = calls(tier)
        assert counted.total() <= 6, counted

        began_s = time.monotonic()
        big = await node.find("big")
        assert big is not None
        rows = await node.catalog.entries(big.ino, 0, 1024)
        assert rows
        assert [row.name for row in rows] == [b"%06d" % number for number in range(len(rows))]
        assert time.monotonic() - began_s < 5
        counted = calls(tier)
        assert counted["list"] <= 3, counted
        assert counted["head"] <= len(rows) + 1 < 1000, counted

        # the whole listing, without attributes (what a rename of the directory would begin with)
        began_s = time.monotonic()
        await node.catalog._finder.names([big.ino])
        assert time.monotonic() - began_s < 20
        assert calls(tier).keys() == {"list"}
        assert node.index.counts() == (count, 2)
        node.close()

    run(main)


# odd objects


def test_odd_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = filled(
        {
            "d/good": b"good",
            "d//empty part": b"",
            "d/./dot": b"",
            "d/../up": b"",
            "d/nul\0": b"",
            "d/" + "l" * 256: b"",
            "d/" + "l" * 255: b"longest",
            "d/" + key_part(b"\xff\xfe"): b"bytes",
            "d/\uf7c3\uf7a9": b"another name of \xc3\xa9",
            "d/both": b"object",
            "d/both-": b"sorts between the two",
            "d/both/below": b"below",
            "marker/": b"with a body",
            "marker/x": b"",
        },
        page_size=1,
    )

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        assert await node.names() == ["d", "marker"]
        expected = ["good", "l" * 255, "\udcff\udcfe", "both", "both-"]
        assert await node.names("d") == sorted(expected)
        assert await node.find("d/é") is None
        assert await node.names("d/both") == ["below"]
        assert await node.names("marker") == ["x"]
        assert await node.find("marker/" + "k" * 250) is None
        deep = "d/both"
        for _ in range(5):
            await node.mkdir(f"{deep}/{'k' * 180}")
            deep = f"{deep}/{'k' * 180}"
        ino = await ino_of(node, deep)
        assert await node.vfs.lookup(ino, b"n" * 255) is None, "no key of that length can be there"
        async with node.running():
            assert await node.read("d/\udcff\udcfe") == b"bytes"
            assert await node.read("d/" + "l" * 255) == b"longest"
        node.close()

    run(main)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "left out" in line]) == 1, said
    assert len([line for line in said if "the directory is shown" in line]) == 1, said


@pytest.mark.parametrize("asked_first", ["a", "listing", "listing by pages"])
def test_an_object_with_others_below_it_is_a_directory_however_it_is_found(
    tmp_path: Path, asked_first: str
) -> None:
    objects = {"a": b"object"} | {f"a,{number:02}": b"" for number in range(50)} | {"a/b": b"below"}
    tier = filled(objects, page_size=5)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        if asked_first == "a":
            assert await node.find("a") is not None
        elif asked_first == "listing by pages":
            # a reader who takes four entries at a time, long before the listing has come to what is below
            await node.catalog.listed(ROOT_INO, 0, 4)
            [row, *_] = node.catalog.scan(ROOT_INO, 0, 4)
            assert row.name == b"a"
            assert stat.S_ISDIR(row.attr.mode)
        found = (await node.entries())["a"]
        assert stat.S_ISDIR(found.mode)
        assert await node.names("a") == ["b"]
        assert node.root().nlink == 3
        assert node.objects.get("a") is None
        node.close()

    run(main)


def test_metadata_that_make_no_sense_make_no_file_unreadable(tmp_path: Path) -> None:
    tier = MemoryTier()
    huge = str((1 << 62) + 1)
    tier.put("ids", b"1", {"ckptfs-uid": huge, "ckptfs-gid": str((1 << 32) - 1)})
    tier.put("generation", b"1", {"ckptfs-generation": huge})
    tier.put("mode", b"1", {"ckptfs-mode": "not octal", "ckptfs-kind": "door"})
    tier.put("long link", b"t" * 5000, {"ckptfs-kind": "symlink", "ckptfs-mode": "0777"})
    tier.put("empty link", b"", {"ckptfs-kind": "symlink", "ckptfs-target": ""})
    tier.put("nul link", b"a\0b", {"ckptfs-kind": "symlink"})
    tier.put("other link", b"as the body says", {"ckptfs-kind": "symlink", "ckptfs-target": "not"})
    tier.put("no directory", b"file", {"ckptfs-kind": "directory", "ckptfs-mode": "0755"})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        found = await node.entries()
        assert (found["ids"].uid, found["ids"].gid) == (os.getuid(), os.getgid())
        assert found["generation"].generation == 1
        for name in ("ids", "generation", "mode", "no directory", "long link", "nul link"):
            assert found[name].mode == stat.S_IFREG | 0o644, name
            assert found[name].size == len(tier.read(name, 5000)[0])
        assert stat.S_ISREG(found["empty link"].mode)
        assert await node.readlink("other link") == b"as the body says"
        async with node.running():
            assert await node.read("no directory") == b"file"
            await node.write("generation", b"22")
            await node.drained()
        assert contents(tier)["generation"] == b"22"
        node.close()

    run(main)


# what is decided needs what is there


async def ino_of(node: DurableNode, path: str) -> int:
    attr = await node.find(path)
    assert attr is not None, path
    return attr.ino


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    tier = filled({"f": b"old", "d/x": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        for name in (b"f", b"d"):
            for call in (
                lambda name=name: node.vfs.create(ROOT_INO, name, 0o644, os.O_WRONLY, OP),
                lambda name=name: node.vfs.mkdir(ROOT_INO, name, 0o755, OP),
                lambda name=name: node.vfs.symlink(ROOT_INO, name, b"t", OP),
                lambda name=name: node.vfs.mknod(ROOT_INO, name, stat.S_IFIFO, 0, OP),
            ):
                with pytest.raises(FsError) as error:
                    await call()
                assert code_of(error) == errno.EEXIST
        await node.write("new", b"new")
        with pytest.raises(FsError) as error:
            await node.link("new", "f")
        assert code_of(error) == errno.EEXIST
        with pytest.raises(FsError) as error:
            await node.rename("new", "f", RENAME_NOREPLACE)
        assert code_of(error) == errno.EEXIST
        with pytest.raises(FsError) as error:
            await node.rename("new", "d")
        assert code_of(error) == errno.EISDIR
        assert await node.names() == ["d", "f", "new"]
        node.close()

    run(main)


def test_a_directory_that_was_not_read_is_not_taken_for_empty(tmp_path: Path) -> None:
    tier = filled({"d/x": b"", "e/": b"", "f/": b"", "g/h/i/j": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        await node.mkdir("mine")
        for path in ("d", "g", "g/h"):
            with pytest.raises(FsError) as error:
                await node.rmdir(path)
            assert code_of(error) == errno.ENOTEMPTY
            with pytest.raises(FsError) as error:
                await node.rename("mine", path)
            assert code_of(error) == errno.ENOTEMPTY
        await node.rmdir("e")
        await node.rename("mine", "f")
        assert await node.names() == ["d", "f", "g"]
        async with node.running():
            await node.unlink("d/x")
            await node.rmdir("d")
            await node.drained()
        assert set(contents(tier)) == {"f/", "g/h/i/j"}
        node.close()

    run(main)


def test_a_directory_moves_with_all_that_was_never_looked_at(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        first = DurableNode(tmp_path / "first", tier)
        async with first.running():
            for path in ("old", "old/sub", "old/sub/deep"):
                await first.mkdir(path)
            for number in range(7):
                await first.write(f"old/sub/deep/{number}", b"%d" % number)
            await first.symlink("old/link", b"sub")
            await first.chmod("old/sub/deep/3", 0o600)
            await first.chmod("old/sub", 0o700)
            await first.drained()
        first.close()
        tier.put("old/plain/dir/file", b"by others", {})

        second = DiscoveryNode(tmp_path / "second", tier)
        async with second.running():
            assert await second.find("old") is not None
            await second.rename("old", "new")
            assert await second.find("old") is None
            assert await second.names() == ["new"]
            await second.drained()
            assert await second.find("old") is None
            assert await second.names() == ["new"]
            assert await second.names("new") == ["link", "plain", "sub"]
            assert await second.read("new/sub/deep/6") == b"6"
        second.close()
        assert not [key for key in contents(tier) if key.startswith("old")]

        third = DiscoveryNode(tmp_path / "third", tier)
        async with third.running():
            found = await third.everything()
            assert set(found) == {
                "new",
                "new/link",
                "new/plain",
                "new/plain/dir",
                "new/plain/dir/file",
                "new/sub",
                "new/sub/deep",
            } | {f"new/sub/deep/{number}" for number in range(7)}
            assert stat.S_IMODE(found["new/sub/deep/3"].mode) == 0o600
            assert stat.S_IMODE(found["new/sub"].mode) == 0o700
            assert await third.readlink("new/link") == b"sub"
            assert await third.read("new/plain/dir/file") == b"by others"
        third.close()

    run(main)


def test_a_file_replaces_one_that_was_never_looked_at(tmp_path: Path) -> None:
    tier = filled({"a": b"old a", "b": b"old b"})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        async with node.running():
            await node.write("tmp", b"new a")
            await node.rename("tmp", "a")
            await node.rename("b", "c")
            await node.drained()
            assert contents(tier) == {"a": b"new a", "c": b"old b"}
            assert await node.names() == ["a", "c"]
            assert await node.read("c") == b"old b"
        node.close()

    run(main)


def test_a_directory_that_is_there_by_its_contents_stays_when_they_go(tmp_path: Path) -> None:
    tier = filled({"d/x": b"", "e/y": b"", "e/z": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path / "one", tier)
        async with node.running():
            await node.unlink("d/x")
            await node.rename("e/y", "top")
            await node.drained()
            await node.chmod("e", 0o711)
            await node.drained()
        # at no time was it not there
        made = [(change.operation, change.key) for change in tier.history if change.key[0] in "de"]
        assert made.index(("put", "d/")) < made.index(("delete", "d/x"))
        node.close()
        again = DiscoveryNode(tmp_path / "two", tier)
        assert await again.names() == ["d", "e", "top"]
        assert await again.names("d") == []
        assert stat.S_IMODE((await again.entries())["e"].mode) == 0o711
        again.close()

    run(main)


def test_attributes_of_a_directory_without_an_object_are_kept_by_making_one(tmp_path: Path) -> None:
    tier = filled({"d/x": b"", "e/y": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path / "one", tier)
        async with node.running():
            await node.chmod("d", 0o700)
            await node.drained()
        node.close()
        assert set(contents(tier)) == {"d/", "d/x", "e/y"}, "none is made that was not asked for"
        again = DiscoveryNode(tmp_path / "two", tier)
        assert stat.S_IMODE((await again.entries())["d"].mode) == 0o700
        again.close()

    run(main)


# what was removed stays away


def test_what_was_removed_does_not_come_back_while_it_is_in_the_tier(tmp_path: Path) -> None:
    tier = filled({"f": b"", "d/x": b"", "d/y/z": b"", "kept": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)  # its writeback does not run
        await node.unlink("f")
        await node.rename("d", "moved")
        assert {"f", "d/x"} <= set(contents(tier))
        for _ in range(2):
            assert await node.find("f") is None
            assert await node.find("d") is None
            assert await node.names() == ["kept", "moved"]
            node.close()
            node = DiscoveryNode(tmp_path, tier)  # another worker
            assert not node.begun
        await node.mkdir("d")
        assert await node.names("d") == []
        async with node.running():
            await node.drained()
        assert set(contents(tier)) == {"kept", "moved/", "moved/x", "moved/y/", "moved/y/z", "d/"}
        node.close()

    run(main)


def test_an_answer_from_before_a_removal_brings_nothing_back(tmp_path: Path) -> None:
    hold, held, go = threading.Event(), threading.Event(), threading.Event()

    def decide(call: Call, when: str) -> None:
        if call.operation == "list" and when == "after" and hold.is_set():
            held.set()
            assert go.wait(10)

    tier = filled({f"f{number}": b"" for number in range(10)} | {"g/x": b""})
    tier.plan = FaultPlan(decide)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        async with node.running(), trio.open_nursery() as nursery:
            assert await node.find("f3") is not None
            assert await node.find("g/x") is not None
            hold.set()
            nursery.start_soon(node.catalog.listed, ROOT_INO)
            assert await trio.to_thread.run_sync(held.wait, 10)
            hold.clear()
            await node.unlink("f3")
            await node.rename("g", "h")
            await node.drained()
            assert not {"f3", "g/x"} & set(contents(tier))
            assert not node.journal.has_below("")
            go.set()
        assert await node.names() == [f"f{number}" for number in range(10) if number != 3] + ["h"]
        assert await node.find("g") is None
        node.close()

    run(main)


# workers that end, arenas that are kept


def test_a_worker_killed_while_listing_leaves_nothing_half(tmp_path: Path) -> None:
    tier = filled({f"{number:03}": b"" for number in range(100)}, page_size=10)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        for _ in range(4):
            await node.catalog._finder.page(ROOT_INO)
        assert len(node.catalog.scan(ROOT_INO, 0, 1000)) == 40
        await node.unlink("005")
        node.close()

        node = DiscoveryNode(tmp_path, tier)
        assert not node.begun
        await node.write("035 mine", b"")
        assert len(await node.names()) == 100
        node.close()
        calls(tier)
        node = DiscoveryNode(tmp_path, tier)
        assert len(await node.names()) == 100
        assert await node.find("nothing") is None
        assert not calls(tier), "a kept arena lists nothing again"
        node.close()

    run(main)


def test_an_arena_that_was_used_before_is_merged_with_the_tier(tmp_path: Path) -> None:
    tier = filled({"both/theirs": b"theirs", "both/same": b"theirs", "theirs": b""})

    async def main() -> None:
        node = DurableNode(tmp_path, MemoryTier())
        await node.mkdir("both")
        await node.write("both/ours", b"ours")
        await node.write("both/same", b"ours")
        node.close()
        again = DiscoveryNode(tmp_path, tier)
        async with again.running():
            assert await again.names() == ["both", "theirs"]
            assert await again.names("both") == ["ours", "same", "theirs"]
            assert await again.read("both/theirs") == b"theirs"
            assert await again.read("both/same") == b"ours"
        again.close()

    run(main)


# a tier that fails


@pytest.mark.parametrize("operation", ["head", "list"])
def test_what_passes_is_never_no_such_file(tmp_path: Path, operation: str) -> None:
    tier = filled({"f": b"", "d/x": b""})
    tier.plan.fail(operation, times=3)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        assert await node.find("f") is not None
        tier.plan.fail(operation, times=2)
        assert await node.find("d/x") is not None
        tier.plan.fail(operation, times=2)
        assert await node.names() == ["d", "f"]
        node.close()

    run(main)


def test_what_does_not_pass_is_an_io_error_that_names_the_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = filled({"f": b"", "d/x": b""})
    failing = tier.plan.fail("", times=-1, error=TierError("503 SlowDown"))

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier, timeout_s=0.4)
        asked = (
            lambda: node.vfs.lookup(ROOT_INO, b"f"),
            lambda: node.vfs.lookup(ROOT_INO, b"not there"),
            lambda: node.vfs.create(ROOT_INO, b"new", 0o644, os.O_WRONLY, OP),
            lambda: node.vfs.unlink(ROOT_INO, b"f", OP),
            lambda: node.vfs.rename((ROOT_INO, b"f"), (ROOT_INO, b"g"), 0, OP),
            lambda: node.catalog.listed(ROOT_INO),
        )
        for call in asked:
            began_s = trio.current_time()
            with pytest.raises(FsError) as error:
                await call()
            assert code_of(error) == errno.EIO
            assert trio.current_time() - began_s < 3
        assert "memory:f" in caplog.text
        assert "503 SlowDown" in caplog.text
        failing.times = 0
        assert await node.names() == ["d", "f"]
        assert await node.find("not there") is None
        node.close()

    run(main)


def test_an_object_whose_metadata_are_denied_spoils_no_listing(tmp_path: Path) -> None:
    tier = filled({"denied": b"12345", "open": b""})
    refused = tier.plan.fail("head", times=-1, key="denied", error=TierRefused("403 AccessDenied"))

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        found = await node.entries()
        assert sorted(found) == ["denied", "open"]
        assert found["denied"].size == 5
        # but nothing is done to it on a guess
        with pytest.raises(FsError) as error:
            await node.find("denied")
        assert code_of(error) == errno.EIO
        with pytest.raises(FsError) as error:
            await node.vfs.setattr(found["denied"].ino, Change(mode=0o600), OP)
        assert code_of(error) == errno.EIO
        refused.times = 0
        assert await node.find("denied") is not None
        await node.chmod("denied", 0o600)
        node.close()

    run(main)


def test_an_object_that_is_gone_since_it_was_listed(tmp_path: Path) -> None:
    tier = filled({"f1": b"", "f2": b""})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        await node.catalog._finder.names([ROOT_INO])
        tier.delete("f1")
        assert await node.names() == ["f2"]
        assert await node.find("f1") is None
        assert node.objects.get("f1") is None
        node.close()

    run(main)


def test_an_index_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = filled({"f": b""})

    def full() -> None:
        raise FsError(errno.ENOSPC)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        monkeypatch.setattr(node.index, "require_space", full)
        with pytest.raises(FsError) as error:
            await node.names()
        assert code_of(error) == errno.ENOSPC
        monkeypatch.undo()
        assert await node.names() == ["f"]
        node.close()

    run(main)


# many at once


def test_many_who_want_the_same_ask_once(tmp_path: Path) -> None:
    tier = filled({f"d/{number}": b"" for number in range(50)}, page_size=10)
    tier.plan.delay(0.01)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        directory = await ino_of(node, "d")
        calls(tier)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(node.catalog.listed, directory)
                nursery.start_soon(node.vfs.lookup, directory, b"7")
        counted = calls(tier)
        assert counted["head"] <= 51
        assert counted["list"] <= 6
        node.close()

    run(main)


def test_who_stops_waiting_stops_nobody_else(tmp_path: Path) -> None:
    tier = filled({"f": b""})
    slow = tier.plan.delay(0.3)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        found = []

        async def look() -> None:
            found.append(await node.find("f"))

        async with trio.open_nursery() as nursery:
            impatient = trio.CancelScope()

            async def look_briefly() -> None:
                with impatient:
                    await node.find("f")

            nursery.start_soon(look_briefly)
            await wait_all_tasks_blocked(0.01)
            nursery.start_soon(look)
            await wait_all_tasks_blocked(0.01)
            impatient.cancel()
            slow.times = 0
        assert found[0] is not None
        node.close()

    run(main)


def test_one_of_two_who_make_the_same_name_wins(tmp_path: Path) -> None:
    tier = filled({"f": b""})
    tier.plan.delay(0.01)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        outcomes: list[int] = []

        async def make() -> None:
            try:
                await node.vfs.mkdir(ROOT_INO, b"new", 0o755, OP)
                outcomes.append(0)
            except FsError as error:
                outcomes.append(error.errno or -1)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(make)
        assert sorted(outcomes) == [0] + [errno.EEXIST] * 4
        node.close()

    run(main)


def test_the_root_is_listed_ahead(tmp_path: Path) -> None:
    tier = filled({"f": b"", "d/x": b""})
    tier.plan.fail("list", times=2)

    async def main() -> None:
        node = DiscoveryNode(tmp_path, tier)
        await node.catalog.ahead()
        calls(tier)
        await node.write("new", b"1")
        assert await node.find("nothing") is None
        assert not calls(tier)
        node.close()

    run(main)


# a real object store


@pytest.fixture
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Tier:
    rgw = request.getfixturevalue("rgw")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rgw.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rgw.secret_key)
    return s3_tier(rgw)


def put_plainly(tier: S3Tier, objects: dict[str, bytes]) -> None:
    """As any other tool does it: no metadata, no objects for directories."""
    bucket, _, prefix = tier.describe().removeprefix("s3://").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=tier._client._options.endpoint_url,
        region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required"),
    )
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda key: client.put_object(
                    Bucket=bucket, Key=f"{prefix}/{key}", Body=objects[key]
                ),
                objects,
            )
        )


@pytest.mark.services
def test_a_bucket_that_others_filled(tmp_path: Path, s3: S3Tier) -> None:
    objects = {f"step_{step}/shard-{n:03}": b"x" * n for step in range(5) for n in range(60)}
    objects |= {"step_1/sub dir/ü +%/x&y": b"odd", "latest": b"step_4"}
    put_plainly(s3, objects)

    async def main() -> None:
        began_s = time.monotonic()
        node = DiscoveryNode(tmp_path / "one", s3)
        assert await node.names() == ["latest"] + [f"step_{step}" for step in range(5)]
        assert time.monotonic() - began_s < 3
        async with node.running():
            assert await node.read("latest") == b"step_4"
            assert await node.read("step_1/sub dir/ü +%/x&y") == b"odd"
            found = await node.entries("step_3")
            assert {name: attr.size for name, attr in found.items()} == {
                f"shard-{n:03}": n for n in range(60)
            }
            assert await node.find("step_3/shard-300") is None
            # a directory that has no object gets one when something about it is to be kept
            await node.chmod("step_2", 0o700)
            await node.rename("step_1/sub dir", "moved")
            with pytest.raises(FsError) as error:
                await node.rmdir("step_4")
            assert code_of(error) == errno.ENOTEMPTY
            await node.write("step_0/shard-000", b"mine")
            await node.unlink("step_0/shard-001")
            await node.drained()
            assert not node.store.caller.troubles
        node.close()

        again = DiscoveryNode(tmp_path / "two", s3)
        async with again.running():
            found = await again.everything()
            assert stat.S_IMODE(found["step_2"].mode) == 0o700
            assert await again.read("moved/ü +%/x&y") == b"odd"
            assert await again.read("step_0/shard-000") == b"mine"
            assert "step_1/sub dir" not in found
            assert "step_0/shard-001" not in found
            files = [path for path, attr in found.items() if stat.S_ISREG(attr.mode)]
            assert len(files) == len(objects) - 1
        again.close()

    run(main)


@pytest.mark.services
def test_a_tree_comes_back_from_a_bucket(tmp_path: Path, s3: S3Tier) -> None:
    test_a_tree_comes_back_as_it_was(tmp_path, s3)


@pytest.mark.services
@pytest.mark.slow
def test_thousands_of_objects_in_a_bucket(tmp_path: Path, s3: S3Tier) -> None:
    count = 4000
    put_plainly(s3, {f"all/{number:05}": b"x" * (number % 7) for number in range(count)})

    async def main() -> None:
        node = DiscoveryNode(tmp_path, s3)
        began_s = time.monotonic()
        assert await node.names() == ["all"]
        assert await node.find("all/03210") is not None
        directory = await ino_of(node, "all")
        rows = await node.catalog.entries(directory, 0, 1024)
        assert 100 < len(rows) < count
        assert all(row.attr.size == int(row.name) % 7 for row in rows)
        assert time.monotonic() - began_s < 5, "the first entries do not wait for the last"
        await node.catalog._finder.names([directory])
        rows = node.catalog.scan(directory, 0, 2 * count)
        assert {row.name: row.attr.size for row in rows} == {
            b"%05d" % number: number % 7 for number in range(count)
        }
        node.close()

    run(main)
