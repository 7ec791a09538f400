"""What `ckptfs bench` reports: samples by measure and target, their medians, and the goals they are
held to.

Pure: numbers in, tables out. What it keeps true: a goal is only judged by samples of the same
run, and a goal that could not be judged says so instead of passing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Literal

import msgspec
from rich.table import Table

MOUNT, ARENA, SHM, BASELINE = "mount", "arena", "/dev/shm", "pyfuse3"

WRITE_1M, READ_1M = "write 1 MiB", "read 1 MiB"
TORCH_SAVE, TORCH_LOAD = "torch.save", "torch.load"
CYCLE = "create+write 4 KiB+close+rename+stat+unlink"
LS_COLD, LS_AGAIN = "ls -l, nothing cached", "ls -l again"
PAUSE_KILL, PAUSE_RESTART = "pause, kill -9 of the worker", "pause, ckptfs restart"
MEMORY = "memory a file"

Statistic = Literal["median", "p99"]


class Row(msgspec.Struct):
    """One measure: samples by target, and what is better."""

    name: str
    unit: str
    more_is_better: bool
    samples: dict[str, list[float]]

    def value(self, target: str, statistic: Statistic = "median") -> float | None:
        """The statistic of a target's samples; None without samples."""
        samples = self.samples.get(target)
        if not samples:
            return None
        return statistics.median(samples) if statistic == "median" else percentile(samples, 99)


class Goal(msgspec.Struct, frozen=True):
    """A limit for the mount: a ratio to another target, or (against "") a value in the unit."""

    row: str
    against: str
    at_least: bool
    limit: float
    statistic: Statistic = "median"


# where the kernel moves the bytes
PASSTHROUGH_GOALS = (
    Goal(WRITE_1M, SHM, True, 2.0),
    Goal(WRITE_1M, ARENA, True, 0.95),
    Goal(READ_1M, SHM, True, 1.4),
    Goal(TORCH_SAVE, SHM, True, 1.2),
    Goal(TORCH_LOAD, SHM, True, 1.0),
)
# where the worker does
PLAIN_GOALS = (Goal(WRITE_1M, SHM, True, 0.7),)
COMMON_GOALS = (
    Goal(CYCLE, BASELINE, False, 2.5),
    Goal(LS_COLD, BASELINE, False, 3.0),
    Goal(LS_AGAIN, BASELINE, False, 3.0),
    Goal(PAUSE_KILL, "", False, 300.0, "p99"),
    Goal(PAUSE_RESTART, "", False, 300.0, "p99"),
    Goal(MEMORY, "", False, 1024.0),
)


class Verdict(msgspec.Struct):
    """A goal and what was reached; *met* is None when it was not measured."""

    goal: Goal
    reached: float | None
    met: bool | None


class BenchReport(msgspec.Struct):
    """Everything one run measured."""

    machine: dict[str, str]
    settings: dict[str, str]
    rows: list[Row]
    verdicts: list[Verdict]
    notes: list[str]

    def row(self, name: str) -> Row | None:
        """The measure of that name."""
        return next((row for row in self.rows if row.name == name), None)


def percentile(samples: Iterable[float], percent: float) -> float:
    """The nearest-rank percentile: always one of the samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def goals_of(lane: str) -> tuple[Goal, ...]:
    """What a mount in that lane is held to."""
    return (PLAIN_GOALS if lane == "plain" else PASSTHROUGH_GOALS) + COMMON_GOALS


def judge(rows: Iterable[Row], goals: Iterable[Goal]) -> list[Verdict]:
    """Each goal with what the mount reached."""
    by_name = {row.name: row for row in rows}
    return [_verdict(by_name.get(goal.row), goal) for goal in goals]


def _verdict(row: Row | None, goal: Goal) -> Verdict:
    reached = row.value(MOUNT, goal.statistic) if row else None
    if row is not None and reached is not None and goal.against:
        other = row.value(goal.against, goal.statistic)
        reached = reached / other if other else None
    if reached is None:
        return Verdict(goal, None, None)
    met = reached >= goal.limit if goal.at_least else reached <= goal.limit
    return Verdict(goal, reached, met)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def measures_table(report: BenchReport) -> Table:
    """Medians by target, and the mount's ratio to each."""
    labels = list(dict.fromkeys(label for row in report.rows for label in row.samples))
    others = [label for label in labels if label != MOUNT]
    table = Table("median of", "unit", title="measures", box=None, pad_edge=False)
    for label in labels:
        table.add_column(label, justify="right")
    if MOUNT in labels:
        for label in others:
            table.add_column(f"mount / {label}", justify="right")
    for row in report.rows:
        values = {label: row.value(label) for label in labels}
        ours = values.get(MOUNT)
        ratios = [
            f"{ours / other:.2f}" if ours is not None and (other := values[label]) else ""
            for label in others
        ]
        cells = [_number(values[label]) for label in labels]
        table.add_row(row.name, row.unit, *cells, *(ratios if MOUNT in labels else []))
    return table


def goals_table(report: BenchReport) -> Table:
    """Goals beside what was reached."""
    table = Table("goal", "wanted", "reached", "", title="goals", box=None, pad_edge=False)
    for verdict in report.verdicts:
        goal = verdict.goal
        row = report.row(goal.row)
        unit = f"x {goal.against}" if goal.against else (row.unit if row else "")
        name = goal.row if goal.statistic == "median" else f"{goal.row}, 99th percentile"
        sign = ">=" if goal.at_least else "<="
        words = {True: "met", False: "[red]missed[/red]", None: "not measured"}
        reached = "" if verdict.reached is None else f"{verdict.reached:.2f}"
        table.add_row(name, f"{sign} {goal.limit:g} {unit}", reached, words[verdict.met])
    return table
