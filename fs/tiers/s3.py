"""Objects in S3, or in a store that speaks as S3 does.

What it keeps true:
- What is read is of the version that was asked for, and all of it, whether or not the store honours If-Match.
- Keys are what comes after the tier's prefix, "/" included; whatever lies beside it is never shown or touched.
- A store that repeats itself is not asked for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from typing import Any

from fs.tiers.options import S3Options
from fs.tiers.s3client import CLEANED, S3Client
from fs.tiers.s3text import content_range, etag_text, key_decoder
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
LAST_CHARACTER = "\U0010ffff"  # no key below a prefix is greater than the prefix and this
AFTER = "\0after:"  # begins a token of our own: the key to go on behind
_NS = 1_000_000_000


class S3Tier:
    """One bucket and prefix. Raises TierRefused when boto3's settings make no sense (no such profile)."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._client = S3Client(bucket, self.url(""), options)
        self.limits = LIMITS._replace(
            max_key_bytes=LIMITS.max_key_bytes - len(self._prefix.encode())
        )
        self.copy_part_bytes = COPY_PART_BYTES
        self.page_size = 1000
        self._extra = {
            name: value
            for name, value in (
                ("ServerSideEncryption", options.sse),
                ("SSEKMSKeyId", options.sse_kms_key_id),
                ("StorageClass", options.storage_class),
            )
            if value
        }

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
        return ObjectInfo(
            key=key,
            size=answer["ContentLength"],
            etag=etag_text(answer.get("ETag", "")),
            modified_ns=_ns(answer.get("LastModified")) or 0,
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
        answer = self._upload_call(
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
            answer = self._upload_call(
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

    def _upload_call(self, what: str, operation: str, key: str, **parameters: Any) -> Any:
        try:
            return self._client.call(what, operation, key, **parameters)
        except TierObjectMissing as error:  # Ceph says NoSuchKey where S3 says NoSuchUpload
            raise TierUploadMissing(str(error)) from error

    def abort(self, key: str, upload_id: str) -> None:
        """Give up a multipart upload. One that is gone is no error."""
        try:
            self._upload_call(
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
        marker: dict[str, str] = {}
        seen: set[tuple[tuple[str, str], ...]] = set()
        while True:
            answer = self._client.call(
                "listing the uploads below",
                "list_multipart_uploads",
                prefix,
                Prefix=self._prefix + prefix,
                MaxUploads=self.page_size,
                EncodingType="url",
                **marker,
            )
            listed = [u for u in answer.get("Uploads", ()) if u.get("Key") and u.get("UploadId")]
            declared = answer.get("EncodingType") == "url"
            decoded = key_decoder(declared, [upload["Key"] for upload in listed])
            found = [(decoded(upload["Key"]), upload) for upload in listed]
            for key, upload in found:
                if self._is_below(key) and key.startswith(self._prefix + prefix):
                    yield PendingUpload(
                        key[len(self._prefix) :], upload["UploadId"], _ns(upload.get("Initiated"))
                    )
            if not answer.get("IsTruncated"):
                return
            marker = _next_marker(answer, found, decoded)
            # a store that says the same again would be asked for ever
            step = tuple(sorted(marker.items()))
            if not marker or step in seen:
                log.warning("listing the uploads of %s: the store repeats itself", self.describe())
                return
            seen.add(step)

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload."""
        found: dict[int, UploadedPart] = {}
        marker = 0
        while True:
            answer = self._upload_call(
                "listing the parts of",
                "list_parts",
                key,
                Key=self._prefix + key,
                UploadId=upload_id,
                PartNumberMarker=marker,
                MaxParts=self.page_size,
            )
            numbers = [marker]
            for part in answer.get("Parts", ()):
                if part.keys() >= {"PartNumber", "Size", "ETag"}:
                    number = part["PartNumber"]
                    numbers.append(number)
                    found[number] = UploadedPart(number, part["Size"], etag_text(part["ETag"]))
            if not answer.get("IsTruncated") or max(numbers) == marker:
                return [found[number] for number in sorted(found)]
            marker = max(numbers)

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
            answer = self._upload_call(
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

    # listings

    def list(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
        """One page of the objects whose keys begin with *prefix*."""
        parameters: dict[str, Any] = {} if deep else {"Delimiter": "/"}
        if token is not None and token.startswith(AFTER):
            parameters["StartAfter"] = token.removeprefix(AFTER)
        elif token is not None:
            parameters["ContinuationToken"] = token
        answer = self._client.call(
            "listing",
            "list_objects_v2",
            prefix,
            Prefix=self._prefix + prefix,
            MaxKeys=self.page_size,
            **parameters,
        )
        objects = [
            ListedObject(
                found["Key"][len(self._prefix) :],
                found["Size"],
                etag_text(found.get("ETag", "")),
                _ns(found.get("LastModified")) or 0,
            )
            for found in answer.get("Contents", ())
            if self._is_below(found.get("Key")) and "Size" in found
        ]
        prefixes = [
            found["Prefix"][len(self._prefix) :]
            for found in answer.get("CommonPrefixes", ())
            if self._is_below(found.get("Prefix"))
        ]
        if not answer.get("IsTruncated"):
            return Page(objects, prefixes, None)
        return Page(objects, prefixes, self._next_token(answer, prefix, token))

    def _next_token(self, answer: Any, prefix: str, token: str | None) -> str:
        following = answer.get("NextContinuationToken")
        if answer.get(CLEANED):
            # Ceph's token is the last key, and came in characters that XML cannot hold
            last = [found["Key"] for found in answer.get("Contents", ())]
            last += [found["Prefix"] + LAST_CHARACTER for found in answer.get("CommonPrefixes", ())]
            following = AFTER + max(last) if last else None
        if following in (None, "", token):
            raise TierError(
                f"listing {self.url(prefix)}: the store says there is more, but not where"
            )
        return str(following)

    def _is_below(self, key: str | None) -> bool:
        return key is not None and key.startswith(self._prefix) and len(key) > len(self._prefix)


def _sent(body: Body | bytes) -> Sending | bytes:
    sending = Sending(body)
    return sending if len(sending) else b""


def _ns(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp()) * _NS + moment.microsecond * 1000


def _next_marker(
    answer: Any, found: list[tuple[str, Any]], decoded: Callable[[str], str]
) -> dict[str, str]:
    # the last entry is where the page ended, in a form that needs no decoding
    if found:
        key, upload = found[-1]
        return {"KeyMarker": key, "UploadIdMarker": upload["UploadId"]}
    if not answer.get("NextKeyMarker"):
        return {}
    marker = {"KeyMarker": decoded(answer["NextKeyMarker"])}
    if answer.get("NextUploadIdMarker"):
        marker["UploadIdMarker"] = answer["NextUploadIdMarker"]
    return marker
