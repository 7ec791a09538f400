"""Which of pyfuse3's tasks takes the next request.

What it keeps true: one task at a time waits for a request, and while no request has to wait for anything a
single task serves them all, however many there are.
"""

from __future__ import annotations

from typing import Protocol

import trio


class Requests(Protocol):
    """What the tasks wait for (mount.session)."""

    async def wait_readable(self) -> None: ...

    def pass_replies(self) -> None: ...


class TrioForPyfuse3:
    """Stands where pyfuse3 looks for trio (as its own asyncio module does): our wait, and our lock."""

    def __init__(self, session: Requests) -> None:
        self.lowlevel = _Lowlevel(session)
        self.Lock = lambda: _ReadLock(session)

    def __getattr__(self, name: str) -> object:
        return getattr(trio, name)


class _Lowlevel:
    def __init__(self, session: Requests) -> None:
        self._session = session

    async def wait_readable(self, fd: int) -> None:
        await self._session.wait_readable()

    def __getattr__(self, name: str) -> object:
        return getattr(trio.lowlevel, name)


class _ReadLock:
    """Who waits for the next request. Taking it passes replies on first: a task that comes here has just
    had its request answered, and trio's own lock would go through the event loop before anything else.

    It is not handed over: a task that comes back in the same turn of the loop has it again, so that a second
    task costs nothing while no request waits. Who was woken meanwhile finds it taken, and goes on waiting."""

    def __init__(self, session: Requests) -> None:
        self._session = session
        self._held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        self._session.pass_replies()
        while self._held:
            await self._waiting.park()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            self._waiting.unpark()
