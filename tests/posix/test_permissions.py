"""Modes, owners and other users; the kernel does the checking."""

import os
import stat

import pytest

from tests.posix.lib import (
    NOBODY,
    OTHER,
    Opened,
    assert_same,
    fails_with,
    in_child,
    outcome,
    write_file,
)


def mode_of(path):
    return oct(stat.S_IMODE(os.lstat(path).st_mode))


@pytest.mark.parametrize(
    "mode", [0o000, 0o400, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4755, 0o7777]
)
def test_chmod_keeps_every_bit(ckpt, mode):
    path = write_file(ckpt / "f")
    (ckpt / "d").mkdir()
    for entry in (path, ckpt / "d"):
        os.chmod(entry, mode)
        assert stat.S_IMODE(entry.stat().st_mode) == mode
    with Opened(path) as fd:
        os.fchmod(fd, mode ^ 0o777)
        assert stat.S_IMODE(path.stat().st_mode) == mode ^ 0o777


def test_other_users_are_checked_by_mode(ckpt, tmpfs_dir):
    def scenario(root):
        for mode in (0o600, 0o640, 0o604, 0o606, 0o666):
            write_file(root / f"f{mode:o}", b"x", mode)
        (root / "closed").mkdir(mode=0o700)
        write_file(root / "closed" / "f", b"x", 0o666)
        (root / "open").mkdir()
        os.chmod(root / "open", 0o777)
        (root / "search").mkdir()
        write_file(root / "search" / "f", b"x", 0o644)
        os.chmod(root / "search", 0o711)

        def attempt():
            seen = {}
            for mode in (0o600, 0o640, 0o604, 0o606, 0o666):
                path = root / f"f{mode:o}"
                seen[f"read {mode:o}"] = outcome(path.read_bytes)
                seen[f"write {mode:o}"] = outcome(lambda p=path: os.close(os.open(p, os.O_WRONLY)))
                seen[f"chmod {mode:o}"] = outcome(os.chmod, path, 0o777)
                seen[f"chown {mode:o}"] = outcome(os.chown, path, os.getuid(), -1)
                seen[f"utime {mode:o}"] = outcome(os.utime, path)
                seen[f"utimens {mode:o}"] = outcome(os.utime, path, ns=(1, 1))
                seen[f"truncate {mode:o}"] = outcome(os.truncate, path, 1)
                seen[f"access {mode:o}"] = os.access(path, os.R_OK), os.access(path, os.W_OK)
            seen["enter"] = outcome(os.stat, root / "closed" / "f")
            seen["list"] = outcome(os.listdir, root / "closed")
            seen["create"] = outcome(lambda: write_file(root / "new") and None)
            seen["mkdir"] = outcome(os.mkdir, root / "newd")
            seen["unlink"] = outcome(os.unlink, root / "f666")
            seen["rename"] = outcome(os.rename, root / "f666", root / "x")
            seen["create open"] = outcome(lambda: write_file(root / "open" / "new") and None)
            seen["owner"] = (root / "open" / "new").stat().st_uid
            seen["list search"] = outcome(os.listdir, root / "search")
            seen["read search"] = outcome((root / "search" / "f").read_bytes)
            return seen

        return in_child(attempt, uid=NOBODY), in_child(attempt, uid=OTHER, groups=(0,))

    assert_same(scenario, ckpt, tmpfs_dir)


def test_supplementary_groups_count(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x", 0o640)
        os.chown(path, 0, 777)
        os.chmod(root, 0o755)
        return (
            in_child(lambda: outcome(path.read_bytes), uid=OTHER),
            in_child(lambda: outcome(path.read_bytes), uid=OTHER, groups=(777,)),
            in_child(lambda: outcome(path.read_bytes), uid=OTHER, gid=777),
        )

    assert assert_same(scenario, ckpt, tmpfs_dir) == ("EACCES", b"x", b"x")


def test_root_can_do_everything(ckpt):
    os.chmod(ckpt, 0o777)
    in_child(lambda: write_file(ckpt / "f", b"x", 0o000) and None, uid=NOBODY)
    assert (ckpt / "f").read_bytes() == b"x"
    assert (ckpt / "f").stat().st_uid == NOBODY
    os.chown(ckpt / "f", 1, 2)
    assert ((ckpt / "f").stat().st_uid, (ckpt / "f").stat().st_gid) == (1, 2)


def test_chown_by_the_owner(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        os.chown(path, OTHER, OTHER)

        def attempt():
            return (
                outcome(os.chown, path, 0, -1),
                outcome(os.chown, path, -1, 0),
                outcome(os.chown, path, -1, 777),
                outcome(os.chown, path, OTHER, OTHER),
                outcome(os.chmod, path, 0o600),
            )

        return in_child(attempt, uid=OTHER, groups=(777,)), path.stat().st_gid

    assert_same(scenario, ckpt, tmpfs_dir)


def test_setgid_directory_hands_down_its_group(ckpt, tmpfs_dir):
    def scenario(root):
        shared = root / "shared"
        shared.mkdir()
        os.chown(shared, 0, 777)
        os.chmod(shared, 0o2777)

        def create():
            os.umask(0)
            os.mkdir(shared / "d", 0o755)
            os.close(os.open(shared / "f", os.O_CREAT | os.O_WRONLY, 0o644))
            os.close(os.open(shared / "sg", os.O_CREAT | os.O_WRONLY, 0o2775))
            os.symlink("x", shared / "l")
            os.mkfifo(shared / "p", 0o600)
            os.mkdir(shared / "d" / "deep")

        in_child(create, uid=OTHER)
        names = ("d", "f", "sg", "l", "p", "d/deep")
        return [(n, os.lstat(shared / n).st_gid, mode_of(shared / n)) for n in names]

    assert_same(scenario, ckpt, tmpfs_dir)


def test_sticky_directory_protects_others_files(ckpt, tmpfs_dir):
    def scenario(root):
        shared = root / "tmp"
        shared.mkdir()
        os.chmod(shared, 0o1777)
        in_child(lambda: write_file(shared / "theirs", b"x", 0o666) and None, uid=NOBODY)

        def attempt():
            write_file(shared / "mine")
            return (
                outcome(os.unlink, shared / "theirs"),
                outcome(os.rename, shared / "theirs", shared / "x"),
                outcome(os.rename, shared / "mine", shared / "theirs"),
                outcome(os.rename, shared / "mine", shared / "mine2"),
                outcome(os.unlink, shared / "mine2"),
            )

        return in_child(attempt, uid=OTHER), in_child(
            lambda: os.unlink(shared / "theirs"), uid=NOBODY
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_chown_clears_suid_and_sgid(ckpt, tmpfs_dir):
    def scenario(root):
        seen = []
        for mode in (0o4755, 0o2755, 0o6777):
            path = write_file(root / f"f{mode:o}", b"x", mode)
            os.chown(path, OTHER, -1)
            seen.append(mode_of(path))
            os.chmod(path, mode)
            in_child(lambda p=path: os.chown(p, -1, 777), uid=OTHER, groups=(777,))
            seen.append(mode_of(path))
        path = write_file(root / "by-root", b"x", 0o2745)
        os.chown(path, OTHER, -1)
        seen.append(mode_of(path))
        directory = root / "d"
        directory.mkdir()
        os.chmod(directory, 0o6755)
        os.chown(directory, OTHER, OTHER)
        return [*seen, mode_of(directory)]

    assert_same(scenario, ckpt, tmpfs_dir)


def test_truncate_by_another_user_clears_suid_and_sgid(ckpt, tmpfs_dir):
    def scenario(root):
        seen = []
        for mode in (0o6777, 0o4767):
            path = write_file(root / f"f{mode:o}", b"x" * 10, mode)
            in_child(lambda p=path: os.truncate(p, 5), uid=NOBODY)
            seen.append(mode_of(path))
            os.chmod(path, mode)
            in_child(lambda p=path: os.close(os.open(p, os.O_WRONLY | os.O_TRUNC)), uid=NOBODY)
            seen.append(mode_of(path))
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_write_by_another_user_clears_suid_and_sgid_at_close(ckpt, tmpfs_dir):
    """An exception in time only: tmpfs clears at the first write, we do so at the latest at close."""

    def scenario(root):
        seen = []
        for mode in (0o6777, 0o4777, 0o2777, 0o4767):
            path = write_file(root / f"f{mode:o}", b"x" * 10, mode)

            def write(path=path):
                with Opened(path, os.O_WRONLY) as fd:
                    os.write(fd, b"y")

            in_child(write, uid=NOBODY)
            seen.append(mode_of(path))
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_chown_that_changes_nothing_clears_suid(ckpt, tmpfs_dir):
    """chown(path, -1, -1), as tmpfs does."""

    def scenario(root):
        seen = []
        for mode in (0o4755, 0o2755, 0o6777):
            path = write_file(root / f"f{mode:o}", b"x", mode)
            os.chown(path, -1, -1)
            seen.append(mode_of(path))
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_sgid_without_group_execute_is_kept(ckpt):
    """An exception: tmpfs drops this bit (once the mark of mandatory locking) when the caller is
    outside the file's group; the kernel does not tell a FUSE filesystem of the caller's groups.
    """

    def write(path):
        with Opened(path, os.O_WRONLY) as fd:
            os.write(fd, b"y")

    actions = {
        "chown": lambda p: os.chown(p, -1, 777),
        "truncate": lambda p: os.truncate(p, 5),
        "write": write,
    }
    for name, action in actions.items():
        path = write_file(ckpt / name, b"x" * 10)
        os.chown(path, OTHER, 0)
        os.chmod(path, 0o2767)
        in_child(lambda p=path, a=action: a(p), uid=OTHER, groups=(777,))
        assert mode_of(path) == "0o2767", name


def test_write_by_root_keeps_suid(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x", 0o6755)
        with Opened(path, os.O_WRONLY) as fd:
            os.write(fd, b"y")
        return mode_of(path)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_chmod_by_owner_outside_the_group_drops_sgid(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        os.chown(path, OTHER, 777)
        in_child(lambda: os.chmod(path, 0o2755), uid=OTHER)
        return mode_of(path)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_suid_programs_do_not_raise_privileges(ckpt):
    """The mount is nosuid."""
    import shutil
    import subprocess

    shutil.copy("/usr/bin/id", ckpt / "id")
    os.chmod(ckpt / "id", 0o4755)

    def run():
        return subprocess.run(
            [str(ckpt / "id"), "-u"], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    assert in_child(run, uid=OTHER) == str(OTHER)


def test_permission_change_is_seen_at_once(ckpt):
    path = write_file(ckpt / "f", b"x", 0o644)
    for _ in range(20):
        assert in_child(lambda: outcome(path.read_bytes), uid=NOBODY) == b"x"
        os.chmod(path, 0o600)
        assert in_child(lambda: outcome(path.read_bytes), uid=NOBODY) == "EACCES"
        os.chmod(path, 0o644)


def test_open_descriptor_survives_chmod_and_chown(ckpt):
    os.chmod(ckpt, 0o777)

    def keep():
        fd = os.open(ckpt / "f", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(fd, b"mine")
        os.fchmod(fd, 0)
        os.pwrite(fd, b"M", 0)
        return os.pread(fd, 10, 0), fails_with(os.open, ckpt / "f", os.O_RDONLY)

    assert in_child(keep, uid=NOBODY) == (b"Mine", "EACCES")
