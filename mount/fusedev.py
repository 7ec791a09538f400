"""Getting /dev/fuse mounted, as root by mount(2), as any other user through fusermount3.

What it keeps true: either a descriptor of the mounted device is returned, or an OSError says which path and
why; a mount that somebody put in place of ours is never taken away.
"""

from __future__ import annotations

import array
import errno
import os
import shutil
import socket
import subprocess
from typing import Any

from mount import sysmount

DEVICE = "/dev/fuse"


def source_of(name: str) -> str:
    """The first field of our line in the table of mounts."""
    return f"ckptfs:{name}"


def open_and_mount(settings: dict[str, Any]) -> int:
    """Mount; the device's descriptor, not blocking, not inherited."""
    if settings["use_fusermount"]:
        return _by_fusermount(settings)
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        data += ",allow_other,default_permissions"
        flags = sysmount.MS_NOSUID | sysmount.MS_NODEV
        target = settings["mountpoint"]
        sysmount.mount(source_of(settings["name"]), target, sysmount.FUSE_TYPE, flags, data)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EPERM:
            why = "mounting was refused: root without CAP_SYS_ADMIN (a container? give it the capability)"
            raise OSError(errno.EPERM, why, settings["mountpoint"]) from error
        raise
    return fd


def _by_fusermount(settings: dict[str, Any]) -> int:
    tool = shutil.which("fusermount3")
    if tool is None:
        raise FileNotFoundError(errno.ENOENT, "not installed (package fuse3)", "fusermount3")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    options = (
        f"fsname={source_of(settings['name'])},subtype=ckptfs,default_permissions,nosuid,nodev"
    )
    if settings["allow_other"]:
        options += ",allow_other"
    with ours, theirs:
        done = subprocess.run(
            [tool, "-o", options, "--", settings["mountpoint"]],
            env=os.environ | {"_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            why = done.stderr.strip() or f"fusermount3 exited with {done.returncode}"
            raise OSError(errno.EPERM, why, settings["mountpoint"])
        size = array.array("i").itemsize
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_LEN(size))
    fd = int.from_bytes(ancillary[0][2][:size], "little")
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    return fd


def unmount(settings: dict[str, Any]) -> None:
    """Unmount ours; a busy one is detached, so that it ends with its last user."""
    target = settings["mountpoint"]
    if settings["use_fusermount"]:
        if subprocess.run(["fusermount3", "-u", target], check=False).returncode:
            subprocess.run(["fusermount3", "-u", "-z", target], check=False)
        return
    try:
        sysmount.umount(target)
    except OSError as error:
        if error.errno == errno.EBUSY:
            sysmount.umount(target, sysmount.MNT_DETACH)


def clear_dead(target: str) -> int:
    """Detach mounts of ours at *target* whose supervisor is gone, however many; how many there were."""
    cleared = 0
    while True:
        entry = sysmount.mount_at(target)
        if entry is None or entry.kind != sysmount.FUSE_TYPE or not sysmount.is_dead(target):
            return cleared
        if os.getuid() == 0:
            sysmount.umount(target, sysmount.MNT_DETACH)
        elif subprocess.run(["fusermount3", "-u", "-z", target], check=False).returncode:
            return cleared
        cleared += 1
