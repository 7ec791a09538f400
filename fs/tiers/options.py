"""How to talk to an S3 endpoint: the options a person may give, each checked once, here.

What it keeps true: an S3Options that exists is valid. An option left empty is boto3's own to find (environment,
~/.aws/config, instance metadata), and so are the credentials, which are never given here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from fs.errors import CkptfsError

ADDRESSING_STYLES = ("auto", "path", "virtual")
SSE_KINDS = ("", "AES256", "aws:kms", "aws:kms:dsse")
CHECKSUM_MODES = ("when_required", "when_supported")
MAX_TIMEOUT_S = 3600.0
MAX_CONNECTIONS = 512


class BadTierSetting(CkptfsError, ValueError):
    """A tier's URL or option that cannot be used: which, and what is allowed."""


class S3Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `s3://` tiers. Times in seconds. Raises BadTierSetting (a ValueError) when made of bad values.

    *endpoint_url*, *region*, *profile*, *ca_bundle*: as boto3 understands them; empty means boto3's default.
    *request_checksum_calculation*, *response_checksum_validation*: "when_required" works with every store; with
    "when_supported" bodies carry a CRC besides, which some S3-compatible stores refuse.
    *connect_timeout_s* is also how long one piece (128 KiB to 1 MiB) may take to be sent.
    *max_connections* are kept open; more calls at once than that still work, each with a connection of its own.
    """

    endpoint_url: str = ""
    region: str = ""
    profile: str = ""
    ca_bundle: str = ""
    addressing_style: str = "auto"
    sse: str = ""
    sse_kms_key_id: str = ""
    storage_class: str = ""
    request_checksum_calculation: str = "when_required"
    response_checksum_validation: str = "when_required"
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 32

    def __post_init__(self) -> None:
        self._check_endpoint()
        _one_of("addressing_style", self.addressing_style, ADDRESSING_STYLES)
        _one_of("sse", self.sse, SSE_KINDS)
        for field in ("request_checksum_calculation", "response_checksum_validation"):
            _one_of(field, getattr(self, field), CHECKSUM_MODES)
        for field in ("region", "profile", "storage_class", "sse_kms_key_id", "ca_bundle"):
            if not getattr(self, field).isprintable():
                raise BadTierSetting(f"{field}: allowed are printable characters")
        if not re.fullmatch(r"[A-Za-z0-9-]*", self.region):
            raise BadTierSetting(f"region {self.region!r}: allowed are letters, digits and '-'")
        if not re.fullmatch(r"[A-Z0-9_]*", self.storage_class):
            raise BadTierSetting(
                f"storage_class {self.storage_class!r}: written in capitals, for example STANDARD_IA"
            )
        if self.sse_kms_key_id and not self.sse.startswith("aws:kms"):
            raise BadTierSetting(
                f"sse_kms_key_id is set, but sse is {self.sse!r}: set it to 'aws:kms'"
            )
        for field in ("connect_timeout_s", "read_timeout_s"):
            value = getattr(self, field)
            if not 0.1 <= value <= MAX_TIMEOUT_S:
                raise BadTierSetting(
                    f"{field} = {value}: allowed are 0.1 to {MAX_TIMEOUT_S:g} seconds"
                )
        if not 1 <= self.max_connections <= MAX_CONNECTIONS:
            raise BadTierSetting(
                f"max_connections = {self.max_connections}: allowed are 1 to {MAX_CONNECTIONS}"
            )

    def _check_endpoint(self) -> None:
        if not self.endpoint_url:
            return
        if "@" in self.endpoint_url:
            # not shown: what stands before the @ may be a password
            raise BadTierSetting(
                "endpoint_url: must not hold a user or password; boto3 finds credentials itself"
                " (environment, ~/.aws/credentials, instance role)"
            )
        if not re.fullmatch(r"https?://[^\s/?#]+/?", self.endpoint_url):
            raise BadTierSetting(
                f"endpoint_url {self.endpoint_url!r}: write http://HOST[:PORT] or https://HOST[:PORT]"
            )


def _one_of(field: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise BadTierSetting(f"{field} {value!r}: allowed are {shown}")
