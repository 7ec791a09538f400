"""Random operations on a tier that is found out as they go, against the plainest model there is.

Names are few and pages short, so that operations meet what was not looked at, was removed, or was made anew. Files are
evicted, workers end, also while writeback is at work, and at last an empty arena must show the same.
"""

from __future__ import annotations

import errno
import random
import stat
from pathlib import Path

import pytest
import trio

from fs.errors import FsError
from fs.tiers.memory import MemoryTier
from tests.discovery_node import DiscoveryNode, filled
from tests.durable_node import run

NAMES = ("a", "b", "c")
OPERATIONS = 70
KINDS = "look look list make make write write remove remove rename rename rename link evict again again".split()


class File:
    """Bytes with some names."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class Model:
    """Paths, and files; None for a directory."""

    def __init__(self) -> None:
        self.nodes: dict[str, File | None] = {"": None}

    def below(self, path: str) -> list[str]:
        return [other for other in self.nodes if other.startswith(path + "/")]

    def parent_of(self, path: str) -> str:
        return path.rpartition("/")[0]

    def is_directory(self, path: str) -> bool:
        return path in self.nodes and self.nodes[path] is None

    def add(self, path: str, node: File | None) -> int:
        if path in self.nodes:
            return errno.EEXIST
        self.nodes[path] = node
        return 0

    def remove(self, path: str) -> int:
        if path not in self.nodes:
            return errno.ENOENT
        if self.below(path):
            return errno.ENOTEMPTY
        del self.nodes[path]
        return 0

    def rename(self, old: str, new: str) -> int:
        if old not in self.nodes:
            return errno.ENOENT
        if old == new:
            return 0
        if new in self.nodes:
            if self.nodes[old] is not None and self.nodes[old] is self.nodes[new]:
                return 0
            if self.is_directory(new) and not self.is_directory(old):
                return errno.EISDIR
            if self.is_directory(old) and not self.is_directory(new):
                return errno.ENOTDIR
            if self.below(new):
                return errno.ENOTEMPTY
        for path in [old, *self.below(old)]:
            self.nodes[new + path[len(old) :]] = self.nodes.pop(path)
        return 0


def seeded(rng: random.Random, model: Model) -> MemoryTier:
    """A tier as others left it: files, and directories that are there by their contents or by objects."""
    objects: dict[str, bytes] = {}
    for _ in range(rng.randrange(4, 14)):
        parts = [rng.choice(NAMES) for _ in range(rng.randrange(1, 4))]
        above = ["/".join(parts[:length]) for length in range(1, len(parts))]
        path = "/".join(parts)
        if path in model.nodes or any(not model.is_directory(p) for p in above if p in model.nodes):
            continue
        for directory in above:
            model.nodes[directory] = None
        if rng.random() < 0.2:
            model.nodes[path] = None
            objects[path + "/"] = b""
        else:
            objects[path] = b"by others %d" % rng.randrange(100)
            model.nodes[path] = File(objects[path])
    return filled(objects, page_size=rng.choice((1, 2, 3, 1000)))


async def outcome(call: object) -> int:
    try:
        await call  # type: ignore[misc]
    except FsError as error:
        return error.errno or -1
    return 0


class Run:
    """One node and its model."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self.rng = rng
        self.directory = directory
        self.model = Model()
        self.tier = seeded(rng, self.model)
        self.node = DiscoveryNode(directory, self.tier)

    def path(self) -> str:
        """A path whose parent is a directory."""
        while True:
            path = "/".join(self.rng.choice(NAMES) for _ in range(self.rng.randrange(1, 4)))
            if self.model.is_directory(self.model.parent_of(path)):
                return path

    async def step(self) -> None:
        """One operation, with the same outcome on both."""
        rng, model, node = self.rng, self.model, self.node
        path, other = self.path(), self.path()
        kind = rng.choice(
            "look look list make make write remove remove rename rename again".split()
        )
        if kind == "look":
            attr = await node.find(path)
            assert (attr is not None) == (path in model.nodes), path
            if attr is not None:
                assert stat.S_ISDIR(attr.mode) == model.is_directory(path), path
        elif kind == "list":
            above = model.parent_of(path)
            wanted = {
                p.rpartition("/")[2] for p in model.nodes if p and model.parent_of(p) == above
            }
            assert set(await node.names(above)) == wanted, above
        elif kind == "make":
            assert await outcome(node.mkdir(path)) == model.add(path, None), path
        elif kind == "write":
            if not model.is_directory(path):
                file = model.nodes.get(path) or File(b"")
                model.nodes[path] = file
                file.data = b"ours %d" % rng.randrange(1000)
                await node.write(path, file.data)
        elif kind == "remove":
            gone = node.rmdir(path) if model.is_directory(path) else node.unlink(path)
            assert await outcome(gone) == model.remove(path), path
        elif kind == "rename" and not (other + "/").startswith(path + "/"):
            if (path + "/").startswith(other + "/"):
                return
            assert await outcome(node.rename(path, other)) == model.rename(path, other), (
                path,
                other,
            )
        elif kind == "link" and isinstance(model.nodes.get(path), File):
            assert await outcome(node.link(path, other)) == model.add(other, model.nodes[path])
        elif kind == "evict":
            await self.evict()
        elif kind == "again":
            if rng.random() < 0.5:
                async with node.running():  # ended while it is at work
                    await trio.sleep(rng.uniform(0, 0.1))
            node.close()
            self.node = DiscoveryNode(self.directory, self.tier)
            assert not self.node.begun

    async def evict(self) -> None:
        """Give up what is in memory of files that are durable."""
        node = self.node
        for path, file in list(self.model.nodes.items()):
            attr = await node.find(path) if file is not None else None
            if attr is None or not attr.resident or not node.journal.is_clean(attr.ino):
                continue
            if node.objects.is_durable(attr.ino, attr.generation):
                with node.index.transaction():
                    node.index.set_resident(attr.ino, 0, 0)
                node.arena.remove(attr.ino)

    async def compare(self, node: DiscoveryNode) -> None:
        """Every path and every byte."""
        found = await node.everything()
        assert set(found) == set(self.model.nodes) - {""}
        for path, attr in found.items():
            assert stat.S_ISDIR(attr.mode) == self.model.is_directory(path), path
            if stat.S_ISREG(attr.mode):
                file = self.model.nodes[path]
                assert file is not None
                assert await node.read(path) == file.data, path

    async def settle(self) -> None:
        """Let writeback come to its end."""
        async with self.node.running():
            await self.node.drained()


@pytest.mark.parametrize("seed", [*range(16), 4951, 5269])
def test_a_tier_found_out_on_the_way_is_as_one_that_was_known(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        each = Run(rng, tmp_path / "one")
        for _ in range(OPERATIONS):
            await each.step()
            if rng.random() < 0.1:
                await each.settle()
        async with each.node.running():
            await each.node.drained()
            await each.compare(each.node)
        each.node.close()
        empty = DiscoveryNode(tmp_path / "two", each.tier)
        async with empty.running():
            await each.compare(empty)
        empty.close()

    run(main)
