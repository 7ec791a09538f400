"""mount(2), umount2(2) and the table of mounts. Standard library only (the supervisor imports it).

What it keeps true: a failed call names the path and the errno; a mountpoint in the table is the real path,
with the kernel's octal escapes undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from typing import NamedTuple

MS_NOSUID, MS_NODEV, MS_NOATIME, MS_REMOUNT = 2, 4, 1024, 32
MNT_FORCE, MNT_DETACH = 1, 2
FUSE_TYPE = "fuse.ckptfs"

libc = ctypes.CDLL(None, use_errno=True)


class MountEntry(NamedTuple):
    """A line of /proc/self/mounts."""

    source: str
    target: str
    kind: str
    options: str


def _unescape(field: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(field))
    return os.fsdecode(raw)


def parse_mounts(text: str) -> list[MountEntry]:
    """Read the table, oldest mount first."""
    entries = []
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 4:
            source, target, kind, options = (_unescape(field) for field in fields[:4])
            entries.append(MountEntry(source, target, kind, options))
    return entries


def mounts() -> list[MountEntry]:
    """All mounts of this process's namespace."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
        return parse_mounts(table.read())


def mount_at(target: str) -> MountEntry | None:
    """The topmost mount at exactly *target* (a real path), or None."""
    found = [entry for entry in mounts() if entry.target == target]
    return found[-1] if found else None


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """mount(2). Raises OSError with the target."""
    arguments = (source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())
    if libc.mount(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"mount of {kind}: {os.strerror(code)}", target)


def umount(target: str, flags: int = 0) -> None:
    """umount2(2). Raises OSError with the target."""
    if libc.umount2(os.fsencode(target), flags):
        code = ctypes.get_errno()
        raise OSError(code, f"umount: {os.strerror(code)}", target)


def is_dead(path: str) -> bool:
    """Whether a FUSE mount whose server is gone lies at *path*."""
    try:
        os.statvfs(path)  # attributes may be answered from the kernel's cache
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False
