"""The errno of every wrong call, held against tmpfs."""

import os

import pytest

from tests.posix.lib import NOBODY, Opened, assert_same, fails_with, in_child, outcome, write_file


def prepare(root):
    write_file(root / "file")
    (root / "full").mkdir()
    write_file(root / "full" / "inside")
    (root / "empty").mkdir()
    os.symlink("file", root / "link")
    os.symlink("nowhere", root / "dangling")
    os.symlink("loop", root / "loop")
    os.symlink("full", root / "dirlink")
    os.mkfifo(root / "fifo")


NAMES = ("file", "full", "empty", "link", "dangling", "loop", "dirlink", "fifo", "absent")
ONE_PATH = {
    "stat": os.stat,
    "lstat": os.lstat,
    "readlink": os.readlink,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "mkdir": os.mkdir,
    "mkfifo": os.mkfifo,
    "listdir": os.listdir,
    "truncate": lambda p: os.truncate(p, 0),
    "chmod": lambda p: os.chmod(p, 0o700),
    "chown": lambda p: os.chown(p, 0, 0),
    "utime": lambda p: os.utime(p, ns=(1, 1)),
    "symlink": lambda p: os.symlink("x", p),
    "read": lambda p: os.close(os.open(p, os.O_RDONLY | os.O_NONBLOCK)),
    "write": lambda p: os.close(os.open(p, os.O_WRONLY | os.O_NONBLOCK)),
    "create": lambda p: os.close(os.open(p, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)),
    "exclusive": lambda p: os.close(os.open(p, os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
    "nofollow": lambda p: os.close(os.open(p, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)),
    "directory": lambda p: os.close(os.open(p, os.O_RDONLY | os.O_DIRECTORY)),
    "getxattr": lambda p: os.getxattr(p, "user.absent"),
    "statvfs": lambda p: os.statvfs(p) and None,
    "below": lambda p: os.stat(f"{p}/x"),
    "create below": lambda p: os.mkdir(f"{p}/x"),
    "slash": lambda p: os.stat(f"{p}/"),
    "unlink slash": lambda p: os.unlink(f"{p}/"),
    "mkdir slash": lambda p: os.mkdir(f"{p}/"),
    "create slash": lambda p: os.open(f"{p}/", os.O_WRONLY | os.O_CREAT),
}


def kind_of_outcome(result):
    """Values differ between filesystems; what must agree is success, text and errno."""
    if isinstance(result, str) or result is None:
        return result
    return sorted(result) if isinstance(result, list) else "ok"


@pytest.mark.parametrize("operation", ONE_PATH)
def test_operations_on_every_kind(ckpt, tmpfs_dir, operation):
    def scenario(root):
        seen = {}
        for name in NAMES:
            base = root / name[:3] / operation.replace(" ", "-")
            base.mkdir(parents=True)
            prepare(base)
            result = kind_of_outcome(outcome(ONE_PATH[operation], base / name))
            seen[name] = result, sorted(os.listdir(base))
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


@pytest.mark.parametrize("operation", ["rename", "link"])
def test_operations_on_every_pair_of_kinds(ckpt, tmpfs_dir, operation):
    call = {"rename": os.rename, "link": lambda a, b: os.link(a, b, follow_symlinks=False)}[
        operation
    ]

    def scenario(root):
        seen = {}
        for number, old in enumerate(NAMES):
            for new in (*NAMES, "full/inside", "full/new", "file/new", "absent/new"):
                base = root / f"{number}-{new.replace('/', '-')}"
                base.mkdir()
                prepare(base)
                result = outcome(call, base / old, base / new)
                seen[old, new] = (
                    result,
                    sorted(os.listdir(base)),
                    sorted(os.listdir(base / "full")) if (base / "full").is_dir() else None,
                )
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_links_and_renames_to_another_filesystem(ckpt, tmpfs_dir):
    write_file(ckpt / "f")
    for old, new in ((ckpt / "f", tmpfs_dir / "f"), (write_file(tmpfs_dir / "g"), ckpt / "g")):
        assert fails_with(os.rename, old, new) == "EXDEV"
        assert fails_with(os.link, old, new) == "EXDEV"


def test_empty_and_rootward_paths(ckpt, tmpfs_dir):
    def scenario(root):
        (root / "d").mkdir()

        def inside():
            os.chdir(root / "d")
            return (
                fails_with(os.stat, ""),
                fails_with(os.mkdir, "."),
                fails_with(os.mkdir, ".."),
                fails_with(os.rmdir, "."),
                fails_with(os.rename, ".", "x"),
                fails_with(os.rename, "x", "."),
                fails_with(os.unlink, "."),
            )

        return in_child(inside)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_the_mountpoint_cannot_be_removed_or_renamed(mnt_obj):
    assert fails_with(os.rmdir, mnt_obj.path) == "EBUSY"
    assert fails_with(os.rename, mnt_obj.path, mnt_obj.path.parent / "x") == "EBUSY"


def test_unwritable_directory_for_other_users(ckpt, tmpfs_dir):
    def scenario(root):
        prepare(root)
        operations = (
            "unlink",
            "rmdir",
            "mkdir",
            "mkfifo",
            "symlink",
            "create",
            "exclusive",
            "write",
        )

        def attempt():
            return {
                (operation, name): kind_of_outcome(outcome(ONE_PATH[operation], root / name))
                for operation in operations
                for name in NAMES
            }

        return in_child(attempt, uid=NOBODY)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_ioctls_are_refused_cleanly(ckpt, tmpfs_dir):
    import fcntl

    def scenario(root):
        write_file(root / "f")
        with Opened(root / "f") as fd:
            return fails_with(fcntl.ioctl, fd, 0x5413, bytes(8)), os.isatty(fd)

    assert_same(scenario, ckpt, tmpfs_dir)
