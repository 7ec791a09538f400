"""A bucket as others see it, beside the proxy."""

from __future__ import annotations

import os
from typing import Any

from tests.rgw import Rgw

MIB = 1 << 20
DATA = os.urandom(MIB)
PART = os.urandom(5 * MIB)  # S3 takes no smaller ones, but the last
META = {"ckptfs-kind": "file"}
PREFIX = "ckpt"


class Store:
    """A bucket of its own; keys are those below PREFIX."""

    def __init__(self, rgw: Rgw) -> None:
        self.client = rgw.owner
        self.bucket = rgw.new_bucket()

    def put(self, key: str, data: bytes = DATA) -> str:
        """As any other tool: the ETag."""
        answer = self.client.put_object(
            Bucket=self.bucket, Key=f"{PREFIX}/{key}", Body=data, Metadata=META
        )
        return str(answer["ETag"]).strip('"')

    def get(self, key: str) -> bytes:
        """An object's bytes."""
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{PREFIX}/{key}")
        return bytes(answer["Body"].read())

    def keys(self) -> list[str]:
        """What is there, in order."""
        listed = self.client.list_objects_v2(Bucket=self.bucket)
        assert not listed["IsTruncated"]
        return [entry["Key"].removeprefix(f"{PREFIX}/") for entry in listed.get("Contents", [])]

    def objects(self) -> dict[str, bytes]:
        """All objects, by key."""
        return {key: self.get(key) for key in self.keys()}

    def markers(self) -> dict[str, bytes]:
        """All keys, with the bytes of those alone that name others."""
        naming = (".metadata", "latest")
        return {key: self.get(key) if key.endswith(naming) else b"" for key in self.keys()}

    def uploads(self) -> list[str]:
        """Keys of the multipart uploads that are under way."""
        return [upload["Key"].removeprefix(f"{PREFIX}/") for upload in self._uploads()]

    def begin(self, key: str) -> str:
        """A multipart upload of somebody else: its id."""
        answer = self.client.create_multipart_upload(Bucket=self.bucket, Key=f"{PREFIX}/{key}")
        return str(answer["UploadId"])

    def upload_ids(self) -> list[str]:
        """Ids of the multipart uploads that are under way."""
        return [upload["UploadId"] for upload in self._uploads()]

    def clear(self) -> None:
        """As at the beginning."""
        for upload in self._uploads():
            self.client.abort_multipart_upload(
                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        for key in self.keys():
            self.client.delete_object(Bucket=self.bucket, Key=f"{PREFIX}/{key}")

    def _uploads(self) -> list[Any]:
        return list(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))
