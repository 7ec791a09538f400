"""`ckptfs bench`: the mount beside the raw arena, /dev/shm and a bare pyfuse3 filesystem, in one
run.

What it keeps true: numbers that are compared come from the same run, alternating in random order,
on memory that has been touched before; samples are kept, medians are what is judged; nothing is
left behind.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fs import memory
from fs.errors import CkptfsError
from mount import bench_io, bench_meta, bench_worker, rundir
from mount.bench_report import ARENA, BASELINE, MOUNT, SHM, BenchReport, Row, goals_of, judge
from mount.bench_targets import Target, baseline, directory_in

SHM_DIRECTORY = Path("/dev/shm")
SPARE_BYTES = 64 << 20  # left free in whatever is written to
WARM_FACTOR = 3  # the allocator does not hand out the same pages again

Say = Callable[[str], None]


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Without *mountpoint*: the other targets only, and no goals."""

    mountpoint: str | None = None
    directories: tuple[str, ...] = ()
    size_bytes: int = 512 << 20
    rounds: int = 5
    operations: int = 500
    entries: int = 10_000
    restarts: int = 20
    memory_files: int = 0
    torch_python: str | None = None
    torch: bool = True
    shm: bool = True
    baseline: bool = True
    seed: int | None = None


def _silent(_: str) -> None:
    return None


def run_bench(options: BenchOptions, say: Say = _silent) -> BenchReport:
    """Measure. *say* is told what is being measured.

    Raises CkptfsError (NoSuchMount included) when something asked for cannot be measured.
    """
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    notes: list[str] = []
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        targets = _targets(options, stack, notes)
        size_bytes = _bounded_size(options, targets, notes)
        rows = _measure(options, targets, size_bytes, chance, notes, say)
    settings = {
        "size": f"{size_bytes >> 20} MiB",
        "rounds": str(options.rounds),
        "lane": _lane(options.mountpoint),
        "seed": str(seed),
        "took": f"{time.monotonic() - started_s:.0f} s",
    }
    goals = goals_of(_lane(options.mountpoint)) if options.mountpoint is not None else ()
    verdicts = judge(rows, goals)
    return BenchReport(_machine(), settings, rows, verdicts, notes)


def _targets(options: BenchOptions, stack: contextlib.ExitStack, notes: list[str]) -> list[Target]:
    targets = []
    if options.mountpoint is not None:
        mountpoint = Path(options.mountpoint)
        run = rundir.find(options.mountpoint)
        targets.append(Target(MOUNT, stack.enter_context(directory_in(mountpoint))))
        if os.getuid() == 0:
            arena = stack.enter_context(directory_in(run.arena))
            targets.append(Target(ARENA, arena, metadata=False))
        else:
            notes.append("the raw arena is measured as root only")
    if options.shm:
        targets.append(Target(SHM, stack.enter_context(directory_in(SHM_DIRECTORY))))
    for name in options.directories:
        targets.append(Target(name, stack.enter_context(directory_in(Path(name)))))
    if options.baseline:
        path = stack.enter_context(baseline())
        targets.append(Target(BASELINE, path, data=False))
    return targets


def _bounded_size(options: BenchOptions, targets: Sequence[Target], notes: list[str]) -> int:
    free = [memory.available_bytes() // WARM_FACTOR]
    for target in targets:
        if target.data:
            status = os.statvfs(target.path)
            free.append(status.f_bavail * status.f_frsize)
    size_bytes = min(options.size_bytes, min(free) - SPARE_BYTES)
    if size_bytes < 1 << 20:
        raise CkptfsError(
            f"less than {(SPARE_BYTES >> 20) + 1} MiB are free in one of the places: free memory first"
        )
    if size_bytes < options.size_bytes:
        notes.append(
            f"{size_bytes >> 20} MiB instead of {options.size_bytes >> 20}: no more is free"
        )
    return size_bytes


def _measure(
    options: BenchOptions,
    targets: Sequence[Target],
    size_bytes: int,
    chance: random.Random,
    notes: list[str],
    say: Say,
) -> list[Row]:
    data = [target for target in targets if target.data]
    named = [target for target in targets if target.metadata]
    rounds = options.rounds
    say("warming memory")
    bench_io.warm(size_bytes * WARM_FACTOR)
    rows = bench_io.sequential(data, size_bytes, rounds, chance, say)
    rows += _torch(options, data, size_bytes, chance, notes, say)
    rows += bench_meta.metadata(named, options.operations, rounds, chance, say)
    rows += bench_meta.listings(named, options.entries, rounds, chance, say)
    if options.mountpoint is not None:
        path = next(target.path for target in targets if target.label == MOUNT)
        if options.restarts:
            rows += bench_worker.pauses(options.mountpoint, path, options.restarts, chance, say)
        if options.memory_files:
            rows += bench_worker.memory_per_file(
                options.mountpoint, path, options.memory_files, say
            )
    return [row for row in rows if any(row.samples.values())]


def _torch(
    options: BenchOptions,
    targets: Sequence[Target],
    size_bytes: int,
    chance: random.Random,
    notes: list[str],
    say: Say,
) -> list[Row]:
    if not options.torch:
        return []
    python = bench_io.find_torch_python(options.torch_python)
    if python is None:
        notes.append("torch is not here: torch.save and torch.load skipped (see --torch-python)")
        return []
    say("torch.save and torch.load")
    return bench_io.torch_rows(python, targets, size_bytes, options.rounds, chance)


def _lane(mountpoint: str | None) -> str:
    state = rundir.find(mountpoint).supervisor() if mountpoint is not None else None
    return state.lane if state is not None else ""


def _machine() -> dict[str, str]:
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "kernel": platform.release(),
        "cpus": f"{len(os.sched_getaffinity(0))} x {model or platform.machine()}",
        "memory": f"{memory.memory_limit_bytes() / (1 << 30):.1f} GiB",
        "python": platform.python_version(),
    }
