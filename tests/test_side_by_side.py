"""The same random operations on the mount and on tmpfs, side by side: every result and errno must agree.

What is compared: results, errnos, bytes, type, mode, owner, link count, size, link targets, xattrs, which
names are one file, and mtime as far as it was set by hand (a time of now is only "now"). Not compared:
directory sizes, blocks, atime.

A failure prints the seed and the operations that led to it. `--side-by-side-ops N` (or CKPTFS_SIDE_BY_SIDE_OPS) makes
runs longer, `--side-by-side-seed S` (or CKPTFS_SIDE_BY_SIDE_SEED) repeats one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.posix.lib import (
    FALLOC_FL_KEEP_SIZE,
    FALLOC_FL_PUNCH_HOLE,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    fallocate,
    renameat2,
    utimensat,
)

SEEDS = (1, 2, 3, 4, 5)
SLOTS = 6
LARGEST_BYTES = 200_000
# Times set by hand lie before this (2001), times of now after it.
NOW_NS = 10**18
# Few names, so that operations meet; the ones chosen most are there from the start.
PATHS = (
    "a",
    "a",
    "b",
    "b",
    "c",
    "d",
    "d/a",
    "d/a",
    "d/b",
    "d/e",
    "d/e/a",
    "d/e/f",
    "g",
    "g/a",
    "a/x",
)
TARGETS = ("a", "d", "e", "b", "d/e", "nowhere", "g/a", "l" * 300)
NAMES_OF_XATTRS = ("user.a", "user.b", "trusted.c", "security.d")
MODES = (0o600, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4711, 0)
OPEN_FLAGS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_WRONLY,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    os.O_RDWR | os.O_APPEND,
    os.O_RDONLY | os.O_NOFOLLOW,
    os.O_RDONLY | os.O_DIRECTORY,
)


def attributes(got: os.stat_result) -> tuple[Any, ...]:
    size = None if stat.S_ISDIR(got.st_mode) else got.st_size
    mtime = got.st_mtime_ns if got.st_mtime_ns < NOW_NS else "now"
    return oct(got.st_mode), got.st_nlink, size, got.st_uid, got.st_gid, got.st_rdev, mtime


START: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("mkdir", ("d", 0o755)),
    ("mkdir", ("d/e", 0o755)),
    ("mkdir", ("g", 0o2775)),
    *(
        ("open", (n, p, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644))
        for n, p in enumerate(("a", "b", "d/a", "g/a"))
    ),
    *(("write", (n, bytes([65 + n]) * 30_000)) for n in range(4)),
)


class World:
    """One filesystem under the operations: a root directory and a few open descriptors."""

    def __init__(self, root: Path):
        self.root = os.fspath(root)
        self.slots: dict[int, int] = {}

    def apply(self, name: str, args: tuple[Any, ...]) -> Any:
        """The outcome of one operation: its result, or the name of its errno."""
        try:
            return getattr(self, name)(*args)
        except OSError as exc:
            return errno.errorcode[exc.errno or 0]

    def close_all(self) -> None:
        while self.slots:
            os.close(self.slots.popitem()[1])

    def path(self, relative: str) -> str:
        return f"{self.root}/{relative}"

    def fd(self, slot: int) -> int:
        """The slot's descriptor; an empty one gives EBADF, on both sides alike."""
        if slot not in self.slots:
            raise OSError(errno.EBADF, "empty slot")
        return self.slots[slot]

    def open(self, slot: int, path: str, flags: int, mode: int) -> None:
        self.close(slot)
        self.slots[slot] = os.open(self.path(path), flags, mode)

    def close(self, slot: int) -> None:
        if slot in self.slots:
            os.close(self.slots.pop(slot))

    def read(self, slot: int, length: int) -> bytes:
        return os.read(self.fd(slot), length)

    def pread(self, slot: int, length: int, offset: int) -> bytes:
        return os.pread(self.fd(slot), length, offset)

    def write(self, slot: int, data: bytes) -> int:
        return os.write(self.fd(slot), data)

    def pwrite(self, slot: int, data: bytes, offset: int) -> int:
        return os.pwrite(self.fd(slot), data, offset)

    def seek(self, slot: int, offset: int, whence: int) -> int:
        fd = self.fd(slot)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return -1  # Positions in a directory are the filesystem's own business.
        return os.lseek(fd, offset, whence)

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.fd(slot), size)

    def fallocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        fallocate(self.fd(slot), mode, offset, length)

    def copy(self, source: int, target: int, length: int, at: int, to: int) -> int:
        return os.copy_file_range(self.fd(source), self.fd(target), length, at, to)

    def sendfile(self, source: int, target: int, length: int, at: int) -> int:
        return os.sendfile(self.fd(target), self.fd(source), at, length)

    def map_write(self, slot: int, data: bytes, offset: int) -> Any:
        try:
            with mmap.mmap(self.fd(slot), 0) as mapping:
                mapping[offset : offset + len(data)] = data[: max(0, len(mapping) - offset)]
                mapping.flush()
        except (ValueError, IndexError) as exc:
            return type(exc).__name__  # An empty file has no mapping.
        return None

    def map_read(self, slot: int) -> Any:
        try:
            with mmap.mmap(self.fd(slot), 0, prot=mmap.PROT_READ) as mapping:
                return mapping[:]
        except ValueError as exc:
            return type(exc).__name__

    def fsync(self, slot: int) -> None:
        os.fsync(self.fd(slot))

    def fstat(self, slot: int) -> Any:
        return attributes(os.fstat(self.fd(slot)))

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.fd(slot), mode)

    def flock(self, slot: int, kind: int) -> None:
        fcntl.flock(self.fd(slot), kind | fcntl.LOCK_NB)

    def fsetxattr(self, slot: int, name: str, value: bytes) -> None:
        os.setxattr(self.fd(slot), name, value)

    def futimens(self, slot: int, ns: int) -> None:
        os.utime(self.fd(slot), ns=(ns, ns))

    def flistdir(self, slot: int) -> list[str]:
        fd = self.fd(slot)
        os.lseek(fd, 0, os.SEEK_SET)
        return sorted(os.listdir(fd))

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self.path(path), size)

    def rename(self, old: str, new: str, flags: int) -> None:
        renameat2(self.path(old), self.path(new), flags)

    def link(self, old: str, new: str) -> None:
        os.link(self.path(old), self.path(new), follow_symlinks=False)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self.path(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self.path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self.path(path))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.path(path))

    def mkfifo(self, path: str) -> None:
        os.mkfifo(self.path(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.path(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.lchown(self.path(path), uid, gid)

    def utime(self, path: str, ns: int) -> None:
        whole = (ns // 10**9, ns % 10**9)
        utimensat(self.path(path), (whole, whole), 0x100)

    def stat(self, path: str) -> Any:
        return attributes(os.stat(self.path(path)))

    def lstat(self, path: str) -> Any:
        return attributes(os.lstat(self.path(path)))

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self.path(path)))

    def read_file(self, path: str) -> bytes:
        # O_NONBLOCK: opening a FIFO must not wait.
        fd = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
        finally:
            os.close(fd)

    def write_file(self, path: str, data: bytes) -> int:
        fd = os.open(self.path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
        try:
            return os.write(fd, data)
        finally:
            os.close(fd)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self.path(path), name, value, flags, follow_symlinks=False)

    def getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(self.path(path), name, follow_symlinks=False)

    def listxattr(self, path: str) -> list[str]:
        return sorted(os.listxattr(self.path(path), follow_symlinks=False))

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self.path(path), name, follow_symlinks=False)

    def access(self, path: str, mode: int) -> bool:
        return os.access(self.path(path), mode)

    def tree(self) -> dict[str, Any]:
        """Everything there is to know of all files."""
        found: dict[str, Any] = {}
        first_name: dict[int, str] = {}
        for directory, names, files in os.walk(self.root):
            names.sort()
            for name in sorted((*names, *files)):
                path = os.path.join(directory, name)
                relative = os.path.relpath(path, self.root)
                got = os.lstat(path)
                content: Any = None
                if stat.S_ISREG(got.st_mode):
                    content = Path(path).read_bytes()
                elif stat.S_ISLNK(got.st_mode):
                    content = os.readlink(path)
                xattrs = {
                    key: os.getxattr(path, key, follow_symlinks=False)
                    for key in sorted(os.listxattr(path, follow_symlinks=False))
                }
                same_as = first_name.setdefault(got.st_ino, relative)
                found[relative] = (attributes(got), content, xattrs, same_as)
        return found


class Generator:
    """Operations by chance; knows only names and slots, so it needs no filesystem."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def path(self) -> str:
        return self.random.choice(PATHS)

    def slot(self) -> int:
        return self.random.randrange(SLOTS)

    def offset(self) -> int:
        return self.random.choice(
            (0, 1, 4095, 4096, 5000, 70_000, self.random.randrange(LARGEST_BYTES))
        )

    def data(self) -> bytes:
        length = self.random.choice((0, 1, 10, 4096, 5000, self.random.randrange(70_000)))
        return self.random.randbytes(8) * (length // 8) + b"x" * (length % 8)

    def next(self) -> tuple[str, tuple[Any, ...]]:
        pick, path, slot = self.random.choice, self.path, self.slot
        ns = self.random.randrange(NOW_NS)
        punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        whence = pick((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE))
        owner = (pick((-1, 0, 1, 1000)), pick((-1, 0, 1, 1000)))
        operations: list[tuple[int, str, tuple[Any, ...]]] = [
            (12, "open", (slot(), path(), pick(OPEN_FLAGS) | os.O_NONBLOCK, pick(MODES))),
            (3, "close", (slot(),)),
            (4, "read", (slot(), pick((1, 5000, 300_000)))),
            (5, "pread", (slot(), pick((1, 5000, 300_000)), self.offset())),
            (6, "write", (slot(), self.data())),
            (6, "pwrite", (slot(), self.data(), self.offset())),
            (4, "seek", (slot(), self.offset(), whence)),
            (4, "ftruncate", (slot(), self.offset())),
            (4, "fallocate", (slot(), pick((0, FALLOC_FL_KEEP_SIZE, punch)), self.offset(), 9000)),
            (2, "copy", (slot(), slot(), 10_000, self.offset(), self.offset())),
            (2, "sendfile", (slot(), slot(), 10_000, self.offset())),
            (4, "map_write", (slot(), self.data(), self.offset())),
            (2, "map_read", (slot(),)),
            (3, "fsync", (slot(),)),
            (5, "fstat", (slot(),)),
            (2, "fchmod", (slot(), pick(MODES))),
            (1, "flock", (slot(), pick((fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN)))),
            (2, "fsetxattr", (slot(), pick(NAMES_OF_XATTRS), self.data()[:300])),
            (2, "futimens", (slot(), ns)),
            (2, "flistdir", (slot(),)),
            (3, "truncate", (path(), self.offset())),
            (9, "rename", (path(), path(), pick((0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE)))),
            (5, "link", (path(), path())),
            (4, "symlink", (pick(TARGETS), path())),
            (2, "readlink", (path(),)),
            (6, "unlink", (path(),)),
            (7, "mkdir", (path(), pick(MODES))),
            (3, "rmdir", (path(),)),
            (1, "mkfifo", (path(),)),
            (3, "chmod", (path(), pick(MODES))),
            (2, "chown", (path(), *owner)),
            (3, "utime", (path(), ns)),
            (5, "stat", (path(),)),
            (5, "lstat", (path(),)),
            (3, "listdir", (path(),)),
            (4, "read_file", (path(),)),
            (5, "write_file", (path(), self.data())),
            (3, "setxattr", (path(), pick(NAMES_OF_XATTRS), self.data()[:300], pick((0, 0, 1, 2)))),
            (2, "getxattr", (path(), pick(NAMES_OF_XATTRS))),
            (2, "listxattr", (path(),)),
            (2, "removexattr", (path(), pick(NAMES_OF_XATTRS))),
            (1, "access", (path(), pick((os.F_OK, os.R_OK, os.W_OK, os.X_OK)))),
        ]
        weights = [weight for weight, _, _ in operations]
        _, name, args = self.random.choices(operations, weights)[0]
        return name, args


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def run(ours: World, tmpfs: World, seed: int, count: int) -> None:
    """Apply `count` operations to both; AssertionError with seed and history at the first difference."""
    generator = Generator(seed)
    history: list[str] = []
    for number in range(count):
        # A tree and open descriptors to begin with, and again from time to time.
        first = number % 200
        name, args = START[first] if first < len(START) else generator.next()
        expected, actual = tmpfs.apply(name, args), ours.apply(name, args)
        history.append(f"{number}: {name}{short(args)} -> {short(expected)}")
        if actual != expected:
            lines = "\n".join(history[-40:])
            pytest.fail(
                f"seed {seed}, operation {number}: tmpfs {short(expected)}, ours {short(actual)}\n{lines}"
            )
        # Not after every operation: reading everything would hide what only a stale cache shows.
        if number % 50 == 49 or number == count - 1:
            compare_trees(ours.tree(), tmpfs.tree(), seed, number, history)


def compare_trees(
    ours: dict[str, Any], tmpfs: dict[str, Any], seed: int, number: int, history: list[str]
) -> None:
    if ours == tmpfs:
        return
    lines = [
        f"{path}: tmpfs {short(tmpfs.get(path))}, ours {short(ours.get(path))}"
        for path in sorted(ours.keys() | tmpfs.keys())
        if ours.get(path) != tmpfs.get(path)
    ]
    pytest.fail(
        f"seed {seed}, trees after operation {number}:\n" + "\n".join(lines + history[-60:])
    )


@pytest.fixture
def worlds(ckpt, tmpfs_dir):
    pair = World(ckpt), World(tmpfs_dir)
    old_umask = os.umask(0)
    yield pair
    os.umask(old_umask)
    for world in pair:
        world.close_all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_random_operations_agree_with_tmpfs(worlds, number, request):
    seed = request.config.getoption("side_by_side_seed")
    count = request.config.getoption("side_by_side_ops")
    run(*worlds, SEEDS[number] if seed is None else seed + number, count)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [100, 101])
def test_random_operations_agree_while_the_worker_is_killed(worlds, mnt_obj, seed, request):
    """The same, but the worker is killed now and then: descriptors and results must not notice."""
    count = request.config.getoption("side_by_side_ops")
    ours, tmpfs = worlds
    for part in range(4):
        run(ours, tmpfs, seed * 100 + part, count // 8)
        mnt_obj.wait_new_worker(mnt_obj.kill_worker())
    run(ours, tmpfs, seed, count // 8)
