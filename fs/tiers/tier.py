"""What the filesystem asks of a durable tier: plain objects under keys, and nothing above them.

What it keeps true:
- Every call is synchronous, may take long, may be made from any thread, and may be made again: a call that
  failed may or may not have happened, and repeating it gives what the first would have given.
- An object becomes visible whole, at the return of `put`, `complete` or `copy`, or not at all.
- A failure says which kind it is. Whether the tier can be reached is never told as "not there".

Keys are text: the file's path relative to the mount, "/" between its parts (fs.objects says how bytes that
are no UTF-8 are written). A key that ends in "/" stands for a directory. Metadata are ASCII names and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from fs.errors import CkptfsError

Meta = Mapping[str, str]
Buffer = bytes | bytearray | memoryview


class TierError(CkptfsError):
    """A call failed in a way that may pass: network, 5xx, SlowDown, credentials that expired, clock skew."""


class TierRefused(TierError):
    """A call failed in a way that will not pass by itself: access denied, no such bucket, no such directory."""


class TierObjectMissing(TierError):
    """The tier answered, and there is no such object."""


class TierUploadMissing(TierError):
    """The tier answered, and there is no such multipart upload (completed, aborted or swept away)."""


class TierObjectChanged(TierError):
    """The object is there, but no longer the version that was asked for."""


class TierBadBytes(TierError):
    """Fewer, more or other bytes came or went than were announced."""


class ObjectInfo(NamedTuple):
    """One object, as `head` knows it. Times in ns since the epoch; *etag* without quotes."""

    key: str
    size: int
    etag: str
    modified_ns: int
    meta: dict[str, str]


class ListedObject(NamedTuple):
    """One object, as a listing knows it: no metadata."""

    key: str
    size: int
    etag: str
    modified_ns: int


class Page(NamedTuple):
    """One page of a listing. *prefixes*: what lies deeper, once each, ending in "/"."""

    objects: list[ListedObject]
    prefixes: list[str]
    next_token: str | None


class PendingUpload(NamedTuple):
    """A multipart upload that was begun. *started_ns* is None when the tier does not say."""

    key: str
    upload_id: str
    started_ns: int | None


class UploadedPart(NamedTuple):
    """One part that the tier holds of a multipart upload; numbers begin at 1."""

    number: int
    size: int
    etag: str


class Body(Protocol):
    """Bytes to send: read once from the start, or again after `seek(0)` when an attempt failed."""

    def read(self, size: int = -1, /) -> bytes | memoryview: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...

    def __len__(self) -> int: ...


class Limits(NamedTuple):
    """What the tier can take, in bytes and counts."""

    min_part_bytes: int
    max_parts: int
    max_put_bytes: int
    max_copy_bytes: int
    max_object_bytes: int
    max_key_bytes: int


class Tier(Protocol):
    """One bucket and prefix, or one directory. Every method raises TierError or one of its kinds."""

    limits: Limits

    def describe(self) -> str:
        """How a person names it: s3://bucket/prefix or file:///dir. No secrets."""
        ...

    def url(self, key: str) -> str:
        """How a person names one object."""
        ...

    def check(self) -> None:
        """Raise unless the tier is there and may be listed. Asked at mount."""
        ...

    def put(self, key: str, body: Body | bytes, meta: Meta) -> str:
        """Make or replace an object: its ETag. Visible at the return, whole."""
        ...

    def start(self, key: str, meta: Meta) -> str:
        """Begin a multipart upload: its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, body: Body | bytes) -> str:
        """Send part *number* (from 1): its ETag. Raises TierUploadMissing."""
        ...

    def complete(self, key: str, upload_id: str, parts: list[tuple[int, str]]) -> str:
        """Make the object of (number, ETag) pairs visible: its ETag. Raises TierUploadMissing."""
        ...

    def abort(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload. One that is gone is no error."""
        ...

    def uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """Multipart uploads that were begun below *prefix*; entries with missing fields are left out."""
        ...

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload. Raises TierUploadMissing."""
        ...

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill *buffer* with the object's bytes from *offset*.

        Raises TierObjectMissing, TierObjectChanged (*etag* is given and not the object's), TierBadBytes.
        """
        ...

    def read(self, key: str, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """A small object at once: its bytes (TierBadBytes above *max_bytes*) and what is known of it."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """What is known of an object. Raises TierObjectMissing."""
        ...

    def list(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
        """One page of the objects whose keys begin with *prefix* ("" or ending in "/").

        Not *deep*: those directly below, and the prefixes of what lies deeper. Keys in order.
        """
        ...

    def copy(self, source: str, key: str, meta: Meta, etag: str | None) -> str:
        """Copy within the tier, with new metadata, also onto itself and above `max_copy_bytes`: the ETag.

        Raises TierObjectMissing, TierObjectChanged.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object. One that is gone is no error."""
        ...
