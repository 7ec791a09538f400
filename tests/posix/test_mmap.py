"""Memory mappings."""

import faulthandler
import mmap
import os
import signal

from tests.posix.lib import Opened, assert_same, fails_with, in_child, spawn, write_file

MIB = 1 << 20


def test_shared_mapping_and_read_and_write_agree(ckpt):
    path = write_file(ckpt / "f", bytes(MIB))
    with Opened(path) as fd, mmap.mmap(fd, MIB) as mapping:
        mapping[100:105] = b"hello"
        assert os.pread(fd, 5, 100) == b"hello"
        assert path.read_bytes()[100:105] == b"hello"
        os.pwrite(fd, b"world", MIB - 5)
        assert mapping[MIB - 5 :] == b"world"


def test_shared_mapping_is_seen_by_another_process(ckpt):
    path = write_file(ckpt / "f", bytes(8192))

    def answer():
        with Opened(path) as fd, mmap.mmap(fd, 8192) as mapping:
            mapping[4096] = 7
            while mapping[0] != 1:
                pass
            mapping[1] = 2

    with Opened(path) as fd, mmap.mmap(fd, 8192) as mapping:
        child = spawn(answer)
        while mapping[4096] != 7:
            pass
        mapping[0] = 1
        child.result()
        assert mapping[1] == 2
    assert in_child(lambda: path.read_bytes()[:2]) == b"\1\2"


def test_mapped_stores_stay_after_msync_and_munmap(ckpt):
    path = write_file(ckpt / "f", bytes(3 * 4096))
    with Opened(path) as fd:
        mapping = mmap.mmap(fd, 3 * 4096)
    # The descriptor is closed, the mapping is not.
    mapping[0:3] = b"abc"
    mapping.flush()
    mapping[8192:8195] = b"xyz"
    mapping.close()
    data = path.read_bytes()
    assert data[:3] == b"abc" and data[8192:8195] == b"xyz"
    assert data.count(0) == 3 * 4096 - 6


def test_mapping_outlives_unlink_and_rename_over(ckpt):
    path = write_file(ckpt / "f", b"A" * 8192)
    with Opened(path) as fd:
        mapping = mmap.mmap(fd, 8192)
    os.unlink(path)
    assert mapping[8000] == ord("A")
    mapping[0] = 66
    assert mapping[:2] == b"BA"
    write_file(path, b"new")
    write_file(ckpt / "newer", b"newer")
    os.rename(ckpt / "newer", path)
    assert mapping[:2] == b"BA"
    mapping.close()
    assert path.read_bytes() == b"newer"


def test_private_mapping_does_not_touch_the_file(ckpt):
    path = write_file(ckpt / "f", b"x" * 8192)
    with (
        Opened(path, os.O_RDONLY) as fd,
        mmap.mmap(
            fd, 8192, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapping,
    ):
        mapping[:5] = b"local"
        assert path.read_bytes() == b"x" * 8192
        assert os.pread(fd, 5, 0) == b"xxxxx"


def test_read_only_mapping_follows_later_writes(ckpt):
    path = write_file(ckpt / "f", b"a" * 8192)
    with Opened(path, os.O_RDONLY) as fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
        with Opened(path, os.O_WRONLY) as writer:
            os.pwrite(writer, b"b" * 4096, 4096)
        assert mapping[4095:4097] == b"ab"


def test_mapping_permissions_as_on_tmpfs(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", bytes(4096))
        with Opened(path, os.O_WRONLY) as fd:
            write_only = fails_with(mmap.mmap, fd, 4096)
        with Opened(path, os.O_RDONLY) as fd:
            read_only = fails_with(mmap.mmap, fd, 4096)
        return write_only, read_only

    assert assert_same(scenario, ckpt, tmpfs_dir) == ("EACCES", "EACCES")


def test_mapping_of_a_growing_file(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 4 * MIB)
        with mmap.mmap(fd, 4 * MIB) as mapping:
            mapping[3 * MIB : 3 * MIB + 4] = b"tail"
        assert os.pread(fd, 4, 3 * MIB) == b"tail"
        assert os.pread(fd, 4096, 0) == bytes(4096)


def test_access_beyond_the_end_of_a_truncated_mapping_is_sigbus(ckpt):
    path = write_file(ckpt / "f", b"x" * 8192)

    def touch():
        pid = os.fork()
        if pid == 0:
            faulthandler.disable()
            with Opened(path) as fd:
                mapping = mmap.mmap(fd, 8192)
                os.ftruncate(fd, 4096)
                mapping[4095]
                mapping[5000]
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_child(touch) == -signal.SIGBUS


def test_mapping_of_a_large_file_written_in_pieces(ckpt):
    path = ckpt / "f"
    block = os.urandom(MIB)
    with Opened(path, os.O_RDWR | os.O_CREAT) as fd:
        for number in range(16):
            os.pwrite(fd, block, number * MIB)
        with mmap.mmap(fd, 16 * MIB, prot=mmap.PROT_READ) as mapping:
            for number in range(16):
                assert mapping[number * MIB : (number + 1) * MIB] == block


def test_program_runs_from_the_mount(ckpt):
    import shutil
    import subprocess

    shutil.copy("/bin/true", ckpt / "true")
    subprocess.run([str(ckpt / "true")], check=True, timeout=20)
