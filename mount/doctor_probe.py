"""What only trying tells: whether this kernel gives us passthrough, and tmpfs with huge pages.

What it keeps true: a probe works in a private temporary directory and leaves nothing there, whatever fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
import tempfile
from collections.abc import Iterator

from fs import relay
from mount import fusedev, sysmount

_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_INIT_REPLY_BYTES = 64
ANSWER_S = 5.0


@contextlib.contextmanager
def _mountpoint() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="ckptfs-doctor-")
    try:
        yield path
    finally:
        while sysmount.mount_at(path) is not None:
            sysmount.umount(path, sysmount.MNT_DETACH)
        os.rmdir(path)


def huge_tmpfs() -> OSError | None:
    """Mount a small tmpfs as an arena is mounted; the error, if it cannot be."""
    with _mountpoint() as path:
        try:
            sysmount.mount("ckptfs-doctor", path, "tmpfs", 0, "size=64k,mode=700,huge=within_size")
        except OSError as error:
            return error
    return None


def passthrough() -> str | None:
    """Mount, agree on passthrough and register a backing file; why it fails, None when it works."""
    with _mountpoint() as path, contextlib.ExitStack() as stack:
        fd = os.open(fusedev.DEVICE, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        data = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        flags = sysmount.MS_NOSUID | sysmount.MS_NODEV
        try:
            sysmount.mount("ckptfs-doctor", path, sysmount.FUSE_TYPE, flags, data)
        except OSError as error:
            return f"mount(2) of a FUSE filesystem: {os.strerror(error.errno or errno.EIO)}"
        if not select.select([fd], [], [], ANSWER_S)[0]:
            return f"the kernel sent no INIT within {ANSWER_S:.0f} s"
        request = os.read(fd, relay.READ_BUFFER_BYTES)
        offer = relay.parse_offer(request)
        if not offer.passthrough:
            return "the kernel does not offer it (built without CONFIG_FUSE_PASSTHROUGH?)"
        os.write(fd, _init_reply(request, offer))
        return _register(fd)


def _init_reply(request: bytes, offer: relay.Offer) -> bytearray:
    unique = relay.REQUEST_HEADER.unpack_from(request)[2]
    body = struct.pack("<IIII", 7, 40, 0, 0)
    reply = bytearray(relay.reply(unique, body.ljust(_INIT_REPLY_BYTES, b"\0")))
    relay.patch_init_reply(reply, offer, passthrough=True)
    return reply


def _register(fuse_fd: int) -> str | None:
    file_fd = os.memfd_create("ckptfs-doctor", os.MFD_CLOEXEC)
    try:
        argument = bytearray(struct.pack("<iIQ", file_fd, 0, 0))
        backing_id = fcntl.ioctl(fuse_fd, _BACKING_OPEN, argument, True)
        fcntl.ioctl(fuse_fd, _BACKING_CLOSE, struct.pack("<I", backing_id))
    except OSError as error:
        return f"registering a backing file: {os.strerror(error.errno or errno.EIO)}"
    finally:
        os.close(file_fd)
    return None
