"""One call of each kind, and the bucket as others see it: what the tests of faults go through."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from fs.tiers.tier import Tier, TierUploadMissing
from tests import s3faults
from tests.s3.store import DATA, META, MIB, Store

SMALL_PART = os.urandom(MIB // 4)
# Of the calls that are to time out; all else gets as long as a busy machine may need.
SHORT_S = 0.4
EXPECT_S = 1.0  # botocore waits as long to be asked for a body


class Case(NamedTuple):
    """*call*: what is tried. *happened*: whether its effect is there; None for calls that only ask."""

    operation: str  # the request that fails
    call: Callable[[Tier], Any]
    expected: Any
    happened: Callable[[], bool] | None = None


ANY = object()
Maker = Callable[[Tier, Store], Case]


def put(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "put_object",
        lambda tier: tier.put("new", DATA, META),
        etag,
        lambda: store.objects().get("new") == DATA,
    )


def delete(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case(
        "delete_object", lambda tier: tier.delete("there"), None, lambda: not store.objects()
    )


def copy(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "copy_object",
        lambda tier: tier.copy("there", "new", META, etag),
        etag,
        lambda: store.objects().get("new") == DATA,
    )


def head(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case("head_object", lambda tier: tier.head("there").etag, etag)


def read(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case("get_object", lambda tier: tier.read("there", MIB)[0], DATA)


def read_into(tier: Tier, store: Store) -> Case:
    etag = store.put("there")
    return Case(
        "get_object", lambda tier: filled(tier, "there", 5, MIB - 9, etag), DATA[5 : MIB - 4]
    )


def list_page(tier: Tier, store: Store) -> Case:
    store.put("there")
    return Case(
        "list_objects_v2", lambda tier: [found.key for found in tier.list("").objects], ["there"]
    )


def check(tier: Tier, store: Store) -> Case:
    return Case("list_objects_v2", lambda tier: tier.check(), None)


def start(tier: Tier, store: Store) -> Case:
    return Case(
        "create_multipart_upload",
        lambda tier: tier.start("parts", META),
        ANY,
        lambda: bool(store.uploads()),
    )


def begun(tier: Tier) -> tuple[str, list[tuple[int, str]]]:
    upload = tier.start("parts", META)
    return upload, [(1, tier.put_part("parts", upload, 1, SMALL_PART))]


def put_part(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    store_etag = store.put("same", SMALL_PART)
    return Case(
        "upload_part", lambda tier: tier.put_part("parts", upload, 2, SMALL_PART), store_etag
    )


def parts(tier: Tier, store: Store) -> Case:
    upload, sent = begun(tier)
    return Case(
        "list_parts",
        lambda tier: [(part.number, part.etag) for part in tier.parts("parts", upload)],
        sent,
    )


def uploads(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    return Case(
        "list_multipart_uploads",
        lambda tier: [found.upload_id for found in tier.uploads("")],
        [upload],
    )


def abort(tier: Tier, store: Store) -> Case:
    upload, _ = begun(tier)
    return Case(
        "abort_multipart_upload",
        lambda tier: tier.abort("parts", upload),
        None,
        lambda: not store.uploads(),
    )


def complete(tier: Tier, store: Store) -> Case:
    upload, sent = begun(tier)
    return Case(
        "complete_multipart_upload",
        lambda tier: tier.complete("parts", upload, sent),
        ANY,
        lambda: store.objects().get("parts") == SMALL_PART,
    )


ASKING: tuple[Maker, ...] = (head, read, read_into, list_page, check, parts, uploads)
CALLS: tuple[Maker, ...] = (*ASKING, put, delete, copy, start, put_part, abort, complete)


def is_expected(case: Case, result: Any) -> bool:
    return bool(result) if case.expected is ANY else bool(result == case.expected)


def complete_again(tier: Tier, case: Case) -> None:
    """What was completed, and nobody knows: either it says that the upload is gone, or that all is well."""
    info = tier.head("parts")
    assert (info.size, info.meta) == (len(SMALL_PART), META)
    try:
        assert case.call(tier) == info.etag
    except TierUploadMissing:
        assert tier.head("parts") == info


def filled(tier: Tier, key: str, offset: int, length: int, etag: str | None) -> bytes:
    buffer = bytearray(length)
    tier.read_into(key, offset, memoryview(buffer), etag)
    return bytes(buffer)


NOT_STORED = {
    "SlowDown": s3faults.slow_down(),
    "SlowDown-early": s3faults.slow_down(early=True),
    "InternalError": s3faults.internal_error(),
    "reset-before": s3faults.reset_before_body(),
    "reset-after": s3faults.reset_after_body(),
}
STORED = {
    "then-503": s3faults.stored_then(503, "SlowDown"),
    "then-500": s3faults.stored_then(500, "InternalError"),
    "then-reset": s3faults.reset_when_stored(),
}
SILENT = {"black-hole": s3faults.black_hole(), "then-nothing": s3faults.black_hole_when_stored()}
