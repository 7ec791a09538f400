"""What the commands share: exit statuses, durations, and how sizes, ages and tables are shown.

What it keeps true: a number on the terminal has a unit, and a table in a pipe is not cut.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

EXIT_FAILED, EXIT_USAGE, EXIT_NO_MOUNT, EXIT_BUSY, EXIT_TIMED_OUT, EXIT_NOT_DURABLE = (
    1,
    2,
    3,
    4,
    5,
    6,
)

if TYPE_CHECKING:
    _Parameter = click.ParamType[float]
else:
    _Parameter = click.ParamType  # not generic before click 8.2

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|m|min|h|d)?")
_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(_Parameter):
    """Seconds from "90", "90s", "10m", "2h" or "1d"."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds; a usage error that says what is allowed."""
        if isinstance(value, (int, float)):
            return float(value)
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r}: write for example 90s, 10m or 2h", param, ctx)
        return float(match["number"]) * _SECONDS[match["unit"]]


def size_text(size_bytes: int | None) -> str:
    """ "1.5 GiB"; nothing for None."""
    if size_bytes is None:
        return ""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """ "42s", "3m 20s", "2h 5m", "3d 4h": two units at most."""
    whole = max(0, round(seconds))
    for unit_s, unit, below_s, below in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // below_s
            return f"{whole // unit_s}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def age_text(since_ns: int | None) -> str:
    """How long ago that was; nothing for None or 0."""
    return duration_text((time.time_ns() - since_ns) / 1e9) if since_ns else ""


def plain_text(text: str) -> str:
    """*text* without anything that a terminal, or JSON, would choke on."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain_name(name: bytes) -> str:
    """A file's name for people; bytes that are no UTF-8 are escaped."""
    return os.fsdecode(name).encode("utf-8", "backslashreplace").decode()


def console(*, err: bool = False) -> Console:
    """Where tables go: a pipe has no width, so nothing is cut for it."""
    stream = sys.stderr if err else sys.stdout
    return Console(width=None if stream.isatty() else 1000, stderr=err)


def print_table(table: Table) -> None:
    """On stdout."""
    console().print(table)


def print_json(value: object) -> None:
    """On stdout."""
    click.echo(json.dumps(value, indent=2))
