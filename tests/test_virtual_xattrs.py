"""user.ckptfs.*: what a program may ask of a file, and the one thing it may say."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fs.errors import FsError
from fs.journal import State
from fs.tiers.memory import MemoryTier
from fs.types import Op
from fs.virtualxattr import PERSIST, VirtualXattrs
from tests.command_node import CommandNode
from tests.durable_node import OP, DurableNode, run

STATE, GENERATION, DIGEST = (
    b"user.ckptfs." + name for name in (b"state", b"generation", b"digest")
)


async def ino_of(node: DurableNode, path: str) -> int:
    attr = await node.find(path)
    assert attr is not None
    return attr.ino


async def refused(node: DurableNode, path: str, name: bytes, value: bytes | None = b"x") -> int:
    """The errno of setting, or (None) removing, an attribute."""
    ino = await ino_of(node, path)
    with pytest.raises(FsError) as caught:
        if value is None:
            await node.vfs.removexattr(ino, name, OP)
        else:
            await node.vfs.setxattr(ino, name, value, OP)
    assert caught.value.errno is not None
    return caught.value.errno


async def missing(node: DurableNode, path: str, name: bytes) -> bool:
    ino = await ino_of(node, path)
    try:
        node.vfs.getxattr(ino, name, OP)
    except FsError as error:
        return error.errno == errno.ENODATA
    return False


def test_state_generation_and_digest_follow_a_file(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        node.schedule.holds = lambda row: row.key == "held"
        async with node.serving():
            fh, attr = await node.vfs.create(1, b"f", 0o644, os.O_WRONLY, OP)
            assert node.vfs.getxattr(attr.ino, STATE, OP) == b"writing"
            assert await missing(node, "f", DIGEST)
            node.store_bytes(attr.ino, b"content")
            await node.vfs.flush(fh)
            await node.vfs.release(fh)
            await node.drained()
            assert node.vfs.getxattr(attr.ino, STATE, OP) == b"durable"
            assert node.vfs.getxattr(attr.ino, GENERATION, OP) == b"1"
            digest = tier.head("f").meta["ckptfs-xxh3-128"].encode()
            assert node.vfs.getxattr(attr.ino, DIGEST, OP) == digest
            await node.residence.evictor.evict(attr.ino)
            assert node.vfs.getxattr(attr.ino, STATE, OP) == b"remote"
            assert node.vfs.getxattr(attr.ino, DIGEST, OP) == digest
            await node.write("f", b"other")
            assert int(node.vfs.getxattr(attr.ino, GENERATION, OP)) > 1
            assert node.vfs.getxattr(attr.ino, STATE, OP) in (b"local", b"uploading")
            assert await missing(node, "f", DIGEST)
            held = await node.write("held", b"h")
            assert node.vfs.getxattr(held, STATE, OP) == b"held"
            with node.index.transaction():
                node.journal.skip(node.journal.at("held"), State.SKIPPED)
            assert node.vfs.getxattr(held, STATE, OP) == b"skipped"

    run(main)


def test_read_only_ones_are_not_listed_and_not_set(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        async with node.serving():
            await node.mkdir("d")
            ino = await node.write("f", b"f")
            await node.vfs.setxattr(ino, b"user.mine", b"kept", OP)
            assert node.vfs.listxattr(ino, OP) == [b"user.mine"]
            for name in (STATE, GENERATION, DIGEST, b"user.ckptfs.other"):
                assert await refused(node, "f", name) == errno.EPERM
                assert await refused(node, "f", name, None) == errno.EPERM
                assert await missing(node, "d", name)
            assert await missing(node, "f", b"user.ckptfs.other")

    run(main)


def test_persist_overrides_policy_until_it_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        overrides = node.vfs.virtual_xattrs
        told: list[None] = []
        overrides.attach(node.durable, node.paths.keys, lambda: told.append(None))
        async with node.serving():
            await node.mkdir("a")
            await node.mkdir("a/b")
            f = await node.write("a/b/f", b"f")
            g = await node.write("a/g", b"g")
            top = await node.write("top", b"t")
            assert [overrides.override_for(ino) for ino in (f, g, top)] == [None] * 3
            a, b = await ino_of(node, "a"), await ino_of(node, "a/b")
            await node.vfs.setxattr(a, PERSIST, b"never", OP)
            await node.vfs.setxattr(b, PERSIST, b"always\n", OP)
            assert [overrides.override_for(ino) for ino in (f, g, top)] == ["always", "never", None]
            await node.vfs.setxattr(f, PERSIST, b"never", OP)
            assert overrides.override_for(f) == "never"
            assert node.vfs.listxattr(f, OP) == [PERSIST]
            assert node.vfs.getxattr(f, PERSIST, OP) == b"never"
            await node.rename("a/g", "g")
            assert overrides.override_for(g) is None
            await node.link("g", "a/b/g2")
            assert overrides.override_for(g) == "always"
            # after a crash it is known from the index alone
            again = VirtualXattrs(node.index, node.store.content)
            assert [again.override_for(ino) for ino in (f, g, top)] == ["never", "always", None]
            assert len(told) == 3
            await node.vfs.removexattr(f, PERSIST, OP)
            assert overrides.override_for(f) == "always"
            await node.vfs.removexattr(b, PERSIST, OP)
            assert overrides.override_for(f) == "never"
            assert len(told) == 5
            assert await refused(node, "a/b", PERSIST, None) == errno.ENODATA
            root = 1
            await node.vfs.setxattr(root, PERSIST, b"always", OP)
            assert overrides.override_for(top) == "always"

    run(main)


def test_persist_now_is_an_order(tmp_path: Path) -> None:
    tier = MemoryTier()

    async def main() -> None:
        node = CommandNode(tmp_path, tier)
        node.schedule.holds = lambda row: True
        async with node.serving():
            await node.mkdir("d")
            await node.write("d/f", b"f")
            top = await node.write("top", b"t")
            await node.vfs.setxattr(await ino_of(node, "d"), PERSIST, b"now", OP)
            await node.ask("wait", "d", timeout_s=10.0)
            assert tier.head("d/f").size == 1
            assert node.vfs.getxattr(top, STATE, OP) == b"held"
            assert await missing(node, "d", PERSIST)
            await node.vfs.setxattr(1, PERSIST, b"now", Op(0, 0))
            await node.ask("wait", "top", timeout_s=10.0)
            assert tier.head("top").size == 1

    run(main)


@pytest.mark.parametrize("value", [b"", b"Always", b"now please", b"1", b"\xff"])
def test_any_other_value_is_einval(tmp_path: Path, value: bytes) -> None:
    async def main() -> None:
        node = CommandNode(tmp_path, MemoryTier())
        async with node.serving():
            await node.write("f", b"f")
            assert await refused(node, "f", PERSIST, value) == errno.EINVAL
            assert await missing(node, "f", PERSIST)

    run(main)


def test_without_a_durable_tier(tmp_path: Path) -> None:
    async def main() -> None:
        node = DurableNode(tmp_path, MemoryTier())  # nothing attached
        ino = await node.write("f", b"f")
        assert node.vfs.getxattr(ino, STATE, OP) == b"local"
        assert node.vfs.getxattr(ino, GENERATION, OP) == b"1"
        assert await missing(node, "f", DIGEST)
        for value in (b"always", b"never", b"now"):
            assert await refused(node, "f", PERSIST, value) == errno.EOPNOTSUPP
        assert await refused(node, "f", PERSIST, b"nonsense") == errno.EINVAL
        fh = await node.vfs.open(ino, os.O_WRONLY, OP)
        assert node.vfs.getxattr(ino, STATE, OP) == b"writing"
        await node.vfs.release(fh)
        node.close()

    run(main)
