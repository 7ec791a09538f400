"""S3 by https, as it is in most places: all that can fail by http, and the store must be one that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fs.tiers.s3 import S3Tier
from fs.tiers.tier import TierBadBytes, TierError, TierRefused
from tests import s3faults
from tests.faultproxy import FaultProxy
from tests.rgw import Rgw
from tests.s3.cases import SHORT_S, filled
from tests.s3.store import DATA, META, MIB, PART, Store
from tests.tls import server_context, write_bundle


@pytest.fixture
def secure(rgw: Rgw) -> Iterator[FaultProxy]:
    """The proxy by https."""
    with FaultProxy(rgw.port, tls=server_context()) as proxy:
        yield proxy
    assert proxy.errors == []


@pytest.fixture
def make_secure(
    make_tier: Callable[..., S3Tier], secure: FaultProxy, tmp_path: Path
) -> Callable[..., S3Tier]:
    """Tiers that trust the proxy's certificate."""

    def make(**changes: object) -> S3Tier:
        defaults = {"endpoint_url": secure.url, "ca_bundle": write_bundle(tmp_path)}
        return make_tier(**(defaults | changes))

    return make


def test_everything_works(
    make_secure: Callable[..., S3Tier], secure: FaultProxy, store: Store
) -> None:
    tier = make_secure()
    etag = tier.put("file", DATA, META)
    upload = tier.start("parts", META)
    sent = [(number, tier.put_part("parts", upload, number, PART)) for number in (1, 2)]
    tier.complete("parts", upload, sent)
    tier.copy("file", "copy", META, etag)
    assert store.objects() == {"file": DATA, "copy": DATA, "parts": PART * 2}
    assert filled(tier, "parts", 5, len(PART), None) == (PART * 2)[5 : len(PART) + 5]
    assert secure.count("upload_part") == 2


def test_a_store_that_is_not_known_is_not_talked_to(
    make_secure: Callable[..., S3Tier], secure: FaultProxy
) -> None:
    tier = make_secure(ca_bundle="")
    for call in (tier.check, lambda: tier.put("file", DATA, META)):
        with pytest.raises(TierRefused, match=r"(?i)certificate.*ca_bundle"):
            call()
    assert secure.requests == []


def test_trailing_checksums_that_the_store_does_not_take(
    make_secure: Callable[..., S3Tier], store: Store
) -> None:
    """boto3's default; Ceph wants to know the length first. What to set instead is said."""
    tier = make_secure(request_checksum_calculation="when_supported")
    with pytest.raises(TierRefused, match=r"MissingContentLength.*when_required"):
        tier.put("file", DATA, META)
    assert make_secure().put("file", DATA, META)
    assert store.objects() == {"file": DATA}


@pytest.mark.parametrize(
    "fault",
    [
        s3faults.slow_down(early=True),
        s3faults.reset_before_body(),
        s3faults.reset_in_body(MIB // 8),
        s3faults.reset_after_body(),
        s3faults.truncate_request(MIB // 8),
        s3faults.truncate_request(MIB // 8, consistent=True),
        s3faults.flip_byte_of_request(MIB // 8),
        s3faults.black_hole(),
    ],
)
def test_what_is_not_stored(
    make_secure: Callable[..., S3Tier], secure: FaultProxy, store: Store, fault: s3faults.Fault
) -> None:
    secure.inject(fault)
    with pytest.raises(TierError) as caught:
        make_secure(connect_timeout_s=SHORT_S, read_timeout_s=SHORT_S).put("file", DATA, META)
    assert type(caught.value) in (TierError, TierBadBytes)
    assert store.objects() == {}
    make_secure().put("file", DATA, META)
    assert store.objects() == {"file": DATA}


@pytest.mark.parametrize(
    "fault",
    [
        s3faults.truncate_answer(MIB // 2),
        s3faults.truncate_answer(MIB // 2, consistent=True),
        s3faults.reset_in_answer(MIB // 2),
        s3faults.stall_in_answer(MIB // 2),
        s3faults.black_hole(),
    ],
)
def test_what_does_not_come_whole(
    make_secure: Callable[..., S3Tier], secure: FaultProxy, store: Store, fault: s3faults.Fault
) -> None:
    etag = store.put("file")
    secure.inject(fault)
    with pytest.raises(TierError) as caught:
        hasty = make_secure(connect_timeout_s=SHORT_S, read_timeout_s=SHORT_S)
        filled(hasty, "file", 0, MIB, etag)
    assert type(caught.value) in (TierError, TierBadBytes)
    assert filled(make_secure(), "file", 0, MIB, etag) == DATA
