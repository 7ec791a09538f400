"""fsync and its relatives succeed on everything that can be open."""

import os

from tests.posix.lib import Opened, assert_same, fails_with, in_child, outcome, write_file


def test_fsync_of_files_and_directories(ckpt):
    path = write_file(ckpt / "f", b"x" * 100_000)
    (ckpt / "d").mkdir()
    for target, flags in (
        (path, os.O_RDWR),
        (path, os.O_RDONLY),
        (path, os.O_WRONLY),
        (ckpt / "d", 0),
    ):
        with Opened(target, flags) as fd:
            os.fsync(fd)
            os.fdatasync(fd)
    os.sync()


def test_the_atomic_replace_idiom(ckpt):
    """Write a temporary file, fsync, rename, fsync the directory: the new bytes are there for everybody."""
    write_file(ckpt / "latest", b"old")
    with Opened(ckpt / "tmp", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"new" * 10_000)
        os.fsync(fd)
    os.rename(ckpt / "tmp", ckpt / "latest")
    with Opened(ckpt, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
    assert in_child((ckpt / "latest").read_bytes) == b"new" * 10_000
    assert os.listdir(ckpt) == ["latest"]


def test_fsync_between_writes(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        for number in range(50):
            os.write(fd, b"%02d" % number)
            os.fsync(fd)
        assert os.pread(fd, 200, 0) == b"".join(b"%02d" % number for number in range(50))


def test_o_sync_and_o_dsync(ckpt):
    for flag in (os.O_SYNC, os.O_DSYNC):
        with Opened(ckpt / "f", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag) as fd:
            assert os.write(fd, b"x" * 5000) == 5000
        assert (ckpt / "f").stat().st_size == 5000


def test_fsync_errors_and_advice(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x" * 10_000)
        with Opened(path) as fd:
            advice = [
                outcome(os.posix_fadvise, fd, 0, 0, kind)
                for kind in (
                    os.POSIX_FADV_SEQUENTIAL,
                    os.POSIX_FADV_WILLNEED,
                    os.POSIX_FADV_DONTNEED,
                )
            ]
        with Opened(path, os.O_PATH) as fd:
            return advice, fails_with(os.fsync, fd), path.read_bytes() == b"x" * 10_000

    assert_same(scenario, ckpt, tmpfs_dir)


def test_syncfs(ckpt):
    import ctypes

    with Opened(ckpt, os.O_RDONLY) as fd:
        assert ctypes.CDLL(None).syncfs(fd) == 0
