"""Times."""

import os
import time

import pytest

from tests.posix.lib import UTIME_NOW, UTIME_OMIT, Opened, assert_same, utimensat, write_file


@pytest.mark.parametrize(
    "ns", [0, 1, 999_999_999, 1_700_000_000_123_456_789, 2**33 * 10**9 + 7, -1_500_000_000]
)
def test_utimens_keeps_nanoseconds(ckpt, ns):
    path = write_file(ckpt / "f")
    os.utime(path, ns=(ns, ns + 1))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (ns, ns + 1)
    (ckpt / "d").mkdir()
    os.utime(ckpt / "d", ns=(ns, ns))
    assert (ckpt / "d").stat().st_mtime_ns == ns


def test_utimens_on_an_open_descriptor(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"x")
        os.utime(fd, ns=(11, 22))
        assert (os.fstat(fd).st_atime_ns, os.fstat(fd).st_mtime_ns) == (11, 22)
    assert (ckpt / "f").stat().st_mtime_ns == 22


def test_explicit_mtime_stays_after_close_of_a_writer(ckpt):
    """What `cp -p` and rsync do: write, set the time on the descriptor, close."""
    for size_bytes in (0, 1, 3 << 20):
        with Opened(ckpt / f"f{size_bytes}", os.O_WRONLY | os.O_CREAT) as fd:
            os.write(fd, bytes(size_bytes))
            os.utime(fd, ns=(5, 10**18))
        os.close(os.open(ckpt / f"f{size_bytes}", os.O_RDWR))
        assert (ckpt / f"f{size_bytes}").stat().st_mtime_ns == 10**18


def test_utime_now_and_omit(ckpt):
    path = write_file(ckpt / "f")
    os.utime(path, ns=(100, 200))
    utimensat(path, ((0, UTIME_OMIT), (5, 6)))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (100, 5_000_000_006)
    before = time.time_ns()
    utimensat(path, ((7, 8), (0, UTIME_NOW)))
    # The kernel's file time is that of its last tick.
    assert before - 20_000_000 <= path.stat().st_mtime_ns <= time.time_ns()
    assert path.stat().st_atime_ns == 7_000_000_008
    utimensat(path, ((0, UTIME_OMIT), (0, UTIME_OMIT)))
    assert path.stat().st_atime_ns == 7_000_000_008


def test_write_moves_mtime_and_ctime(ckpt):
    path = write_file(ckpt / "f")
    os.utime(path, ns=(1, 1))
    ctime = path.stat().st_ctime_ns
    with Opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"x")
        assert path.stat().st_mtime_ns > 1
        assert os.fstat(fd).st_ctime_ns >= ctime
    assert abs(path.stat().st_mtime_ns - time.time_ns()) < 5 * 10**9


def test_mtime_order_is_the_order_of_events(ckpt):
    """Frameworks pick the latest checkpoint by mtime: files made later are never older."""
    for number in range(200):
        write_file(ckpt / f"tmp{number}", b"x" * (number % 3))
        os.rename(ckpt / f"tmp{number}", ckpt / f"f{number}")
        (ckpt / f"d{number}").mkdir()
    for kind in "fd":
        times = [(ckpt / f"{kind}{number}").stat().st_mtime_ns for number in range(200)]
        assert times == sorted(times)
    mixed = [(ckpt / f"{kind}{n}").stat().st_mtime_ns for n in range(200) for kind in "fd"]
    assert mixed == sorted(mixed)


def test_mtime_order_stays_when_descriptors_close_late(ckpt):
    first = os.open(ckpt / "first", os.O_WRONLY | os.O_CREAT)
    os.write(first, b"1")
    time.sleep(0.03)
    write_file(ckpt / "second", b"2")
    os.close(first)
    assert (ckpt / "first").stat().st_mtime_ns < (ckpt / "second").stat().st_mtime_ns


def test_rename_and_chmod_leave_mtime(ckpt):
    path = write_file(ckpt / "f")
    os.utime(path, ns=(1, 2))
    os.chmod(path, 0o600)
    os.rename(path, ckpt / "g")
    os.link(ckpt / "g", ckpt / "h")
    os.setxattr(ckpt / "g", "user.a", b"b")
    assert (ckpt / "g").stat().st_mtime_ns == 2


def changes(path, action):
    """Which of mtime and ctime of `path` an action moves."""
    before = path.lstat()
    time.sleep(0.012)
    action()
    after = path.lstat()
    return after.st_mtime_ns > before.st_mtime_ns, after.st_ctime_ns > before.st_ctime_ns


def test_ctime_moves_with_the_inode(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        return {
            "chmod": changes(path, lambda: os.chmod(path, 0o600)),
            "chown": changes(path, lambda: os.chown(path, 1, 1)),
            "link": changes(path, lambda: os.link(path, root / "l")),
            "unlink": changes(path, lambda: os.unlink(root / "l")),
            "utime": changes(path, lambda: os.utime(path, ns=(5, 5)))[1],
            "truncate": changes(path, lambda: os.truncate(path, 2)),
            "setxattr": changes(path, lambda: os.setxattr(path, "user.a", b"b")),
            "read": changes(path, path.read_bytes),
            "stat": changes(path, path.stat),
        }

    assert_same(scenario, ckpt, tmpfs_dir)


def test_ctime_moves_with_a_rename(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        before = path.stat().st_ctime_ns
        time.sleep(0.012)
        os.rename(path, root / "g")
        return (root / "g").stat().st_ctime_ns > before

    assert_same(scenario, ckpt, tmpfs_dir)


def test_parent_times_move_with_its_entries(ckpt, tmpfs_dir):
    def scenario(root):
        (root / "other").mkdir()
        parent = root / "p"
        parent.mkdir()
        return {
            "create": changes(parent, lambda: write_file(parent / "f")),
            "rewrite": changes(parent, lambda: write_file(parent / "f")),
            "chmod": changes(parent, lambda: os.chmod(parent / "f", 0o600)),
            "rename": changes(parent, lambda: os.rename(parent / "f", parent / "g")),
            "link": changes(parent, lambda: os.link(parent / "g", parent / "h")),
            "unlink": changes(parent, lambda: os.unlink(parent / "h")),
            "symlink": changes(parent, lambda: os.symlink("x", parent / "s")),
            "mkdir": changes(parent, lambda: os.mkdir(parent / "d")),
            "rmdir": changes(parent, lambda: os.rmdir(parent / "d")),
            "mkfifo": changes(parent, lambda: os.mkfifo(parent / "fifo")),
            "out": changes(parent, lambda: os.rename(parent / "g", root / "other" / "g")),
            "in": changes(parent, lambda: os.rename(root / "other" / "g", parent / "g")),
            "list": changes(parent, lambda: os.listdir(parent)),
        }

    assert_same(scenario, ckpt, tmpfs_dir)


def test_new_files_have_the_time_of_now(ckpt):
    before = time.time_ns() - 20_000_000
    path = write_file(ckpt / "f")
    (ckpt / "d").mkdir()
    os.symlink("x", ckpt / "l")
    for entry in (path, ckpt / "d", ckpt / "l"):
        got = entry.lstat()
        for value in (got.st_atime_ns, got.st_mtime_ns, got.st_ctime_ns):
            assert before <= value <= time.time_ns()


def test_reading_does_not_move_atime(ckpt):
    """An exception: as with a noatime mount, reading changes nothing."""
    path = write_file(ckpt / "f")
    os.utime(path, ns=(1, 2))
    path.read_bytes()
    with Opened(path, os.O_RDONLY) as fd:
        os.read(fd, 1)
        assert os.fstat(fd).st_atime_ns == 1
    assert path.stat().st_atime_ns == 1
