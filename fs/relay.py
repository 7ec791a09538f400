"""The FUSE messages that are looked into between the kernel and libfuse. Pure: bytes in, bytes out.

What it keeps true:
- A message is passed on as it came, but for: the INIT reply (passthrough and sizes are agreed to), OPEN
  and CREATE replies (backing id, open mode), the pid field of requests (the request's number, so that a
  worker can tell one sent again), and the size of directory reads (a reply must fit the socket).

Offsets and flags are those of linux/fuse.h, protocol 7.36 and later (INIT_EXT).
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import NamedTuple

Buffer = bytearray | memoryview

# opcodes
FORGET, MKDIR = 2, 9
OPEN, READ, WRITE, RELEASE = 14, 15, 16, 18
INIT, READDIR, CREATE, INTERRUPT = 26, 28, 35, 36
BATCH_FORGET, FALLOCATE, READDIRPLUS, LSEEK, COPY_FILE_RANGE, TMPFILE = 42, 43, 44, 46, 47, 51
# what the vfs has no use for: it counts no lookups, and a signal does not end what it began
IGNORED = frozenset({FORGET, BATCH_FORGET, INTERRUPT})
LOCAL = frozenset({READ, WRITE, FALLOCATE, LSEEK, COPY_FILE_RANGE})

REQUEST_HEADER = struct.Struct("<IIQQ")  # len opcode unique nodeid
REPLY_HEADER = struct.Struct("<IiQ")  # len error unique
REQUEST_HEADER_BYTES, REPLY_HEADER_BYTES = 40, 16
PID_OFFSET = 32
RESENT_UNIQUE = 1 << 63
RESENT_PID = 1 << 31
NOTIFY_RESEND = 7

# INIT flags; those from bit 32 on lie in flags2
_BIG_WRITES, _AUTO_INVAL_DATA, _MAX_PAGES = 1 << 5, 1 << 12, 1 << 22
_HANDLE_KILLPRIV_V2, _INIT_EXT = 1 << 28, 1 << 30
_WRITEBACK_CACHE = 1 << 16
_PASSTHROUGH2, _HAS_RESEND2 = 1 << 5, 1 << 7
_INIT_OUT = struct.Struct("<IIIIHHIIHHII")

# open_flags
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NONSEEKABLE = 1 << 0, 1 << 1, 1 << 2
FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 5, 1 << 7
_OPEN_OUT = struct.Struct("<QIi")  # fh open_flags backing_id
_CREATE_ENTRY_BYTES = 128

MAX_WRITE_BYTES = 1 << 20
PAGE_BYTES = 4096
READ_BUFFER_BYTES = MAX_WRITE_BYTES + 8192
MAX_READDIR_BYTES = 128 << 10  # fits the smallest socket buffer a process may have to live with
NAMELESS = b"/tmp\0"  # the name by which the worker knows O_TMPFILE: no real name has a slash

_O_ACCMODE, _O_WRONLY = 3, 1


class Offer(NamedTuple):
    """What the kernel offers in INIT."""

    passthrough: bool
    resend: bool


def parse_offer(init_request: bytes) -> Offer:
    """Read the INIT request's extended flags; absent before 7.36."""
    flags = struct.unpack_from("<I", init_request, 52)[0]
    if not flags & _INIT_EXT or len(init_request) < 60:
        return Offer(False, False)
    flags2 = struct.unpack_from("<I", init_request, 56)[0]
    return Offer(bool(flags2 & _PASSTHROUGH2), bool(flags2 & _HAS_RESEND2))


def patch_init_reply(reply: Buffer, offer: Offer, *, passthrough: bool) -> None:
    """Agree to 1 MiB requests, to clearing suid ourselves, and, if wanted, to passthrough and resend."""
    fields = list(_INIT_OUT.unpack_from(reply, REPLY_HEADER_BYTES))
    flags, flags2 = fields[3], fields[10]
    flags |= _BIG_WRITES | _MAX_PAGES | _HANDLE_KILLPRIV_V2
    # nobody changes file contents behind the kernel: a new mtime is no reason to drop its pages
    flags &= ~(_AUTO_INVAL_DATA | _WRITEBACK_CACHE)
    if passthrough or offer.resend:
        flags |= _INIT_EXT
        fields[1] = max(fields[1], 40)
    if passthrough:
        flags2 |= _PASSTHROUGH2
        fields[11] = 1  # max_stack_depth
    if offer.resend:
        flags2 |= _HAS_RESEND2
    fields[3], fields[10] = flags, flags2
    fields[6] = MAX_WRITE_BYTES
    fields[8] = MAX_WRITE_BYTES // PAGE_BYTES
    _INIT_OUT.pack_into(reply, REPLY_HEADER_BYTES, *fields)


class OpenReply(NamedTuple):
    """Where an OPEN or CREATE reply's body lies, and the handle in it."""

    offset: int
    fh: int
    open_flags: int


def parse_open_reply(opcode: int, reply: Buffer) -> OpenReply:
    """Read the handle that the worker gave."""
    offset = REPLY_HEADER_BYTES + (_CREATE_ENTRY_BYTES if opcode == CREATE else 0)
    fh, open_flags, _ = _OPEN_OUT.unpack_from(reply, offset)
    return OpenReply(offset, fh, open_flags)


def patch_open_reply(
    reply: Buffer, parsed: OpenReply, access: int, backing_id: int, *, keep_cache: bool = True
) -> None:
    """Set the open's mode.

    With a backing id: passthrough. Without: a write-only open goes straight to us (one copy less, and
    nothing can be mapped through it), any other through the page cache, so that mmap works. *keep_cache*:
    pages of earlier opens are still right, because nothing is ever written past the kernel's page cache.
    close() of a read-only open has nothing to publish.
    """
    flags = parsed.open_flags & ~(FOPEN_KEEP_CACHE | FOPEN_NONSEEKABLE)
    if access == 0:
        flags |= FOPEN_NOFLUSH
    if backing_id:
        flags |= FOPEN_PASSTHROUGH
    elif access == _O_WRONLY:
        flags |= FOPEN_DIRECT_IO
    elif keep_cache:
        flags |= FOPEN_KEEP_CACHE
    _OPEN_OUT.pack_into(reply, parsed.offset, parsed.fh, flags, backing_id)


def open_access(request: Buffer) -> int:
    """The access mode (O_ACCMODE bits) of an OPEN, CREATE or TMPFILE request."""
    return int(struct.unpack_from("<I", request, REQUEST_HEADER_BYTES)[0]) & _O_ACCMODE


def fh_of(request: Buffer) -> int:
    """The handle in a RELEASE, READ, WRITE, FALLOCATE or LSEEK request."""
    return int(struct.unpack_from("<Q", request, REQUEST_HEADER_BYTES)[0])


def pid_of(request: Buffer) -> int:
    """The thread that asks (0: unknown), until `number_request` has its field."""
    return int(struct.unpack_from("<I", request, PID_OFFSET)[0])


def number_request(request: Buffer, unique: int) -> None:
    """Put the request's number, and whether it is sent again, where the worker can see them."""
    number = ((unique & ~RESENT_UNIQUE) >> 1) & 0x7FFFFFFF
    if unique & RESENT_UNIQUE:
        number |= RESENT_PID
    struct.pack_into("<I", request, PID_OFFSET, number)


def bound_readdir(request: Buffer) -> None:
    """Ask the worker for no more of a directory than the socket takes."""
    size = struct.unpack_from("<I", request, REQUEST_HEADER_BYTES + 16)[0]
    if size > MAX_READDIR_BYTES:
        struct.pack_into("<I", request, REQUEST_HEADER_BYTES + 16, MAX_READDIR_BYTES)


def tmpfile_as_create(request: Buffer) -> bytes:
    """libfuse 3.14 knows no TMPFILE: the same request as a CREATE of a nameless file."""
    head = bytearray(request[: REQUEST_HEADER_BYTES + 16])
    struct.pack_into("<II", head, 0, len(head) + len(NAMELESS), CREATE)
    return bytes(head) + NAMELESS


def reply(unique: int, body: bytes = b"") -> bytes:
    """A successful reply."""
    return REPLY_HEADER.pack(REPLY_HEADER_BYTES + len(body), 0, unique) + body


def error_reply(unique: int, code: int) -> bytes:
    """A reply with an errno."""
    return REPLY_HEADER.pack(REPLY_HEADER_BYTES, -code, unique)


def resend_notification() -> bytes:
    """Ask the kernel to send again all that it has no reply to (Linux 6.9)."""
    return REPLY_HEADER.pack(REPLY_HEADER_BYTES, NOTIFY_RESEND, 0)


# The file in which a worker leaves what it was doing (fs.opentable): the number of the request answered last,
# and, further on, the request read last.
ANSWERED_OFFSET, REQUEST_OFFSET = 0, 4096


def request_in_hand(session: Buffer | bytes | mmap) -> int:
    """The unique of the request that a dead worker read and did not answer; 0 for none."""
    answered: int = struct.unpack_from("<Q", session, ANSWERED_OFFSET)[0]
    unique: int = REQUEST_HEADER.unpack_from(session, REQUEST_OFFSET)[2]
    return 0 if unique == answered else unique
