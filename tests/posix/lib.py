"""System calls Python has no name for, other processes and users, comparing two filesystems."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
FALLOC_FL_COLLAPSE_RANGE = 0x08
FALLOC_FL_ZERO_RANGE = 0x10
FALLOC_FL_INSERT_RANGE = 0x20
FALLOC_FL_UNSHARE_RANGE = 0x40
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_SYMLINK_FOLLOW = 0x400
SYS_GETDENTS64 = 217 if os.uname().machine == "x86_64" else 61
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
NOBODY = 65534
OTHER = 12345

_running: set[int] = set()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
for _name in ("telldir", "opendir", "readdir"):
    getattr(_libc, _name).restype = ctypes.c_void_p if _name != "telldir" else ctypes.c_long


def _checked(result: int, path: Any = None) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


def renameat2(old: Any, new: Any, flags: int) -> None:
    _checked(_libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags), old)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    _checked(call(fd, mode, offset, length))


def linkat_fd(fd: int, new: Any) -> None:
    """Give an open file (O_TMPFILE) a name, the way that needs no privilege."""
    old = f"/proc/self/fd/{fd}".encode()
    _checked(_libc.linkat(AT_FDCWD, old, AT_FDCWD, os.fsencode(new), AT_SYMLINK_FOLLOW), new)


def utimensat(path: Any, times: tuple[tuple[int, int], tuple[int, int]], flags: int = 0) -> None:
    packed = struct.pack("qqqq", *times[0], *times[1])
    _checked(_libc.utimensat(AT_FDCWD, os.fsencode(path), packed, flags), path)


def getdents(fd: int, buffer_bytes: int = 1024) -> list[tuple[int, int, int, bytes]]:
    """One getdents64 call: (inode, cookie, type, name) of each entry; empty at the end."""
    buffer = ctypes.create_string_buffer(buffer_bytes)
    got = _checked(_libc.syscall(SYS_GETDENTS64, fd, buffer, buffer_bytes))
    entries, at = [], 0
    while at < got:
        ino, cookie, record_bytes, kind = struct.unpack_from("=QqHB", buffer, at)
        name = buffer.raw[at + 19 : at + record_bytes].split(b"\0", 1)[0]
        entries.append((ino, cookie, kind, name))
        at += record_bytes
    return entries


def all_names(fd: int, buffer_bytes: int = 1024) -> list[bytes]:
    """Names from the descriptor's position to the end, `.` and `..` included."""
    names: list[bytes] = []
    while entries := getdents(fd, buffer_bytes):
        names += [entry[3] for entry in entries]
    return names


def in_child(
    action: Callable[[], Any],
    uid: int | None = None,
    gid: int | None = None,
    groups: tuple[int, ...] = (),
    timeout_s: float = 30,
) -> Any:
    """Run `action` in a forked process, as another user if asked, and return its result.

    Raises what it raised (OSError with its errno), TimeoutError when it did not end in time.
    """
    return spawn(action, uid, gid, groups).result(timeout_s)


class Child:
    """A forked process whose result can be waited for."""

    def __init__(self, pid: int, pipe: int):
        self.pid = pid
        self.pipe = pipe

    def result(self, timeout_s: float = 30) -> Any:
        deadline = time.monotonic() + timeout_s
        # The child writes less than a pipe holds, so waiting for its end before reading cannot block it.
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                end_children()
                os.close(self.pipe)
                raise TimeoutError(f"child did not end within {timeout_s} s")
            time.sleep(0.002)
        _running.discard(self.pid)
        with open(self.pipe, "rb") as pipe:
            data = pipe.read()
        assert data, "child died without a result"
        kind, value = pickle.loads(data)
        if kind == "errno":
            raise OSError(value, os.strerror(value))
        if kind == "error":
            raise AssertionError(f"in child: {value}")
        return value


def spawn(
    action: Callable[[], Any],
    uid: int | None = None,
    gid: int | None = None,
    groups: tuple[int, ...] = (),
) -> Child:
    """Start `action` in a forked process; see `in_child`."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        _running.add(pid)
        return Child(pid, read_end)
    try:
        os.close(read_end)
        if uid is not None:
            os.setgroups(groups)
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
        result = ("ok", action())
    except OSError as exc:
        result = ("errno", exc.errno)
    except BaseException as exc:  # all of it is the parent's to judge
        result = ("error", repr(exc))
    try:
        os.write(write_end, pickle.dumps(result))
    finally:
        os._exit(0)


def end_children() -> None:
    """Kill what a failed test left running, lest it goes on writing where the next one works."""
    while _running:
        pid = _running.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def outcome(action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call, or the name of its errno: what must be equal on two filesystems."""
    try:
        return action(*args, **kwargs)
    except OSError as exc:
        assert exc.errno is not None
        return errno.errorcode.get(exc.errno, exc.errno)


def assert_same(scenario: Callable[[Path], Any], ours: Path, tmpfs: Path) -> Any:
    """`scenario(directory)` has the same outcome on both; returns it."""
    expected, actual = outcome(scenario, tmpfs), outcome(scenario, ours)
    assert actual == expected, f"tmpfs: {expected!r}, ours: {actual!r}"
    return actual


def fails_with(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The errno name with which a call fails; AssertionError when it succeeds."""
    result = outcome(action, *args, **kwargs)
    assert isinstance(result, str) and result in errno.errorcode.values(), f"succeeded: {result!r}"
    return result


def write_file(path: Any, data: bytes = b"data", mode: int = 0o644) -> Path:
    """Create or overwrite by plain system calls; the mode is as given, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    return Path(os.fsdecode(path))


class Opened:
    """`with Opened(path, flags) as fd`: a descriptor closed at the end."""

    def __init__(self, path: Any, flags: int = os.O_RDWR, mode: int = 0o644, **kwargs: Any):
        self.args = (path, flags, mode)
        self.kwargs = kwargs

    def __enter__(self) -> int:
        self.fd = os.open(*self.args, **self.kwargs)
        return self.fd

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
