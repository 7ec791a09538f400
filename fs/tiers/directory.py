"""A durable tier in a directory, on a local or shared disk: plain files under the same relative paths.

What it keeps true:
- A file appears whole: it is written under a hidden name, synced, and renamed into place; what is in place is never
  written to. A reader that has opened it goes on reading the version it opened.
- Names are those that the filesystem had, bytes that are no UTF-8 included; modes, owners and times too. ETag and
  metadata lie with the file (fs.tiers.dirmeta), and do not outlive it.
- A directory counts as an object when it was stored as one. Others come and go with what is in them.
- The directory that was there at first is the one that is used: when a disk is unmounted from under it, nothing is
  written to what lies beneath, and nothing is said to be missing.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from fs.tiers.dirfiles import PATH_MAX_BYTES, Files, os_error
from fs.tiers.dirlist import Listing
from fs.tiers.dirmeta import Record, Records
from fs.tiers.dirparts import Uploads, copy_range, write_all
from fs.tiers.sending import Sending
from fs.tiers.tier import (
    Body,
    Limits,
    Meta,
    ObjectInfo,
    Page,
    PendingUpload,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
    UploadedPart,
)

UNLIMITED_BYTES = (1 << 63) - 1


class DirectoryTier:
    """The directory *path* (absolute), which has to exist. *attributes*: whether to use extended attributes."""

    def __init__(self, path: str, *, attributes: bool = True) -> None:
        self._root = os.fsencode(path.rstrip("/"))
        records = Records(self._root, attributes=attributes)
        self._files = Files(self._root, records)
        self._temporary = self._files.temporary
        self._uploads = Uploads(os.path.join(self._files.hidden, b"uploads"), self._temporary)
        self._listing = Listing(self._root, records)
        self.limits = Limits(
            min_part_bytes=1,
            max_parts=10_000,
            max_put_bytes=UNLIMITED_BYTES,
            max_copy_bytes=UNLIMITED_BYTES,
            max_object_bytes=UNLIMITED_BYTES,
            max_key_bytes=min(PATH_MAX_BYTES - len(self._root) - 1, 4000),
        )
        with contextlib.suppress(TierRefused):
            self._files.check_root()

    @property
    def page_size(self) -> int:
        """How many entries a page of a listing has."""
        return self._listing.page_size

    @page_size.setter
    def page_size(self, count: int) -> None:
        self._listing.page_size = count

    def describe(self) -> str:
        """file:///dir."""
        return "file://" + os.fsdecode(self._root)

    def url(self, key: str) -> str:
        """file:///dir/key."""
        return f"{self.describe()}/{key}"

    def check(self) -> None:
        """Raise unless the directory is there and may be listed; clear up what crashes have left long ago."""
        with self._telling("opening", ""):
            os.listdir(self._root)
            self._files.sweep()

    # whole objects

    def put(self, key: str, body: Body | bytes, meta: Meta) -> str:
        """Make or replace an object: its ETag."""
        with self._telling("storing", key):
            if key.endswith("/"):
                return self._files.put_directory(key, len(body), meta)
            fd, temporary = self._files.new_file()
            try:
                write_all(fd, Sending(body), 0)
                return self._files.place(fd, temporary, key, meta)
            finally:
                os.close(fd)
                _remove(temporary)

    def head(self, key: str) -> ObjectInfo:
        """What is known of an object. Raises TierObjectMissing."""
        with self._telling("asking for", key):
            fd, found, record = self._files.open(key)
            os.close(fd)
            return _info(key, found, record)

    def read(self, key: str, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """A small object at once."""
        with self._telling("reading", key):
            fd, found, record = self._files.open(key)
            try:
                info = _info(key, found, record)
                if info.size > max_bytes:
                    raise TierBadBytes(f"it has {info.size} bytes, {max_bytes} are allowed")
                data = bytearray(info.size)
                _fill(fd, 0, memoryview(data))
                return bytes(data), info
            finally:
                os.close(fd)

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill *buffer* with the object's bytes from *offset*."""
        if not len(buffer):
            return
        with self._telling("reading", key):
            fd, found, record = self._files.open(key)
            try:
                _expect(_info(key, found, record).etag, etag)
                _fill(fd, offset, buffer.cast("B"))
            finally:
                os.close(fd)

    def delete(self, key: str) -> None:
        """Remove an object. One that is gone is no error."""
        with self._telling("deleting", key):
            self._files.delete(key)

    def copy(self, source: str, key: str, meta: Meta, etag: str | None) -> str:
        """Copy within the tier, with new metadata: the ETag."""
        with self._telling("copying", source):
            fd, found, record = self._files.open(source)
            try:
                info = _info(source, found, record)
                _expect(info.etag, etag)
                if key.endswith("/"):
                    return self._files.put_directory(key, info.size, meta)
                if key == source:
                    self._files.seal_again(fd, key, meta, info.etag)
                    return info.etag
                target, temporary = self._files.new_file()
                try:
                    copy_range(fd, 0, info.size, target)
                    return self._files.place(target, temporary, key, meta)
                finally:
                    os.close(target)
                    _remove(temporary)
            finally:
                os.close(fd)

    # multipart uploads

    def start(self, key: str, meta: Meta) -> str:
        """Begin a multipart upload: its id."""
        with self._telling("beginning the upload of", key):
            self._files.path(key)
            self._files.make_hidden()
            return self._uploads.start(key, meta)

    def put_part(self, key: str, upload_id: str, number: int, body: Body | bytes) -> str:
        """Send part *number*: its ETag."""
        with self._telling(f"storing part {number} of", key, upload_id):
            return self._uploads.put_part(key, upload_id, number, body)

    def complete(self, key: str, upload_id: str, parts: list[tuple[int, str]]) -> str:
        """Make the object visible: its ETag."""
        with self._telling("completing the upload of", key, upload_id):
            joined, meta = self._uploads.joined(key, upload_id, parts)
            fd = os.open(joined, os.O_RDWR | os.O_CLOEXEC)
            try:
                etag = self._files.place(fd, joined, key, meta)
            finally:
                os.close(fd)
                if os.path.dirname(joined) == self._temporary:
                    _remove(joined)
            self._uploads.remove(key, upload_id)
            return etag

    def abort(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload. One that is gone is no error."""
        with self._telling("aborting the upload of", key):
            self._files.make_hidden()
            self._uploads.remove(key, upload_id)

    def uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """Multipart uploads that were begun below *prefix*."""
        with self._telling("listing the uploads below", prefix):
            pending = self._uploads.pending(prefix)
        yield from pending

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload."""
        with self._telling("listing the parts of", key, upload_id):
            return self._uploads.parts(key, upload_id)

    def list(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
        """One page of the objects whose keys begin with *prefix*."""
        with self._telling("listing", prefix):
            self._files.path(prefix or "/")
            return self._listing.page(prefix, deep=deep, token=token)

    # errors

    @contextlib.contextmanager
    def _telling(self, what: str, key: str, upload_id: str = "") -> Iterator[None]:
        """Errors as the tier's, with what was done to which object."""
        at = f"{what} {self.url(key)}"
        try:
            self._files.check_root()
            yield
        except FileNotFoundError as error:
            self._files.check_root()
            if upload_id:
                raise TierUploadMissing(f"{at}: the upload {upload_id} is gone") from error
            raise os_error(error, at) from error
        except (TierObjectMissing, TierObjectChanged) as error:
            self._files.check_root()
            raise type(error)(f"{at}: {error}") from error.__cause__
        except TierError as error:
            raise type(error)(f"{at}: {error}") from error.__cause__
        except EOFError as error:
            raise TierBadBytes(f"{at}: {error}") from error
        except OSError as error:
            raise os_error(error, at) from error


def _info(key: str, found: os.stat_result, record: Record | None) -> ObjectInfo:
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    etag = f"{size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}" if record is None else record.etag
    meta = {} if record is None else record.meta
    return ObjectInfo(key, size, etag, found.st_mtime_ns, meta)


def _expect(found: str, wanted: str | None) -> None:
    if wanted is not None and found != wanted:
        raise TierObjectChanged(f"it is {found} now, no longer {wanted}")


def _fill(fd: int, offset: int, view: memoryview) -> None:
    position = 0
    while position < len(view):
        count = os.preadv(fd, [view[position:]], offset + position)
        if not count:
            raise TierBadBytes(
                f"{len(view)} bytes from {offset} were wanted, it ends at {offset + position}"
            )
        position += count


def _remove(path: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
