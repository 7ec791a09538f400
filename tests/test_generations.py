"""When a generation of a file's bytes ends: what writeback and replication will act on."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fs.arena import Arena
from fs.catalog import EmbeddedCatalog
from fs.content import Content
from fs.index import Index
from fs.types import FH_INO_MASK, ROOT_INO, Attr, Change, Op
from fs.vfs import Vfs

OP = Op(0, 0)


class Node:
    """A vfs, and the generations that were told to have ended."""

    def __init__(self, directory: Path) -> None:
        for name in ("arena", "index"):
            (directory / name).mkdir(exist_ok=True)
        self.arena = Arena(directory / "arena")
        self.index = Index(directory / "index" / "index.sqlite")
        self.vfs = Vfs(self.index, EmbeddedCatalog(self.index), Content(self.arena))
        self.ended: list[tuple[int, int]] = []
        self.vfs.content.generation_ended.append(self._note)

    def _note(self, attr: Attr) -> None:
        self.ended.append((attr.ino, attr.generation))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The embedded catalog never suspends."""
        try:
            call.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("suspended")

    def create(self, name: bytes = b"f", flags: int = os.O_WRONLY) -> int:
        return int(self.run(self.vfs.create(ROOT_INO, name, 0o644, flags, OP))[0])

    def write(self, fh: int, data: bytes) -> None:
        """As the kernel does it, past the vfs."""
        fd = self.arena.open(fh & FH_INO_MASK)
        os.pwrite(fd, data, 0)
        os.close(fd)

    def close(self, fh: int) -> None:
        self.run(self.vfs.flush(fh))
        self.run(self.vfs.release(fh))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.index.close()
    node.arena.close()


def test_close_of_a_writer_ends_one(node: Node) -> None:
    fh = node.create()
    node.write(fh, b"first")
    node.close(fh)
    ino = fh & FH_INO_MASK
    assert node.ended == [(ino, 1)]
    assert node.vfs.getattr(ino).size == 5
    assert node.vfs.getattr(ino).generation == 1


def test_unchanged_bytes_end_none(node: Node) -> None:
    fh = node.create()
    node.write(fh, b"first")
    node.close(fh)
    ino = fh & FH_INO_MASK
    node.ended.clear()
    node.close(node.run(node.vfs.open(ino, os.O_RDONLY, OP)))
    node.close(node.run(node.vfs.open(ino, os.O_WRONLY, OP)))
    node.run(node.vfs.setattr(ino, Change(mode=0o600), OP))
    assert node.ended == []


def test_fsync_ends_one_while_open(node: Node) -> None:
    fh = node.create()
    for number in range(3):
        node.write(fh, b"x" * (number + 1))
        node.run(node.vfs.fsync(fh))
    node.run(node.vfs.fsync(fh))
    assert node.ended == [(fh & FH_INO_MASK, number) for number in (1, 2, 3)]


def test_duplicated_descriptors_end_one_each_time_they_close(node: Node) -> None:
    fh = node.create()
    node.write(fh, b"one")
    node.run(node.vfs.flush(fh))  # close of a dup
    node.write(fh, b"three")
    node.close(fh)
    assert [generation for _, generation in node.ended] == [1, 2]


def test_stores_through_a_mapping_end_one_at_the_last_release(node: Node) -> None:
    """They move no mtime: whoever could have mapped it may have changed it."""
    fh = node.create(flags=os.O_RDWR)
    node.write(fh, b"before")
    node.run(node.vfs.flush(fh))  # close; the mapping lives on
    node.run(node.vfs.release(fh))  # munmap
    assert [generation for _, generation in node.ended] == [1, 2]


def test_truncation_by_path_ends_one(node: Node) -> None:
    fh = node.create()
    node.write(fh, b"content")
    node.close(fh)
    ino = fh & FH_INO_MASK
    node.run(node.vfs.setattr(ino, Change(size=3), OP))
    assert node.ended[-1] == (ino, 2)
    node.close(node.run(node.vfs.open(ino, os.O_WRONLY | os.O_TRUNC, OP)))
    assert node.vfs.getattr(ino).size == 0
    assert node.vfs.getattr(ino).generation > 2


def test_bytes_written_past_a_dead_mount_are_noticed(node: Node, tmp_path: Path) -> None:
    """Descriptors outlive a killed supervisor: the next mount looks at each backing file."""
    fh = node.create()
    node.write(fh, b"content")
    node.close(fh)
    node.write(fh, b"content, and more")
    node.index.close()
    again = Node(tmp_path)
    again.vfs.recover([], fresh_mount=True)
    attr = again.vfs.getattr(fh & FH_INO_MASK)
    assert (attr.size, attr.generation) == (17, 2)
    node.index = again.index


def test_lost_and_foreign_backing_files(node: Node, tmp_path: Path) -> None:
    fh = node.create()
    node.write(fh, b"content")
    node.close(fh)
    ino = fh & FH_INO_MASK
    os.unlink(tmp_path / "arena" / "data" / str(ino))
    (tmp_path / "arena" / "data" / "99999").write_bytes(b"nobody's")
    node.index.close()
    again = Node(tmp_path)
    node.index = again.index
    again.vfs.recover([], fresh_mount=True)
    assert again.arena.inodes() == [], "what has no inode is removed"
    assert again.vfs.getattr(ino).size == 7, "and nothing is made up for what is lost"
