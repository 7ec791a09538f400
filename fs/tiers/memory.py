"""A durable tier in this process's memory, for tests: it behaves as S3 does, and fails when told to.

What it keeps true:
- What is visible changes in one step, and each such step is in `history`, in order.
- Faults are decided by a `FaultPlan`, asked before and after the work of each call: an error before means that
  nothing happened, an error after that it happened and nobody was told.
- It refuses what S3 refuses (parts that are too small, keys and metadata that are too long), so that code which works
  here is not surprised there.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from fs.tiers.faults import Call, FaultPlan
from fs.tiers.sending import Sending
from fs.tiers.tier import (
    Body,
    Limits,
    ListedObject,
    Meta,
    ObjectInfo,
    Page,
    PendingUpload,
    TierBadBytes,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
    UploadedPart,
)

MAX_META_BYTES = 2048
LAST_CHARACTER = "\U0010ffff"  # no key below a prefix is greater than the prefix and this

T = TypeVar("T")


class Change(NamedTuple):
    """One step that a reader can see: "put", "complete", "copy" or "delete" (whose *etag* is empty)."""

    operation: str
    key: str
    etag: str


class _Object(NamedTuple):
    data: bytes
    meta: dict[str, str]
    etag: str
    modified_ns: int


class _Upload(NamedTuple):
    key: str
    meta: dict[str, str]
    started_ns: int
    parts: dict[int, _Object]


class MemoryTier:
    """Objects in a dictionary. *limits* and *page_size* may be set smaller, for tests of what is large."""

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        min_part_bytes: int = 5 << 20,
        page_size: int = 1000,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.limits = Limits(min_part_bytes, 10_000, 5 << 30, 5 << 30, 5 << 40, 1024)
        self.plan = plan or FaultPlan()
        self.page_size = page_size
        self.history: list[Change] = []
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls = itertools.count(1)
        self._objects: dict[str, _Object] = {}
        self._sorted: list[str] | None = []
        self._uploads: dict[str, _Upload] = {}

    def describe(self) -> str:
        """memory:."""
        return "memory:"

    def url(self, key: str) -> str:
        """memory:key."""
        return f"memory:{key}"

    def check(self) -> None:
        """Raise what the plan says."""
        self._around("check", "", lambda: None)

    # whole objects

    def put(self, key: str, body: Body | bytes, meta: Meta) -> str:
        """Make or replace an object: its ETag."""

        def work() -> str:
            data = _all_of(body)
            if len(data) > self.limits.max_put_bytes:
                raise TierRefused(f"{self.url(key)}: {len(data)} bytes are too many for one PUT")
            with self._lock:
                return self._set("put", key, data, meta, _md5(data))

        return self._around("put", key, work)

    def head(self, key: str) -> ObjectInfo:
        """What is known of an object. Raises TierObjectMissing."""
        return self._around("head", key, lambda: _info(key, self._get(key)))

    def delete(self, key: str) -> None:
        """Remove an object. One that is gone is no error."""

        def work() -> None:
            with self._lock:
                if self._objects.pop(key, None) is not None:
                    self._sorted = None
                    self.history.append(Change("delete", key, ""))

        self._around("delete", key, work)

    def read(self, key: str, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """A small object at once."""

        def work() -> tuple[bytes, ObjectInfo]:
            found = self._get(key)
            if len(found.data) > max_bytes:
                raise TierBadBytes(
                    f"{self.url(key)}: has {len(found.data)} bytes, {max_bytes} are allowed"
                )
            return found.data, _info(key, found)

        return self._around("read", key, work)

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill *buffer* with the object's bytes from *offset*."""

        def work() -> None:
            if not len(buffer):
                return
            found = self._get(key)
            if etag is not None and etag != found.etag:
                raise TierObjectChanged(
                    f"{self.url(key)}: it is {found.etag} now, no longer {etag}"
                )
            data = found.data[offset : offset + len(buffer)]
            if len(data) != len(buffer):
                raise TierBadBytes(
                    f"{self.url(key)}: {len(buffer)} bytes from {offset} wanted, it has {len(found.data)}"
                )
            buffer.cast("B")[:] = data

        self._around("read_into", key, work, buffer)

    # multipart uploads

    def start(self, key: str, meta: Meta) -> str:
        """Begin a multipart upload: its id."""

        def work() -> str:
            self._check(key, meta)
            with self._lock:
                upload_id = f"upload-{next(self._numbers)}"
                self._uploads[upload_id] = _Upload(key, dict(meta), self._now_ns(), {})
            return upload_id

        return self._around("start", key, work)

    def put_part(self, key: str, upload_id: str, number: int, body: Body | bytes) -> str:
        """Send part *number*: its ETag. Raises TierUploadMissing."""

        def work() -> str:
            data = _all_of(body)
            if not 1 <= number <= self.limits.max_parts:
                raise TierRefused(f"{self.url(key)}: there is no part {number}")
            with self._lock:
                etag = _md5(data)
                self._upload(key, upload_id).parts[number] = _Object(data, {}, etag, self._now_ns())
                return etag

        return self._around("put_part", key, work)

    def complete(self, key: str, upload_id: str, parts: list[tuple[int, str]]) -> str:
        """Make the object visible: its ETag. Raises TierUploadMissing."""

        def work() -> str:
            with self._lock:
                upload = self._upload(key, upload_id)
                found = [upload.parts.get(number) for number, _ in parts]
                numbers = [number for number, _ in parts]
                if numbers != sorted(set(numbers)) or not numbers:
                    raise TierUploadMissing(f"{self.url(key)}: the parts are not in order")
                chosen = [
                    part
                    for part, (_, etag) in zip(found, parts, strict=True)
                    if part is not None and part.etag == etag
                ]
                if len(chosen) != len(parts):
                    raise TierUploadMissing(f"{self.url(key)}: not all of these parts are there")
                if any(len(part.data) < self.limits.min_part_bytes for part in chosen[:-1]):
                    raise TierRefused(f"{self.url(key)}: a part is too small")
                etag = f"{_md5(''.join(part.etag for part in chosen).encode())}-{len(chosen)}"
                data = b"".join(part.data for part in chosen)
                del self._uploads[upload_id]
                return self._set("complete", key, data, upload.meta, etag)

        return self._around("complete", key, work)

    def abort(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload. One that is gone is no error."""

        def work() -> None:
            with self._lock:
                upload = self._uploads.get(upload_id)
                if upload is not None and upload.key == key:
                    del self._uploads[upload_id]

        self._around("abort", key, work)

    def uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """Multipart uploads that were begun below *prefix*."""

        def work() -> list[PendingUpload]:
            with self._lock:
                return sorted(
                    PendingUpload(upload.key, upload_id, upload.started_ns)
                    for upload_id, upload in self._uploads.items()
                    if upload.key.startswith(prefix)
                )

        yield from self._around("uploads", prefix, work)

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload. Raises TierUploadMissing."""

        def work() -> list[UploadedPart]:
            with self._lock:
                found = self._upload(key, upload_id).parts
                return [
                    UploadedPart(number, len(part.data), part.etag)
                    for number, part in sorted(found.items())
                ]

        return self._around("parts", key, work)

    def copy(self, source: str, key: str, meta: Meta, etag: str | None) -> str:
        """Copy within the tier, with new metadata: the ETag."""

        def work() -> str:
            with self._lock:
                found = self._get(source)
                if etag is not None and etag != found.etag:
                    raise TierObjectChanged(
                        f"{self.url(source)}: it is {found.etag} now, no longer {etag}"
                    )
                return self._set("copy", key, found.data, meta, found.etag)

        return self._around("copy", key, work)

    # listings

    def list(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
        """One page of the objects whose keys begin with *prefix*."""

        def work() -> Page:
            with self._lock:
                return self._page(prefix, deep, token)

        return self._around("list", prefix, work)

    def _page(self, prefix: str, deep: bool, token: str | None) -> Page:
        if self._sorted is None:
            self._sorted = sorted(self._objects)
        keys = self._sorted
        objects: list[ListedObject] = []
        prefixes: list[str] = []
        # a token is what a key must be greater than
        last = token if token is not None else ""
        position = max(bisect.bisect_left(keys, prefix), bisect.bisect_right(keys, last))
        while position < len(keys) and keys[position].startswith(prefix):
            if len(objects) + len(prefixes) == self.page_size:
                return Page(objects, prefixes, last)
            key = keys[position]
            slash = -1 if deep else key.find("/", len(prefix))
            if slash >= 0:
                prefixes.append(key[: slash + 1])
                last = key[: slash + 1] + LAST_CHARACTER
            else:
                found = self._objects[key]
                objects.append(ListedObject(key, len(found.data), found.etag, found.modified_ns))
                last = key
            position = bisect.bisect_right(keys, last)
        return Page(objects, prefixes, None)

    # common to all

    def _around(
        self, operation: str, key: str, work: Callable[[], T], buffer: memoryview | None = None
    ) -> T:
        call = Call(operation, key, next(self._calls))
        self.plan.before(call)
        result = work()
        self.plan.after(call, buffer)
        return result

    def _check(self, key: str, meta: Meta) -> None:
        if not key or len(key.encode(errors="surrogatepass")) > self.limits.max_key_bytes:
            raise TierRefused(f"{self.url(key)}: the key is empty or too long")
        text = "".join(itertools.chain.from_iterable(meta.items()))
        if not text.isascii() or len(text) > MAX_META_BYTES:
            raise TierRefused(f"{self.url(key)}: the metadata are not ASCII, or too long")

    def _set(self, operation: str, key: str, data: bytes, meta: Meta, etag: str) -> str:
        self._check(key, meta)
        if key not in self._objects:
            self._sorted = None
        self._objects[key] = _Object(data, dict(meta), etag, self._now_ns())
        self.history.append(Change(operation, key, etag))
        return etag

    def _get(self, key: str) -> _Object:
        found = self._objects.get(key)
        if found is None:
            raise TierObjectMissing(f"{self.url(key)}: there is no such object")
        return found

    def _upload(self, key: str, upload_id: str) -> _Upload:
        found = self._uploads.get(upload_id)
        if found is None or found.key != key:
            raise TierUploadMissing(f"{self.url(key)}: there is no upload {upload_id}")
        return found


def _info(key: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(found.data), found.etag, found.modified_ns, dict(found.meta))


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _all_of(body: Body | bytes) -> bytes:
    sending = Sending(body)
    return b"".join(iter(sending.read, b""))
