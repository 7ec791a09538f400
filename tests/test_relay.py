"""The messages between kernel and libfuse, byte by byte."""

from __future__ import annotations

import struct

import pytest

from fs import relay


def init_request(flags: int, flags2: int, size: int = 104) -> bytes:
    request = bytearray(104)
    relay.REQUEST_HEADER.pack_into(request, 0, size, relay.INIT, 2, 0)
    struct.pack_into("<IIIII", request, 40, 7, 45, 1 << 17, flags, flags2)
    return bytes(request[:size])


def init_reply() -> bytearray:
    reply = bytearray(80)
    relay.REPLY_HEADER.pack_into(reply, 0, 80, 0, 2)
    # as libfuse 3.14 writes it: AUTO_INVAL_DATA and WRITEBACK_CACHE wanted, small writes
    struct.pack_into(
        "<IIIIHHIIHHII", reply, 16, 7, 38, 1 << 17, 0x11000, 12, 9, 4096, 1, 1, 0, 0, 0
    )
    return reply


@pytest.mark.parametrize(
    ("flags", "flags2", "size", "offer"),
    [
        (1 << 30, 1 << 5 | 1 << 7, 104, (True, True)),
        (1 << 30, 1 << 7, 104, (False, True)),
        (0, 1 << 5, 104, (False, False)),  # without INIT_EXT the second word means nothing
        (1 << 30, 0, 56, (False, False)),  # a kernel before 7.36 sends a short INIT
    ],
)
def test_offer(flags: int, flags2: int, size: int, offer: tuple[bool, bool]) -> None:
    assert relay.parse_offer(init_request(flags, flags2, size)) == offer


@pytest.mark.parametrize("passthrough", [False, True])
@pytest.mark.parametrize("resend", [False, True])
def test_init_reply(passthrough: bool, resend: bool) -> None:
    reply = init_reply()
    relay.patch_init_reply(reply, relay.Offer(True, resend), passthrough=passthrough)
    fields = struct.unpack_from("<IIIIHHIIHHII", reply, 16)
    flags, flags2 = fields[3], fields[10]
    assert fields[6] == 1 << 20
    assert fields[8] == 256
    assert flags & (1 << 16 | 1 << 12) == 0, "passthrough and our caching exclude these"
    assert flags & 1 << 28, "suid is ours to clear"
    assert bool(flags & 1 << 30) == (passthrough or resend)
    assert bool(flags2 & 1 << 5) == passthrough
    assert bool(flags2 & 1 << 7) == resend
    assert fields[11] == (1 if passthrough else 0)
    assert len(reply) == 80


@pytest.mark.parametrize(
    ("access", "backing_id", "flags"),
    [
        (0, 7, relay.FOPEN_PASSTHROUGH | relay.FOPEN_NOFLUSH),
        (1, 7, relay.FOPEN_PASSTHROUGH),
        (2, 7, relay.FOPEN_PASSTHROUGH),
        (0, 0, relay.FOPEN_KEEP_CACHE | relay.FOPEN_NOFLUSH),
        (1, 0, relay.FOPEN_DIRECT_IO),
        (2, 0, relay.FOPEN_KEEP_CACHE),
    ],
)
@pytest.mark.parametrize("opcode", [relay.OPEN, relay.CREATE])
def test_open_reply(opcode: int, access: int, backing_id: int, flags: int) -> None:
    before = 128 if opcode == relay.CREATE else 0
    reply = bytearray(16 + before + 16)
    wrong = relay.FOPEN_KEEP_CACHE | relay.FOPEN_NONSEEKABLE  # with which passthrough is EIO
    struct.pack_into("<QIi", reply, 16 + before, 1234, wrong, 0)
    parsed = relay.parse_open_reply(opcode, reply)
    assert parsed.fh == 1234
    relay.patch_open_reply(reply, parsed, access, backing_id)
    assert struct.unpack_from("<QIi", reply, 16 + before) == (1234, flags, backing_id)
    assert reply[: 16 + before] == bytes(16 + before)


def test_requests_are_numbered_for_the_worker() -> None:
    request = bytearray(64)
    relay.number_request(request, 0x1234_5678_9ABC)
    assert struct.unpack_from("<I", request, 32)[0] == (0x1234_5678_9ABC >> 1) & 0x7FFFFFFF
    relay.number_request(request, 0x1234_5678_9ABC | 1 << 63)
    again = struct.unpack_from("<I", request, 32)[0]
    assert again == (0x1234_5678_9ABC >> 1) & 0x7FFFFFFF | 1 << 31


def test_tmpfile_becomes_a_create_of_a_nameless_file() -> None:
    request = bytearray(40 + 16) + b"#123\0"
    relay.REQUEST_HEADER.pack_into(request, 0, len(request), relay.TMPFILE, 8, 5)
    struct.pack_into("<IIII", request, 40, 2, 0o600, 0o22, 0)
    made = relay.tmpfile_as_create(request)
    assert relay.REQUEST_HEADER.unpack_from(made) == (len(made), relay.CREATE, 8, 5)
    assert struct.unpack_from("<IIII", made, 40) == (2, 0o600, 0o22, 0)
    assert made[56:] == b"/tmp\0"


def test_directory_reads_are_bounded() -> None:
    request = bytearray(80)
    for asked, given in ((4096, 4096), (1 << 20, relay.MAX_READDIR_BYTES)):
        struct.pack_into("<I", request, 56, asked)
        relay.bound_readdir(request)
        assert struct.unpack_from("<I", request, 56)[0] == given


def test_replies() -> None:
    assert relay.REPLY_HEADER.unpack(relay.error_reply(9, 5)) == (16, -5, 9)
    assert relay.REPLY_HEADER.unpack_from(relay.reply(9, b"abc")) == (19, 0, 9)
    assert relay.REPLY_HEADER.unpack(relay.resend_notification()) == (16, 7, 0)
