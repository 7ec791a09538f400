"""Small texts of S3's protocol. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote, unquote_plus

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# What XML 1.0 cannot hold: control characters but \t \n \r, and U+FFFE, U+FFFF; as they are or as references.
_NOT_XML = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]"
    rb"|&#(?:x0*(?:[0-8bcef]|1[0-9a-f]|fff[ef])|0*(?:[0-8]|1[124-9]|2[0-9]|3[01]|6553[45]));",
    re.IGNORECASE,
)

# How far encoders go differs; none leaves these.
_NEVER_ENCODED = re.compile(r"[^\x21-\x7e]|[\"<>#?&=]")


def etag_text(etag: str) -> str:
    """An ETag without quotes and without the mark of a weak one."""
    return etag.removeprefix("W/").strip('"')


def content_range(header: str | None, content_length: int | None) -> tuple[int, int]:
    """(first byte, how many) that an answer carries. Without the header it is the whole object."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None:
        return 0, -1 if content_length is None else content_length
    first, last = int(match[1]), int(match[2])
    length = last - first + 1
    # the two must agree
    return first, length if content_length in (None, length) else -1


def clean_xml(body: bytes) -> bytes:
    """*body* with something else for what makes XML unreadable."""
    try:
        body.decode()
    except (
        UnicodeDecodeError
    ):  # Ceph 16 does not end long texts, and gives what lies behind them in memory
        body = body.decode(errors="replace").encode()
    return _NOT_XML.sub(b"?", body)


def key_decoder(declared: bool, keys: Sequence[str]) -> Callable[[str], str]:
    """How to read *keys*, which were asked to come URL-encoded. *declared*: the answer says that they are.

    Ceph encodes and does not say so. Others may not know the option: a key with characters that no encoder leaves
    gives them away.
    """
    if declared:
        return unquote_plus
    return str if any(_NEVER_ENCODED.search(key) for key in keys) else unquote
