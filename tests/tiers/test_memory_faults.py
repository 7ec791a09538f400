"""The tier in memory goes wrong as it is told, and no other way."""

from __future__ import annotations

import time

import pytest

from fs.tiers.faults import Call, FaultError, FaultPlan
from fs.tiers.memory import Change, MemoryTier
from fs.tiers.tier import TierError, TierObjectMissing, TierRefused
from tests.tiers.lib import read


def test_what_changed_in_order() -> None:
    tier = MemoryTier(min_part_bytes=1)
    first = tier.put("a", b"x", {})
    upload_id = tier.start("b", {})
    part = tier.put_part("b", upload_id, 1, b"y")
    second = tier.complete("b", upload_id, [(1, part)])
    third = tier.copy("a", "c", {}, None)
    tier.delete("a")
    tier.delete("a")
    tier.read("b", 10)
    assert tier.history == [
        Change("put", "a", first),
        Change("complete", "b", second),
        Change("copy", "c", third),
        Change("delete", "a", ""),
    ]


def test_failures_before_and_after_the_work() -> None:
    tier = MemoryTier()
    tier.plan.fail("put", times=2)
    for _ in range(2):
        with pytest.raises(FaultError):
            tier.put("a", b"x", {})
    assert tier.history == []
    tier.plan.fail("put", when="after", error=TierRefused("denied"))
    with pytest.raises(TierRefused, match="denied"):
        tier.put("a", b"x", {})
    assert read(tier, "a") == b"x"  # stored, and denied
    tier.put("a", b"y", {})


def test_failures_of_one_key_and_of_the_nth_call() -> None:
    tier = MemoryTier()
    tier.plan.fail("put", key="b", times=-1)
    tier.plan.fail("head", skip=2)
    tier.put("a", b"x", {})
    for _ in range(3):
        with pytest.raises(TierError):
            tier.put("b", b"x", {})
    tier.head("a")
    tier.head("a")
    with pytest.raises(FaultError):
        tier.head("a")
    tier.head("a")
    tier.plan.clear()
    tier.put("b", b"x", {})


def test_wrong_bytes_once() -> None:
    tier = MemoryTier()
    tier.put("a", b"\x00\x01\x02", {})
    tier.plan.flip(0, 2)
    assert read(tier, "a") == b"\xff\x01\xfd"
    assert read(tier, "a") == b"\x00\x01\x02"


def test_a_slow_tier() -> None:
    tier = MemoryTier()
    tier.plan.delay(0.05, "put", times=1)
    started_s = time.monotonic()
    tier.put("a", b"x", {})
    assert time.monotonic() - started_s >= 0.05
    assert [call.operation for call in tier.plan.calls] == ["put"]


def test_a_function_that_decides() -> None:
    seen: list[tuple[Call, str]] = []

    def decide(call: Call, when: str) -> None:
        seen.append((call, when))
        if call.number == 2 and when == "before":
            raise TierError("the second call")

    tier = MemoryTier(FaultPlan(decide))
    tier.put("a", b"x", {})
    with pytest.raises(TierError, match="second"):
        tier.delete("a")
    tier.delete("a")
    with pytest.raises(TierObjectMissing):
        tier.head("a")
    assert [(call.operation, when) for call, when in seen] == [
        ("put", "before"),
        ("put", "after"),
        ("delete", "before"),
        ("delete", "before"),
        ("delete", "after"),
        ("head", "before"),
    ]


def test_what_s3_refuses_is_refused_here() -> None:
    tier = MemoryTier()
    upload_id = tier.start("a", {})
    parts = [(n, tier.put_part("a", upload_id, n, b"too small")) for n in (1, 2)]
    for call in (
        lambda: tier.complete("a", upload_id, parts),
        lambda: tier.put("x" * 1025, b"", {}),
        lambda: tier.put("a", b"", {"ckptfs-a": "x" * 2048}),
        lambda: tier.put("a", b"", {"ckptfs-a": "ü"}),
        lambda: tier.put_part("a", upload_id, 10_001, b""),
    ):
        with pytest.raises(TierRefused):
            call()
    assert tier.history == []
