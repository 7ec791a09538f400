"""Inode and device numbers."""

import os

from tests.posix.lib import Opened, write_file


def walk(root):
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            found[path] = os.lstat(path)
    return found


def build(root):
    for number in range(20):
        (root / f"d{number}").mkdir()
        write_file(root / f"d{number}" / "f", b"%d" % number)
        os.symlink("f", root / f"d{number}" / "l")
    os.link(root / "d0" / "f", root / "hard")


def test_one_device_over_the_whole_mount(ckpt, mnt_obj):
    build(ckpt)
    assert {got.st_dev for got in walk(ckpt).values()} == {mnt_obj.path.stat().st_dev}
    assert mnt_obj.path.stat().st_dev != mnt_obj.path.parent.stat().st_dev
    with Opened(ckpt / "hard") as fd:
        assert os.fstat(fd).st_dev == mnt_obj.path.stat().st_dev


def test_numbers_are_unique(ckpt):
    build(ckpt)
    numbers = [got.st_ino for path, got in walk(ckpt).items() if not path.endswith("hard")]
    assert len(set(numbers)) == len(numbers)


def test_fstat_and_stat_agree(ckpt):
    path = write_file(ckpt / "f", b"x" * 5000)
    with Opened(path) as fd:
        os.write(fd, b"y" * 6000)
        by_fd, by_path = os.fstat(fd), os.stat(path)
    for field in (
        "st_ino",
        "st_dev",
        "st_mode",
        "st_nlink",
        "st_size",
        "st_blocks",
        "st_mtime_ns",
        "st_ctime_ns",
    ):
        assert getattr(by_fd, field) == getattr(by_path, field), field


def test_numbers_are_stable_across_a_restart_of_the_worker(ckpt, mnt_obj):
    build(ckpt)
    before = {path: (got.st_ino, got.st_nlink, got.st_mtime_ns) for path, got in walk(ckpt).items()}
    with Opened(ckpt / "d1" / "f") as fd:
        mnt_obj.wait_new_worker(mnt_obj.kill_worker())
        after = {
            path: (got.st_ino, got.st_nlink, got.st_mtime_ns) for path, got in walk(ckpt).items()
        }
        assert after == before
        assert os.fstat(fd).st_ino == (ckpt / "d1" / "f").stat().st_ino
        assert os.pread(fd, 10, 0) == b"1"
    made = write_file(ckpt / "new").stat().st_ino
    assert made not in {ino for ino, _, _ in before.values()}


def test_a_number_is_not_reused_while_the_old_file_is_open(ckpt):
    for _ in range(20):
        path = write_file(ckpt / "f")
        with Opened(path) as fd:
            os.unlink(path)
            write_file(path)
            assert path.stat().st_ino != os.fstat(fd).st_ino


def test_xattrs_links_and_fifos_survive_a_restart_of_the_worker(ckpt, mnt_obj):
    path = write_file(ckpt / "f", b"x", 0o640)
    os.setxattr(path, "user.k", b"v")
    os.chown(path, 12, 34)
    os.mkfifo(ckpt / "fifo")
    mnt_obj.wait_new_worker(mnt_obj.kill_worker())
    got = path.stat()
    assert (got.st_uid, got.st_gid, oct(got.st_mode)) == (12, 34, "0o100640")
    assert os.getxattr(path, "user.k") == b"v"
    assert sorted(os.listdir(ckpt)) == ["f", "fifo"]
