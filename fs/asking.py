"""Asking the durable tier on behalf of somebody who waits: with an end, and once for all who wait for the same.

What it keeps true:
- What may pass is tried again with growing waits and full jitter until a deadline. Then it is EIO, with the object's
  URL in the log: never "no such file".
- Who stops waiting stops nobody else: whoever asked along asks anew.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

import trio

from fs.errors import FsError
from fs.retry import Backoff
from fs.tiers.tier import (
    Tier,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
)

log = logging.getLogger("ckptfs.discovery")

T = TypeVar("T")
WAIT_CAP_S = 5.0
REFUSED_ATTEMPTS = 2
REFUSED_WAIT_S = 0.5
BAD_ATTEMPTS = 3


class Denied(FsError):
    """EIO: the tier refuses, and will go on doing so."""


class Asker:
    """Calls *tier* in threads, at most *concurrency* at once; gives up after *timeout_s* seconds."""

    def __init__(self, tier: Tier, *, concurrency: int, timeout_s: float) -> None:
        self._tier = tier
        self._timeout_s = timeout_s
        self._limiter = trio.CapacityLimiter(concurrency)
        self.concurrency = concurrency
        self.calls = 0

    async def ask(self, what: str, key: str, call: Callable[[], T]) -> T:
        """What *call* returns at last. Raises FsError EIO (Denied: it is refused), and what is an answer:

        TierObjectMissing, TierObjectChanged, TierBadBytes (after some attempts).
        """
        deadline = trio.current_time() + self._timeout_s
        backoff = Backoff()
        failed = "no answer"
        refused = bad = 0
        with trio.move_on_at(deadline):
            while True:
                self.calls += 1
                try:
                    return await trio.to_thread.run_sync(
                        call, limiter=self._limiter, abandon_on_cancel=True
                    )
                except (TierObjectMissing, TierObjectChanged):
                    raise
                except TierBadBytes:
                    bad += 1
                    if bad == BAD_ATTEMPTS:
                        raise
                    wait_s = REFUSED_WAIT_S
                except TierRefused as error:
                    refused += 1
                    if refused == REFUSED_ATTEMPTS:
                        url = self._tier.url(key)
                        log.error("%s %s is refused: %s", what, url, error)
                        raise Denied(errno.EIO, f"{what} {url}: {error}") from None
                    wait_s = REFUSED_WAIT_S
                except TierError as error:
                    failed = str(error)
                    wait_s = min(backoff.next_s(), WAIT_CAP_S)
                    if backoff.attempts == 1:
                        log.warning("%s %s: %s; trying again", what, self._tier.url(key), error)
                await trio.sleep(wait_s)
        url = self._tier.url(key)
        log.error("%s %s: %s; given up after %.0f s: EIO", what, url, failed, self._timeout_s)
        raise FsError(errno.EIO, f"{what} {url}: {failed}")


class _Flight:
    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: FsError | None = None


class Flights:
    """Work that is done once at a time, whoever wants it."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, _Flight] = {}

    async def join(self, key: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        """Do *work*, or wait for whoever does. Afterwards it may be to do still: look. Raises what it raises."""
        flight = self._under_way.get(key)
        if flight is not None:
            await flight.over.wait()
            if flight.error is not None:
                raise type(flight.error)(
                    flight.error.errno or errno.EIO, flight.error.strerror or ""
                )
            return
        flight = self._under_way[key] = _Flight()
        try:
            await work()
        except FsError as error:
            flight.error = error
            raise
        finally:
            del self._under_way[key]
            flight.over.set()


async def all_of(calls: Iterable[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Make calls side by side, *at_once* at most; after one has failed no more. Raises the first FsError."""
    rest = iter(calls)
    errors: list[FsError] = []

    async def some() -> None:
        for call in rest:
            try:
                await call()
            except FsError as error:
                errors.append(error)
            if errors:
                return

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(some)
    if errors:
        raise errors[0]
