"""Trying again: how long to wait, and what to tell meanwhile.

What it keeps true: waits grow exponentially up to a cap, with full jitter (anything from nothing to the bound), so that
many clients of a store that comes back do not come back together. What cannot pass by itself is tried again as well,
rarely: somebody may have put it right.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import trio

from fs.tiers.tier import (
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)

log = logging.getLogger("ckptfs.tier")

T = TypeVar("T")
FIRST_S, CAP_S, REFUSED_CAP_S = 0.2, 30.0, 60.0
LOG_EVERY_S = 60.0


class Trouble(NamedTuple):
    """Why something is not done yet. *since_ns*: of the first failure in a row, ns since the epoch."""

    key: str
    reason: str
    since_ns: int
    attempts: int
    permanent: bool


class Backoff:
    """Waits after failures in a row."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self.attempts = 0

    def next_s(self, *, refused: bool = False) -> float:
        """How long to wait after one more failure, in seconds."""
        bound = min(CAP_S, FIRST_S * 2.0 ** min(self.attempts, 16))
        self.attempts += 1
        if refused:
            return self._rng.uniform(REFUSED_CAP_S / 2, REFUSED_CAP_S)
        return self._rng.uniform(0, bound)


class Caller:
    """Calls the tier in threads, for ever, and knows what is in trouble.

    *limiter*: how many calls may run at once.
    """

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self.limiter = limiter
        self.troubles: dict[str, Trouble] = {}
        self.retries = 0
        self._logged_s: dict[str, float] = {}
        self._hurry = trio.Event()

    def hurry(self) -> None:
        """Try again now whatever waits."""
        self._hurry.set()
        self._hurry = trio.Event()

    async def call(self, key: str, what: str, function: Callable[[], T]) -> T:
        """What *function* returns at last. TierObjectMissing, TierObjectChanged and TierUploadMissing are answers."""
        try:
            return await self._until_answered(key, what, function)
        finally:
            # also when nobody wants it any more
            self.troubles.pop(key, None)

    async def _until_answered(self, key: str, what: str, function: Callable[[], T]) -> T:
        backoff = Backoff()
        since_ns = 0
        while True:
            try:
                return await trio.to_thread.run_sync(function, limiter=self.limiter)
            except (TierObjectMissing, TierObjectChanged, TierUploadMissing):
                raise
            except TierError as error:
                since_ns = since_ns or time.time_ns()
                self.retries += 1
                refused = isinstance(error, TierRefused)
                wait_s = backoff.next_s(refused=refused)
                trouble = Trouble(key, str(error), since_ns, backoff.attempts, refused)
                self.troubles[key] = trouble
                self._log(what, trouble)
            with trio.move_on_after(wait_s):
                await self._hurry.wait()

    def _log(self, what: str, trouble: Trouble) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(trouble.reason, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        if len(self._logged_s) > 64:
            self._logged_s.clear()
        self._logged_s[trouble.reason] = now_s
        level = logging.ERROR if trouble.permanent else logging.WARNING
        again = "kept, and tried again from time to time" if trouble.permanent else "trying again"
        log.log(
            level,
            "%s %s: %s (attempt %d; %s)",
            what,
            trouble.key,
            trouble.reason,
            trouble.attempts,
            again,
        )
