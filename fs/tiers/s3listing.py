"""Listings of a bucket below one prefix: objects, uploads, parts; page by page.

What it keeps true:
- Keys come back as they were stored, whatever XML can hold, and only those below the prefix.
- A store that repeats itself is not asked for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from fs.tiers.s3client import CLEANED, S3Client
from fs.tiers.s3text import etag_text, key_decoder
from fs.tiers.tier import (
    ListedObject,
    Page,
    PendingUpload,
    TierError,
    TierObjectMissing,
    TierUploadMissing,
    UploadedPart,
)

PAGE_SIZE = 1000
LAST_CHARACTER = "\U0010ffff"  # no key below a prefix is greater than the prefix and this
AFTER = "\0after:"  # begins a token of our own: the key to go on behind
_NS = 1_000_000_000


class S3Listing:
    """Of what *client* finds below *prefix* ("" or ending in "/"). *url*: how a person names that."""

    def __init__(self, client: S3Client, prefix: str, url: str) -> None:
        self._client = client
        self._prefix = prefix
        self._url = url
        self.page_size = PAGE_SIZE

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
                        key[len(self._prefix) :],
                        upload["UploadId"],
                        nanoseconds(upload.get("Initiated")),
                    )
            if not answer.get("IsTruncated"):
                return
            marker = _next_marker(answer, found, decoded)
            step = tuple(sorted(marker.items()))
            if not marker or step in seen:
                raise TierError(
                    f"listing the uploads below {self._url}{prefix}: the store repeats itself"
                )
            seen.add(step)

    def parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        """What is there of a multipart upload."""
        found: dict[int, UploadedPart] = {}
        marker = 0
        while True:
            answer = upload_call(
                self._client,
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

    def page(self, prefix: str, *, deep: bool = False, token: str | None = None) -> Page:
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
                nanoseconds(found.get("LastModified")) or 0,
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
                f"listing {self._url}{prefix}: the store says there is more, but not where"
            )
        return str(following)

    def _is_below(self, key: str | None) -> bool:
        return key is not None and key.startswith(self._prefix) and len(key) > len(self._prefix)


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


def nanoseconds(moment: datetime | None) -> int | None:
    """A time in an answer, in ns since the epoch."""
    return None if moment is None else int(moment.timestamp()) * _NS + moment.microsecond * 1000


def upload_call(client: S3Client, what: str, operation: str, key: str, **parameters: Any) -> Any:
    """A call on a multipart upload. Raises TierUploadMissing also where Ceph says NoSuchKey for that."""
    try:
        return client.call(what, operation, key, **parameters)
    except TierObjectMissing as error:
        raise TierUploadMissing(str(error)) from error
