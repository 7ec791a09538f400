"""Where a directory tier keeps what S3 keeps as an object's ETag and metadata.

What it keeps true:
- A record speaks of a file only while the file has the size and time that the record names: somebody who writes to
  the file or puts another in its place has made a new object, without metadata. Copies that keep times and extended
  attributes (`cp -a`, `rsync -aX`) are the same object.
- It is in the extended attribute `user.ckptfs.meta`, or where those are not to be had in a file named after the key,
  below the hidden directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from typing import NamedTuple

HIDDEN = ".ckptfs-tier"
ATTRIBUTE = b"user.ckptfs.meta"
_NO_ATTRIBUTES = frozenset(
    (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM, errno.ENOSYS)
)
_NOT_THERE = frozenset((errno.ENODATA, errno.ENOTSUP, errno.ENOSYS, errno.EPERM))


class Record(NamedTuple):
    """What is known of one object. *mtimes_ns*: the file's, before and after a change of it; none for a directory."""

    etag: str
    meta: dict[str, str]
    size: int = 0
    mtimes_ns: tuple[int, ...] = ()

    def fits(self, found: os.stat_result) -> bool:
        """Whether it speaks of this file or directory."""
        if stat.S_ISDIR(found.st_mode):
            return not self.mtimes_ns
        return self.size == found.st_size and found.st_mtime_ns in self.mtimes_ns


class Records:
    """The records below *root*. *attributes*: whether to use extended attributes at all."""

    def __init__(self, root: bytes, *, attributes: bool = True) -> None:
        self._beside = os.path.join(root, HIDDEN.encode(), b"meta")
        self._attributes = attributes

    def save(self, target: int | bytes, key: str, record: Record) -> None:
        """Put it at *target* (a descriptor or path), which is or becomes the object *key*. Raises OSError."""
        data = json.dumps(record._asdict(), separators=(",", ":")).encode()
        if self._attributes:
            try:
                os.setxattr(target, ATTRIBUTE, data)
                return
            except OSError as error:
                if error.errno not in _NO_ATTRIBUTES:
                    raise
                with contextlib.suppress(OSError):  # one that was there would be believed
                    os.removexattr(target, ATTRIBUTE)
        for path in (
            os.path.dirname(self._beside),
            self._beside,
        ):  # makedirs gives its mode to the last alone
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        for mtime_ns in record.mtimes_ns or (None,):
            path = self._path(key, record.size, mtime_ns)
            temporary = path + b"." + secrets.token_hex(8).encode()
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def load(self, target: int | bytes, key: str, found: os.stat_result) -> Record | None:
        """The record of *target*, if there is one and it fits. Raises OSError."""
        data = None
        if self._attributes:
            try:
                data = os.getxattr(target, ATTRIBUTE)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
        if data is None:
            directory = stat.S_ISDIR(found.st_mode)
            mtime_ns = None if directory else found.st_mtime_ns
            try:
                with open(
                    self._path(key, 0 if directory else found.st_size, mtime_ns), "rb"
                ) as file:
                    data = file.read()
            except FileNotFoundError:
                return None
        record = _parsed(data)
        return record if record is not None and record.fits(found) else None

    def forget(self, key: str, size: int = 0, mtime_ns: int | None = None) -> None:
        """The version of a file of that size and time is gone, or (no time) the directory."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, size, mtime_ns))

    def strip(self, path: bytes) -> None:
        """Take the record of a directory away that stays."""
        try:
            os.removexattr(path, ATTRIBUTE)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise

    def _path(self, key: str, size: int, mtime_ns: int | None) -> bytes:
        name = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:40]
        version = "directory" if mtime_ns is None else f"{size:x}-{mtime_ns:x}"
        return os.path.join(self._beside, f"{name}-{version}".encode())


def _parsed(data: bytes) -> Record | None:
    try:
        fields = json.loads(data)
        meta = fields["meta"]
        if not all(isinstance(text, str) for text in (fields["etag"], *meta, *meta.values())):
            return None
        return Record(
            fields["etag"], dict(meta), int(fields["size"]), tuple(map(int, fields["mtimes_ns"]))
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
