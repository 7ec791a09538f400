"""Objects in S3, or in a store that speaks as S3 does.

What it keeps true:
- What is read is of the version that was asked for, and all of it, whether or not the store honours If-Match.
- Keys are what comes after the tier's prefix, "/" included; whatever lies beside it is never shown or touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from fs.tiers.options import S3Options
from fs.tiers.s3client import S3Client
from fs.tiers.s3listing import S3Listing, nanoseconds, upload_call
from fs.tiers.s3text import content_range, etag_text
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

log = logging.getLogger("ckptfs.tier")

LIMITS = Limits(
    min_part_bytes=5 << 20,
    max_parts=10_000,
    max_put_bytes=5 << 30,
    max_copy_bytes=5 << 30,
    max_object_bytes=5 << 40,
    max_key_bytes=1024,
)
COPY_PART_BYTES = 512 << 20
COPY_THREADS = 8


class S3Tier:
    """One bucket and prefix. Raises TierRefused when boto3's settings make no sense (no such profile)."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._client = S3Client(bucket, self.url(""), options)
        self._listing = S3Listing(self._client, self._prefix, self.url(""))
        self.limits = LIMITS._replace(
            max_key_bytes=LIMITS.max_key_bytes - len(self._prefix.encode())
        )
        self.copy_part_bytes = COPY_PART_BYTES
        self._extra = {
            name: value
            for name, value in (
                ("ServerSideEncryption", options.sse),
                ("SSEKMSKeyId", options.sse_kms_key_id),
                ("StorageClass", options.storage_class),
            )
            if value
        }

    @property
    def page_size(self) -> int:
        """How many entries a page of a listing has, at most."""
        return self._listing.page_size

    @page_size.setter
    def page_size(self, count: int) -> None:
        self._listing.page_size = count

    def describe(self) -> str:
        """s3://bucket/prefix."""
        return self.url("").rstrip("/")

    def url(self, key: str) -> str:
        """s3://bucket/prefix/key."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def check(self) -> None:
        """Raise unless the bucket is there and may be listed."""
        self._client.call("listing", "list_objects_v2", "", Prefix=self._prefix, MaxKeys=1)

    # whole objects

    def put(self, key: str, body: Body | bytes, meta: Meta) -> str:
        """Make or replace an object: its ETag."""
        answer = self._client.call(
            "storing",
            "put_object",
            key,
            Key=self._prefix + key,
            Body=_sent(body),
            Metadata=dict(meta),
            **self._extra,
        )
        return self._etag(key, answer)

    def head(self, key: str) -> ObjectInfo:
        """What is known of an object. Raises TierObjectMissing."""
        return self._info(
            key, self._client.call("asking for", "head_object", key, Key=self._prefix + key)
        )

    def delete(self, key: str) -> None:
        """Remove an object. One that is gone is no error."""
        try:
            self._client.call("deleting", "delete_object", key, Key=self._prefix + key)
        except TierObjectMissing:
            return

    def read(self, key: str, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """A small object at once."""
        answer = self._client.call("reading", "get_object", key, Key=self._prefix + key)
        info = self._info(key, answer)
        data = bytearray(info.size if info.size <= max_bytes else 0)
        with closing(answer["Body"]):
            if info.size > max_bytes:
                raise TierBadBytes(
                    f"reading {self.url(key)}: it has {info.size} bytes, {max_bytes} are allowed"
                )
            self._client.receive(key, answer["Body"], memoryview(data))
        return bytes(data), info

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill *buffer* with the object's bytes from *offset*."""
        view = buffer.cast("B")
        if not len(view):
            return
        parameters = {} if etag is None else {"IfMatch": f'"{etag}"'}
        answer = self._client.call(
            "reading",
            "get_object",
            key,
            Key=self._prefix + key,
            Range=f"bytes={offset}-{offset + len(view) - 1}",
            **parameters,
        )
        with closing(answer["Body"]):
            found = etag_text(answer.get("ETag", ""))
            if etag is not None and found != etag:
                raise TierObjectChanged(
                    f"reading {self.url(key)}: it is {found or 'without ETag'} now, no longer {etag}"
                )
            start, length = content_range(answer.get("ContentRange"), answer.get("ContentLength"))
            if (start, length) != (offset, len(view)):
                raise TierBadBytes(
                    f"reading {self.url(key)}: asked for {len(view)} bytes from {offset},"
                    f" the store sends {length} from {start}"
                )
            self._client.receive(key, answer["Body"], view)

    def _etag(self, key: str, answer: Any) -> str:
        etag = etag_text(answer.get("ETag", ""))
        if not etag:
            raise TierError(f"{self.url(key)}: the store's answer names no ETag")
        return etag

    def _info(self, key: str, answer: Any) -> ObjectInfo:
        if "ContentLength" not in answer:
            raise TierError(f"{self.url(key)}: the store's answer names no length")
        return ObjectInfo(
            key=key,
            size=answer["ContentLength"],
            etag=etag_text(answer.get("ETag", "")),
            modified_ns=nanoseconds(answer.get("LastModified")) or 0,
            meta=dict(answer.get("Metadata", {})),
        )

    # multipart uploads

    def start(self, key: str, meta: Meta) -> str:
        """Begin a multipart upload: its id."""
        answer = self._client.call(
            "beginning the upload of",
            "create_multipart_upload",
            key,
            Key=self._prefix + key,
            Metadata=dict(meta),
            **self._extra,
        )
        if not answer.get("UploadId"):
            raise TierError(f"{self.url(key)}: the store's answer names no UploadId")
        return str(answer["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, body: Body | bytes) -> str:
        """Send part *number*: its ETag."""
        answer = upload_call(
            self._client,
            f"sending part {number} of",
            "upload_part",
            key,
            Key=self._prefix + key,
            UploadId=upload_id,
            PartNumber=number,
            Body=_sent(body),
        )
        return self._etag(key, answer)

    def complete(self, key: str, upload_id: str, parts: list[tuple[int, str]]) -> str:
        """Make the object visible: its ETag."""
        try:
            answer = upload_call(
                self._client,
                "completing the upload of",
                "complete_multipart_upload",
                key,
                Key=self._prefix + key,
                UploadId=upload_id,
                MultipartUpload={
                    "Parts": [{"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in parts]
                },
            )
        except TierRefused:
            raise
        except TierError as error:
            if type(error) is TierError:
                # Ceph answers 500 for ever when the upload is gone: for example completed, and the answer was lost
                self.parts(key, upload_id)
            raise
        # Ceph 16 leaves the ETag empty
        return etag_text(answer.get("ETag", "")) or self.head(key).etag

    def abort(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload. One that is gone is no error."""
        try:
            upload_call(
                self._client,
                "aborting the upload of",
                "abort_multipart_upload",
                key,
                Key=self._prefix + key,
                UploadId=upload_id,
            )
        except TierUploadMissing:
            return

    def uploads(self, prefix: str = "") -> Iterator[PendingUpload]:
        """Multipart uploads that were begun below *prefix*."""
        return self._listing.uploads(prefix)

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload."""
        return self._listing.parts(key, upload_id)

    # copies

    def copy(self, source: str, key: str, meta: Meta, etag: str | None) -> str:
        """Copy within the tier, with new metadata: the ETag."""
        info = self.head(source)
        if etag is not None and info.etag != etag:
            raise TierObjectChanged(
                f"copying {self.url(source)}: it is {info.etag} now, no longer {etag}"
            )
        if info.size > self.limits.max_copy_bytes:
            return self._copy_in_parts(info, key, meta)
        answer = self._client.call(
            f"copying {source} to",
            "copy_object",
            key,
            Key=self._prefix + key,
            CopySource=self._source(source),
            CopySourceIfMatch=f'"{info.etag}"',
            MetadataDirective="REPLACE",
            Metadata=dict(meta),
            **self._extra,
        )
        return self._etag(key, answer.get("CopyObjectResult", {}))

    def _source(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _copy_in_parts(self, info: ObjectInfo, key: str, meta: Meta) -> str:
        part_bytes = max(self.copy_part_bytes, -(-info.size // self.limits.max_parts))
        upload_id = self.start(key, meta)

        def copy_part(number: int) -> tuple[int, str]:
            first = (number - 1) * part_bytes
            answer = upload_call(
                self._client,
                f"copying part {number} of {info.key} to",
                "upload_part_copy",
                key,
                Key=self._prefix + key,
                UploadId=upload_id,
                PartNumber=number,
                CopySource=self._source(info.key),
                CopySourceIfMatch=f'"{info.etag}"',
                CopySourceRange=f"bytes={first}-{min(first + part_bytes, info.size) - 1}",
            )
            return number, self._etag(key, answer.get("CopyPartResult", {}))

        numbers = range(1, -(-info.size // part_bytes) + 1)
        pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="ckptfs-copy")
        try:
            return self.complete(key, upload_id, list(pool.map(copy_part, numbers)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            try:
                self.abort(key, upload_id)
            except TierError as error:
                log.warning("%s; its parts stay in the bucket", error)
            raise
        finally:
            pool.shutdown()

    def list(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
        """One page of the objects whose keys begin with *prefix*."""
        return self._listing.page(prefix, deep=deep, token=token)


def _sent(body: Body | bytes) -> Sending | bytes:
    sending = Sending(body)
    return sending if len(sending) else b""
