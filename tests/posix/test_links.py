"""Symbolic and hard links."""

import os
import stat

from tests.posix.lib import Opened, assert_same, fails_with, write_file


def test_symlink_keeps_any_target(ckpt):
    for number, target in enumerate(
        ("f", "../..", "/absolute/nowhere", "a" * 4095, "ü" * 2047, "a//b/")
    ):
        os.symlink(target, ckpt / f"l{number}")
        assert os.readlink(ckpt / f"l{number}") == target
        got = os.lstat(ckpt / f"l{number}")
        assert stat.S_ISLNK(got.st_mode) and stat.S_IMODE(got.st_mode) == 0o777
        assert got.st_size == len(os.fsencode(target))


def test_symlink_targets_of_any_bytes(ckpt):
    target = bytes(range(1, 256))
    os.symlink(target, os.fsencode(ckpt / "l"))
    assert os.readlink(os.fsencode(ckpt / "l")) == target


def test_symlink_errors(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "f")
        os.symlink("loop", root / "loop")
        return (
            fails_with(os.symlink, "x", root / "f"),
            fails_with(os.symlink, "", root / "empty"),
            fails_with(os.symlink, "x" * 4096, root / "long"),
            fails_with(os.readlink, root / "f"),
            fails_with(os.open, root / "loop", os.O_RDONLY),
            fails_with(os.stat, root / "loop" / "below"),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_symlinks_are_followed_where_they_should_be(ckpt):
    (ckpt / "d").mkdir()
    write_file(ckpt / "d" / "f", b"x")
    os.symlink("d", ckpt / "l")
    assert (ckpt / "l" / "f").read_bytes() == b"x"
    os.unlink(ckpt / "l")
    assert (ckpt / "d" / "f").exists()


def test_symlink_has_its_own_owner_and_times(ckpt):
    write_file(ckpt / "f")
    os.symlink("f", ckpt / "l")
    os.lchown(ckpt / "l", 12, 34)
    os.utime(ckpt / "l", ns=(1_000_000_001, 2_000_000_002), follow_symlinks=False)
    got = os.lstat(ckpt / "l")
    assert (got.st_uid, got.st_gid, got.st_mtime_ns) == (12, 34, 2_000_000_002)
    assert os.stat(ckpt / "l").st_uid == os.geteuid()
    assert os.stat(ckpt / "l").st_mtime_ns != 2_000_000_002


def test_hard_links_are_one_file(ckpt):
    first = write_file(ckpt / "a", b"one")
    (ckpt / "d").mkdir()
    second = ckpt / "d" / "b"
    os.link(first, second)
    assert first.stat().st_ino == second.stat().st_ino
    assert first.stat().st_nlink == second.stat().st_nlink == 2
    with Opened(second, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"two")
    assert first.read_bytes() == b"onetwo"
    assert first.stat().st_size == 6
    os.chmod(second, 0o600)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    os.unlink(first)
    assert second.stat().st_nlink == 1
    assert second.read_bytes() == b"onetwo"


def test_hard_link_of_a_symlink_is_a_symlink(ckpt):
    os.symlink("target", ckpt / "a")
    os.link(ckpt / "a", ckpt / "b", follow_symlinks=False)
    assert os.readlink(ckpt / "b") == "target"
    assert os.lstat(ckpt / "b").st_nlink == 2


def test_hard_link_errors(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "f")
        write_file(root / "g")
        (root / "d").mkdir()
        return (
            fails_with(os.link, root / "d", root / "e"),
            fails_with(os.link, root / "f", root / "g"),
            fails_with(os.link, root / "f", root / "f"),
            fails_with(os.link, root / "absent", root / "e"),
            fails_with(os.link, root / "f", root / "absent" / "e"),
            fails_with(os.link, root / "f", root / "g" / "e"),
            fails_with(os.link, root / "f", "/proc/e"),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_hard_link_while_open_and_unlinked_again(ckpt):
    path = write_file(ckpt / "a", b"x")
    with Opened(path, os.O_RDWR) as fd:
        os.link(path, ckpt / "b")
        os.unlink(path)
        assert os.fstat(fd).st_nlink == 1
        os.pwrite(fd, b"y", 0)
    assert (ckpt / "b").read_bytes() == b"y"


def test_many_hard_links(ckpt):
    path = write_file(ckpt / "a", b"x")
    for number in range(300):
        os.link(path, ckpt / f"l{number}")
    assert path.stat().st_nlink == 301
    for number in range(300):
        os.unlink(ckpt / f"l{number}")
    assert path.stat().st_nlink == 1
