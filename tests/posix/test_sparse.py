"""Holes, truncation both ways, and fallocate."""

import os
import time

import pytest

from tests.posix.lib import (
    FALLOC_FL_COLLAPSE_RANGE,
    FALLOC_FL_INSERT_RANGE,
    FALLOC_FL_KEEP_SIZE,
    FALLOC_FL_PUNCH_HOLE,
    FALLOC_FL_UNSHARE_RANGE,
    FALLOC_FL_ZERO_RANGE,
    Opened,
    assert_same,
    fails_with,
    fallocate,
    outcome,
    write_file,
)

MIB = 1 << 20


def data_map(fd, size_bytes):
    """[(start, end)] of data, as SEEK_DATA and SEEK_HOLE tell it."""
    found, at = [], 0
    while at < size_bytes:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, at))
    return found


def test_holes_are_found_as_on_tmpfs(ckpt, tmpfs_dir):
    def scenario(root):
        with Opened(root / "f", os.O_RDWR | os.O_CREAT) as fd:
            os.pwrite(fd, b"x" * 5000, 8192)
            os.pwrite(fd, b"y", 65536)
            os.ftruncate(fd, 200_000)
            found = data_map(fd, 200_000)
            ends = [
                outcome(os.lseek, fd, 70_000, os.SEEK_DATA),
                outcome(os.lseek, fd, 199_999, os.SEEK_HOLE),
                outcome(os.lseek, fd, 200_000, os.SEEK_HOLE),
                outcome(os.lseek, fd, 200_000, os.SEEK_DATA),
                outcome(os.lseek, fd, 300_000, os.SEEK_DATA),
                outcome(os.lseek, fd, -1, os.SEEK_DATA),
                outcome(os.lseek, fd, 0, os.SEEK_END),
            ]
        with Opened(root / "f", os.O_RDONLY) as fd:
            return found, ends, data_map(fd, 200_000) == found

    assert_same(scenario, ckpt, tmpfs_dir)


def test_data_is_never_taken_for_a_hole(ckpt):
    """Holes may be told smaller than they are (memory comes in folios), data never."""
    written = [(0, 10), (3 * MIB + 5, 100_000), (20 * MIB, 4096), (40 * MIB - 1, 1)]
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 64 * MIB)
        for offset, length in written:
            os.pwrite(fd, b"x" * length, offset)
        found = data_map(fd, 64 * MIB)
    for offset, length in written:
        assert any(start <= offset and offset + length <= end for start, end in found)
    # A huge page is the coarsest that memory comes in.
    assert sum(end - start for start, end in found) <= 8 * 2 * MIB
    assert not any(start < 60 * MIB < end for start, end in found)


def test_holes_take_no_memory(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 1 << 40)
        assert os.fstat(fd).st_size == 1 << 40
        assert os.fstat(fd).st_blocks == 0
        os.pwrite(fd, b"x", 1 << 39)
        # Blocks are 512 bytes; a huge page is the most one byte may cost.
        assert 8 <= os.fstat(fd).st_blocks <= 4096
        assert os.pread(fd, 3, (1 << 39) - 1) == b"\0x\0"
        assert os.pread(fd, 4096, 1 << 38) == bytes(4096)


def test_blocks_count_what_is_written(ckpt):
    path = write_file(ckpt / "f", b"x" * (4 * MIB))
    assert path.stat().st_blocks == 4 * MIB // 512
    os.truncate(path, 0)
    assert path.stat().st_blocks == 0


def test_truncated_bytes_never_come_back(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"secret" * 2000)
        seen = []
        for size_bytes in (5, 10000, 4096, 4097, 0, 12000):
            os.truncate(path, size_bytes)
            seen.append((path.stat().st_size, path.read_bytes()))
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)
    assert (ckpt / "f").read_bytes() == bytes(12000)


def test_ftruncate_of_an_open_file_is_seen_by_others(ckpt):
    path = write_file(ckpt / "f", b"x" * 100)
    with Opened(path, os.O_RDWR) as fd, Opened(path, os.O_RDONLY) as reader:
        os.ftruncate(fd, 10)
        assert os.pread(reader, 100, 0) == b"x" * 10
        assert path.stat().st_size == 10
        os.ftruncate(fd, 20)
        assert os.pread(reader, 100, 0) == b"x" * 10 + bytes(10)


def test_truncate_moves_mtime_and_ctime(ckpt):
    path = write_file(ckpt / "f", b"x" * 100)
    os.utime(path, ns=(10**9, 10**9))
    before = path.stat().st_ctime_ns
    os.truncate(path, 50)
    assert path.stat().st_mtime_ns > 10**9
    assert path.stat().st_ctime_ns >= before


def test_truncate_errors(ckpt, tmpfs_dir):
    def scenario(root):
        (root / "d").mkdir()
        write_file(root / "f")
        return (
            fails_with(os.truncate, root / "d", 0),
            fails_with(os.truncate, root / "absent", 0),
            fails_with(os.truncate, root / "f", -1),
            fails_with(os.truncate, root / "f" / "x", 0),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


MODES = {
    "allocate": 0,
    "keep_size": FALLOC_FL_KEEP_SIZE,
    "punch_hole": FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
    "punch_hole_without_keep_size": FALLOC_FL_PUNCH_HOLE,
    "zero_range": FALLOC_FL_ZERO_RANGE,
    "zero_range_keep_size": FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
    "collapse_range": FALLOC_FL_COLLAPSE_RANGE,
    "insert_range": FALLOC_FL_INSERT_RANGE,
    "unshare_range": FALLOC_FL_UNSHARE_RANGE,
    "unknown": 1 << 20,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["inside", "over_the_end", "beyond", "empty", "negative"])
def test_fallocate_as_on_tmpfs(ckpt, tmpfs_dir, mode, where):
    """Every mode: what tmpfs does is done, what it refuses is refused with the same errno."""
    offset, length = {
        "inside": (4096, 8192),
        "over_the_end": (16384, 16384),
        "beyond": (65536, 4096),
        "empty": (0, 0),
        "negative": (-4096, 4096),
    }[where]

    def scenario(root):
        path = write_file(root / "f", b"x" * 20000)
        with Opened(path) as fd:
            result = outcome(fallocate, fd, MODES[mode], offset, length)
            got = os.fstat(fd)
            return result, got.st_size, got.st_blocks, path.read_bytes(), path.stat().st_size

    assert_same(scenario, ckpt, tmpfs_dir)


def test_fallocate_needs_a_writable_descriptor(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x")
        with Opened(path, os.O_RDONLY) as fd, Opened(root, os.O_RDONLY) as directory:
            return fails_with(fallocate, fd, 0, 0, 10), fails_with(fallocate, directory, 0, 0, 10)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_posix_fallocate_takes_the_space(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, 3 * MIB)
        assert os.fstat(fd).st_size == 3 * MIB
        assert os.fstat(fd).st_blocks * 512 >= 3 * MIB
        assert (ckpt / "f").stat().st_size == 3 * MIB
        assert os.pread(fd, 4096, MIB) == bytes(4096)


def test_punched_hole_gives_memory_back(ckpt):
    path = write_file(ckpt / "f", b"x" * (8 * MIB))
    before = path.stat()
    with Opened(path) as fd:
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 2 * MIB, 4 * MIB)
    after = path.stat()
    assert after.st_size == 8 * MIB
    assert before.st_blocks - after.st_blocks == 4 * MIB // 512
    assert path.read_bytes() == b"x" * 2 * MIB + bytes(4 * MIB) + b"x" * 2 * MIB


def test_fallocate_moves_ctime(ckpt):
    path = write_file(ckpt / "f", b"x" * 100)
    with Opened(path) as fd:
        before = os.fstat(fd).st_ctime_ns
        time.sleep(0.012)  # file times advance with the kernel's tick
        fallocate(fd, 0, 0, 100_000)
        assert os.fstat(fd).st_ctime_ns > before
        assert path.stat().st_size == 100_000


def test_sparse_copy_keeps_holes(ckpt):
    import subprocess

    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 64 * MIB)
        os.pwrite(fd, b"x" * 100_000, 32 * MIB)
    subprocess.run(
        ["cp", "--sparse=always", str(ckpt / "f"), str(ckpt / "g")], check=True, timeout=60
    )
    assert (ckpt / "g").stat().st_size == 64 * MIB
    assert (ckpt / "g").stat().st_blocks * 512 < 4 * MIB
    assert (ckpt / "g").read_bytes() == (ckpt / "f").read_bytes()
