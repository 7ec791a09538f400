"""Which files give their memory up, how much is kept free, and whether a writer may be let loose. Pure.

What it keeps true:
- What policy does not want in memory goes first, then what was not used for longest, then what policy wants to keep;
  what is pinned never.
- As much is kept free as writers may take before the next look, up to half of the arena.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

RESERVE_MOST = 0.5  # of the arena
UNKNOWN_SHARE = 16  # a file of which nothing is known is expected to take this part of the arena
GROWS_ON = 2  # a file that has outgrown its prediction is expected to grow as much again
SIZES_KEPT = 3
MARGIN = 1.05

_DIGITS = re.compile(r"\d+")


class Standing(enum.IntEnum):
    """What policy says of a durable file's place in memory, in the order of eviction."""

    OUTSIDE = 0
    PLAIN = 1
    KEPT = 2
    PINNED = 3


class Candidate(NamedTuple):
    """A file that could be evicted. *used_ns*: when somebody last opened, closed or changed it."""

    ino: int
    memory_bytes: int
    used_ns: int
    standing: Standing


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that may go, the first first."""
    may_go = [each for each in candidates if each.standing < Standing.PINNED]
    return sorted(may_go, key=lambda each: (each.standing, each.used_ns, each.ino))


def reserve_bytes(size_bytes: int, share: float, rate_bytes_s: float, ahead_s: float) -> int:
    """How much to keep free: a share of the arena, or what writers take in *ahead_s*, if that is more."""
    wanted = max(size_bytes * share, rate_bytes_s * ahead_s)
    return int(min(wanted, size_bytes * RESERVE_MOST))


def shape_of(key: str) -> str:
    """What the paths of one file's successive versions have in common: numbers do not count."""
    return _DIGITS.sub("#", key)


def predicted_bytes(sizes: list[int] | None, arena_bytes: int) -> int:
    """How large a file will get, from the sizes that others of its shape had last (None: there were none)."""
    if not sizes:
        return arena_bytes // UNKNOWN_SHARE
    return int(max(sizes[-SIZES_KEPT:]) * MARGIN)


def to_come_bytes(predicted: int, written: int) -> int:
    """What an open writer is still expected to write."""
    if written <= predicted:
        return predicted - written
    return written * (GROWS_ON - 1)


def may_be_let_loose(free_bytes: int, to_come: int, predicted: int) -> bool:
    """Whether there is room for a writer that nobody can stop, beside those that are at it."""
    return free_bytes - to_come >= predicted
