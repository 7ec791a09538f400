"""How a file is written as an object: its key, and what rides in the object's metadata. Pure.

What it keeps true:
- The key is the path, so that any reader finds a file by its name. Bytes that are no UTF-8 become private-use
  characters (U+F780 to U+F7FF for 0x80 to 0xFF), one to one and back; a name that holds such characters itself has
  their bytes written so, so that no two names share a key.
- Metadata come from others too: what is missing or makes no sense is left out, never guessed into an error.

The metadata fit into the 2 KiB that S3 allows: at most `MAX_BLOCKS` digests of 16 bytes.
"""

from __future__ import annotations

import base64
import binascii
import stat
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from fs.checksums import DIGEST_BYTES, Digests
from fs.types import Attr

MAX_KEY_BYTES = 1024
PREFIX = "ckptfs-"
_PRIVATE = 0xF700
TARGET_IN_META_BYTES = 512  # longer symlink targets lie in the body alone

FILE, DIRECTORY, SYMLINK = "file", "directory", "symlink"
_KIND_MODES = {FILE: stat.S_IFREG, DIRECTORY: stat.S_IFDIR, SYMLINK: stat.S_IFLNK}


def key_part(name: bytes) -> str:
    """One name of a path, as a part of a key."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = name.decode(errors="surrogateescape")
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape
        return chr(_PRIVATE + (code & 0xFF))
    if _PRIVATE + 0x80 <= code <= _PRIVATE + 0xFF:
        return "".join(chr(_PRIVATE + byte) for byte in character.encode())
    return character


def name_of_part(part: str) -> bytes:
    """The name that a key's part stands for; the inverse of `key_part`."""
    pieces = []
    for character in part:
        code = ord(character)
        if _PRIVATE + 0x80 <= code <= _PRIVATE + 0xFF:
            pieces.append(bytes([code & 0xFF]))
        else:
            pieces.append(character.encode(errors="surrogatepass"))
    return b"".join(pieces)


def is_usable_part(part: str) -> bool:
    """Whether a key's part can be a name in a directory."""
    name = name_of_part(part)
    return name not in (b"", b".", b"..") and b"\0" not in name and len(name) <= 255


def key_bytes(key: str) -> int:
    """The key's length as the tier counts it."""
    return len(key.encode(errors="surrogatepass"))


class ObjectMeta(NamedTuple):
    """What an object's metadata say of the file; None where they say nothing."""

    kind: str | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    generation: int | None = None
    target: bytes | None = None
    digests: Digests | None = None


def metadata_of(attr: Attr, digests: Digests | None, target: bytes | None = None) -> dict[str, str]:
    """The metadata of the object that holds a file, directory or symlink."""
    kind = {v: k for k, v in _KIND_MODES.items()}[stat.S_IFMT(attr.mode)]
    meta = {
        "kind": kind,
        "mode": f"{stat.S_IMODE(attr.mode):04o}",
        "uid": str(attr.uid),
        "gid": str(attr.gid),
        "mtime-ns": str(attr.mtime_ns),
        "generation": str(attr.generation),
    }
    if target is not None and len(target) <= TARGET_IN_META_BYTES:
        meta["target"] = quote(target, safe="/")
    if digests is not None:
        meta["xxh3-128"] = digests.whole.hex()
        meta["size"] = str(digests.size)
        meta["block-bytes"] = str(digests.block_bytes)
        meta["blocks"] = base64.b64encode(digests.blocks).decode()
    return {PREFIX + name: value for name, value in meta.items()}


def parse_metadata(meta: dict[str, str], size: int) -> ObjectMeta:
    """What an object of *size* bytes with these metadata is. Digests that do not fit *size* are left out."""
    fields = {
        name.lower().removeprefix(PREFIX): value
        for name, value in meta.items()
        if name.lower().startswith(PREFIX)
    }
    kind = fields.get("kind")
    target = fields.get("target")
    mode = _number(fields.get("mode"), 8)
    return ObjectMeta(
        kind=kind if kind in _KIND_MODES else None,
        mode=None if mode is None else mode & 0o7777,
        uid=_number(fields.get("uid")),
        gid=_number(fields.get("gid")),
        mtime_ns=_number(fields.get("mtime-ns")),
        generation=_number(fields.get("generation")),
        target=None if target is None else unquote_to_bytes(target),
        digests=_digests(fields, size),
    )


def mode_of(kind: str) -> int:
    """The file type bits of a kind."""
    return _KIND_MODES[kind]


def _number(text: str | None, base: int = 10) -> int | None:
    if text is None or not text.isascii() or len(text) > 20:
        return None
    try:
        number = int(text, base)
    except ValueError:
        return None
    return number if 0 <= number < 1 << 63 else None


def _digests(fields: dict[str, str], size: int) -> Digests | None:
    block_bytes = _number(fields.get("block-bytes"))
    if _number(fields.get("size")) != size or not block_bytes:
        return None
    try:
        whole = bytes.fromhex(fields.get("xxh3-128", ""))
        blocks = base64.b64decode(fields.get("blocks", ""), validate=True)
    except (ValueError, binascii.Error):
        return None
    count = -(-size // block_bytes)
    if len(whole) != DIGEST_BYTES or len(blocks) != count * DIGEST_BYTES:
        return None
    return Digests(size, whole, block_bytes, blocks)
