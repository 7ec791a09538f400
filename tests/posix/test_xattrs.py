"""Extended attributes."""

import os
import time

import pytest

from tests.posix.lib import NOBODY, Opened, assert_same, fails_with, in_child, outcome, write_file


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
@pytest.mark.parametrize("name", ["user.ckptfs", "trusted.ckptfs", "security.ckptfs"])
def test_set_get_list_remove(ckpt, tmpfs_dir, kind, name):
    def scenario(root):
        path = root / "x"
        if kind == "file":
            write_file(path)
        elif kind == "directory":
            path.mkdir()
        else:
            os.symlink("nowhere", path)
        follow = {"follow_symlinks": False}
        seen = [
            outcome(os.setxattr, path, name, b"value\0\xff", **follow),
            outcome(os.getxattr, path, name, **follow),
            outcome(os.listxattr, path, **follow),
            outcome(os.setxattr, path, name, b"", **follow),
            outcome(os.getxattr, path, name, **follow),
            outcome(os.removexattr, path, name, **follow),
            outcome(os.getxattr, path, name, **follow),
            outcome(os.removexattr, path, name, **follow),
            outcome(os.listxattr, path, **follow),
        ]
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_create_and_replace_flags(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        seen = [
            outcome(os.setxattr, path, "user.a", b"1", os.XATTR_REPLACE),
            outcome(os.setxattr, path, "user.a", b"1", os.XATTR_CREATE),
            outcome(os.setxattr, path, "user.a", b"2", os.XATTR_CREATE),
            outcome(os.setxattr, path, "user.a", b"3", os.XATTR_REPLACE),
            os.getxattr(path, "user.a"),
        ]
        return seen

    assert assert_same(scenario, ckpt, tmpfs_dir) == ["ENODATA", None, "EEXIST", None, b"3"]


def test_sizes_up_to_the_kernels_limit(ckpt):
    path = write_file(ckpt / "f")
    for size_bytes in (0, 1, 255, 4096, 65536):
        value = os.urandom(size_bytes)
        os.setxattr(path, "user.big", value)
        assert os.getxattr(path, "user.big") == value
    assert fails_with(os.setxattr, path, "user.big", bytes(65537)) == "E2BIG"
    assert len(os.getxattr(path, "user.big")) == 65536


def test_names_up_to_the_kernels_limit(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        longest = "user." + "n" * 250
        os.setxattr(path, longest, b"v")
        return (
            os.listxattr(path) == [longest],
            fails_with(os.setxattr, path, longest + "n", b"v"),
            fails_with(os.setxattr, path, "user.", b"v"),
            fails_with(os.setxattr, path, "nonsense", b"v"),
            fails_with(os.getxattr, path, "nonsense"),
            fails_with(os.setxattr, path, "unknown.prefix", b"v"),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_short_buffer_is_erange_and_size_can_be_asked(ckpt):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    path = write_file(ckpt / "f")
    os.setxattr(path, "user.a", b"0123456789")
    raw = os.fsencode(path)
    buffer = ctypes.create_string_buffer(100)
    assert libc.getxattr(raw, b"user.a", None, 0) == 10
    assert libc.getxattr(raw, b"user.a", buffer, 10) == 10
    assert libc.getxattr(raw, b"user.a", buffer, 9) == -1
    assert os.strerror(ctypes.get_errno()) == os.strerror(34)
    assert libc.listxattr(raw, None, 0) == len(b"user.a\0")
    assert libc.listxattr(raw, buffer, 3) == -1
    assert os.strerror(ctypes.get_errno()) == os.strerror(34)


def test_many_attributes(ckpt):
    path = write_file(ckpt / "f")
    for number in range(200):
        os.setxattr(path, f"user.n{number}", b"%d" % number)
    assert sorted(os.listxattr(path)) == sorted(f"user.n{number}" for number in range(200))
    assert os.getxattr(path, "user.n150") == b"150"


def test_attributes_follow_the_file_not_the_name(ckpt):
    path = write_file(ckpt / "a")
    os.setxattr(path, "user.k", b"v")
    os.link(path, ckpt / "b")
    os.rename(path, ckpt / "c")
    assert os.getxattr(ckpt / "b", "user.k") == b"v"
    assert os.getxattr(ckpt / "c", "user.k") == b"v"
    os.unlink(ckpt / "b")
    os.unlink(ckpt / "c")
    write_file(path)
    assert os.listxattr(path) == []


def test_attributes_of_an_unlinked_open_file(ckpt):
    path = write_file(ckpt / "a")
    with Opened(path) as fd:
        os.setxattr(fd, "user.k", b"v")
        os.unlink(path)
        assert os.getxattr(fd, "user.k") == b"v"
        os.setxattr(fd, "user.l", b"w")
        assert sorted(os.listxattr(fd)) == ["user.k", "user.l"]


def test_setting_an_attribute_moves_ctime(ckpt):
    path = write_file(ckpt / "f")
    before = path.stat()
    time.sleep(0.012)  # file times advance with the kernel's tick
    os.setxattr(path, "user.k", b"v")
    assert path.stat().st_ctime_ns > before.st_ctime_ns
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_permissions_of_attributes(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x", 0o644)
        os.setxattr(path, "user.k", b"v")
        os.setxattr(path, "trusted.k", b"v")
        os.setxattr(path, "security.k", b"v")

        def as_nobody():
            return [
                outcome(os.getxattr, path, "user.k"),
                outcome(os.setxattr, path, "user.k", b"w"),
                outcome(os.removexattr, path, "user.k"),
                outcome(os.getxattr, path, "trusted.k"),
                outcome(os.setxattr, path, "trusted.k", b"w"),
                outcome(os.getxattr, path, "security.k"),
                outcome(os.setxattr, path, "security.k", b"w"),
            ]

        first = in_child(as_nobody, uid=NOBODY)
        os.chmod(path, 0o600)
        return first, in_child(as_nobody, uid=NOBODY)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_trusted_attributes_are_hidden_from_other_users(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f", b"x", 0o644)
        os.setxattr(path, "user.k", b"v")
        os.setxattr(path, "trusted.k", b"v")
        return in_child(lambda: sorted(os.listxattr(path)), uid=NOBODY)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_user_attributes_on_special_files(ckpt, tmpfs_dir):
    def scenario(root):
        os.mkfifo(root / "fifo")
        return outcome(os.setxattr, root / "fifo", "user.k", b"v")

    assert assert_same(scenario, ckpt, tmpfs_dir) == "EPERM"


@pytest.mark.parametrize("name", ["system.posix_acl_access", "system.posix_acl_default"])
def test_posix_acls_are_refused(ckpt, name):
    """An exception: ACLs are not stored. Refusing them lets `cp -a` and tar fall back to modes."""
    acl = bytes.fromhex("02000000010006000000000004000400000000002000040000000000")
    ckpt.joinpath("d").mkdir()
    # Python's table of names calls it by its other name.
    assert fails_with(os.setxattr, ckpt / "d", name, acl) == "ENOTSUP"
    assert fails_with(os.getxattr, ckpt / "d", name) in ("ENOTSUP", "ENODATA")


def test_selinux_labels_are_not_asked_for_again(ckpt):
    """An exception: `ls -l` asks once for a label, and on ENODATA once for every file. One that is set is kept."""
    path = write_file(ckpt / "f")
    assert fails_with(os.getxattr, path, "security.selinux") == "ENOTSUP"
    os.setxattr(path, "security.selinux", b"system_u:object_r:tmp_t:s0")
    assert os.getxattr(path, "security.selinux") == b"system_u:object_r:tmp_t:s0"
