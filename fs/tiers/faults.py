"""Which calls of a tier go wrong, and how: the plan that `MemoryTier` follows.

What it keeps true: a rule matches by what the call is, fires a counted number of times, and is then spent; the plan
may be added to from any thread while calls run. Nothing here decides by chance unless a *decide* of the test's does.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from fs.tiers.tier import TierError


class Call(NamedTuple):
    """One call of a tier. *number*: from 1, over all calls."""

    operation: str
    key: str
    number: int


class FaultError(TierError):
    """What a rule raises unless it is told what."""


@dataclasses.dataclass
class Rule:
    """Matches calls of *operation* ("": any) on *key* (None: any), *times* times (-1: always).

    Then, in this order: wait *delay_s*, flip the bytes at *flip* (offsets into what was read), raise *error*.
    *when*: "before" the work is done or "after" it.
    """

    operation: str = ""
    key: str | None = None
    times: int = 1
    when: str = "before"
    error: Exception | None = None
    delay_s: float = 0.0
    flip: tuple[int, ...] = ()
    skip: int = 0

    def takes(self, call: Call, when: str) -> bool:
        """Whether the rule fires now; counts."""
        if when != self.when or self.operation not in ("", call.operation):
            return False
        if self.key is not None and self.key != call.key:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times == 0:
            return False
        self.times -= 1 if self.times > 0 else 0
        return True


class FaultPlan:
    """Rules, and a function of the test's that may raise for any call: decide(call, "before" or "after")."""

    def __init__(self, decide: Callable[[Call, str], None] | None = None) -> None:
        self._decide = decide
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self.calls: list[Call] = []

    def add(self, rule: Rule) -> Rule:
        """Follow one more rule."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def fail(
        self,
        operation: str = "",
        *,
        times: int = 1,
        when: str = "before",
        key: str | None = None,
        skip: int = 0,
        error: Exception | None = None,
    ) -> Rule:
        """Raise *error* (a passing TierError when None). "after": the tier has done it, and says it has not."""
        failure = error or FaultError(f"{operation or 'call'} failed: a fault was injected")
        return self.add(Rule(operation, key, times, when, failure, skip=skip))

    def flip(self, *offsets: int, times: int = 1, key: str | None = None, skip: int = 0) -> Rule:
        """`read_into` gives other bytes at *offsets*."""
        return self.add(Rule("read_into", key, times, "after", flip=offsets, skip=skip))

    def delay(self, delay_s: float, operation: str = "", *, times: int = -1) -> Rule:
        """Each call takes *delay_s* longer."""
        return self.add(Rule(operation, None, times, "before", delay_s=delay_s))

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._rules.clear()

    def before(self, call: Call) -> None:
        """What happens before the work of *call*."""
        with self._lock:
            self.calls.append(call)
        self._follow(call, "before", None)

    def after(self, call: Call, buffer: memoryview | None) -> None:
        """What happens after it. *buffer*: what was read."""
        self._follow(call, "after", buffer)

    def _follow(self, call: Call, when: str, buffer: memoryview | None) -> None:
        with self._lock:
            fired = [rule for rule in self._rules if rule.takes(call, when)]
        for rule in fired:
            if rule.delay_s:
                time.sleep(rule.delay_s)
            for offset in rule.flip:
                if buffer is not None and offset < len(buffer):
                    buffer[offset] ^= 0xFF
            if rule.error is not None:
                raise rule.error
        if self._decide is not None:
            self._decide(call, when)
