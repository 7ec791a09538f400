"""Operations on names: a checkpoint's life cycle, single operations, and `ls -l` of a large
directory.

What it keeps true: every target does the same system calls in the same run, in turns and in an
order drawn anew each round. What the kernel has cached is part of an operation's price, so `ls
-l` is measured with nothing cached (which root can have) and again.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mount.bench_report import CYCLE, LS_AGAIN, LS_COLD, Row
from mount.bench_targets import Target

LS_DEADLINE_S = 120.0
SCAN_COLD, SCAN_AGAIN = "scandir+stat, nothing cached", "scandir+stat again"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

Say = Callable[[str], None]


def rounds_of(
    targets: Sequence[Target], rounds: int, chance: random.Random
) -> Iterable[tuple[int, Target]]:
    """(round, target) in a random order within each round; round 0 is for warming up."""
    for number in range(rounds + 1):
        for target in chance.sample(targets, len(targets)):
            yield number, target


def cycle_us(directory: Path, count: int, data: bytes) -> float:
    """Microseconds for create, write, close, rename, stat and unlink of one file, over *count*."""
    fresh, final = f"{directory}/fresh", f"{directory}/final"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    start_s = time.perf_counter()
    for _ in range(count):
        fd = os.open(fresh, flags, 0o600)
        os.write(fd, data)
        os.close(fd)
        os.rename(fresh, final)
        os.stat(final)
        os.unlink(final)
    return (time.perf_counter() - start_s) / count * 1e6


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def _rename(path: str) -> None:
    os.rename(path, f"{path}.new")


def _unlink(path: str) -> None:
    os.unlink(f"{path}.new")


def _stat_missing(path: str) -> None:
    try:
        os.stat(f"{path}.missing")
    except FileNotFoundError:
        return
    raise AssertionError(f"{path}.missing is there")


# in this order: each finds what the ones before it have left
SINGLE: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("create+close", _create),
    ("stat", os.stat),
    ("stat of a missing name", _stat_missing),
    ("open+close", _open),
    ("rename", _rename),
    ("unlink", _unlink),
)


def metadata(
    targets: Sequence[Target], count: int, rounds: int, chance: random.Random, say: Say
) -> list[Row]:
    """The life cycle and the single operations, in microseconds each."""
    data = os.urandom(4096)
    names = [CYCLE, *(name for name, _ in SINGLE)]
    rows = {name: Row(name, "us", False, {t.label: [] for t in targets}) for name in names}
    say("metadata operations")
    for number, target in rounds_of(targets, rounds, chance):
        measured = {CYCLE: cycle_us(target.path, count, data)}
        paths = [f"{target.path}/{index}" for index in range(count)]
        for name, action in SINGLE:
            start_s = time.perf_counter()
            for path in paths:
                action(path)
            measured[name] = (time.perf_counter() - start_s) / count * 1e6
        if number:
            for name, value in measured.items():
                rows[name].samples[target.label].append(value)
    return list(rows.values())


def fill(directory: Path, entries: int) -> None:
    """Make *entries* empty files in a new directory."""
    directory.mkdir()
    for number in range(entries):
        _create(f"{directory}/checkpoint-{number:08d}.pt")


def scan_ms(directory: Path, entries: int) -> float:
    """Milliseconds for scandir with a stat of each entry. RuntimeError when some are missing."""
    start_s = time.perf_counter()
    with os.scandir(directory) as found:
        count = sum(1 for entry in found if entry.stat(follow_symlinks=False))
    elapsed_ms = (time.perf_counter() - start_s) * 1e3
    if count != entries:
        raise RuntimeError(f"{directory}: {count} entries listed, {entries} are there")
    return elapsed_ms


def ls_ms(directory: Path, entries: int) -> float:
    """Milliseconds for the command `ls -ln`, its start included."""
    start_s = time.perf_counter()
    done = subprocess.run(
        ["ls", "-ln", str(directory)],
        stdout=subprocess.PIPE,
        env={"LC_ALL": "C", "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        timeout=LS_DEADLINE_S,
        check=True,
    )
    elapsed_ms = (time.perf_counter() - start_s) * 1e3
    listed = done.stdout.count(b"\n") - 1
    if listed != entries:
        raise RuntimeError(f"{directory}: ls listed {listed} of {entries} entries")
    return elapsed_ms


def _forget_caches() -> bool:
    """Let the kernel drop unused names and attributes (of all filesystems); False if not root."""
    try:
        DROP_CACHES.write_text("2")
    except OSError:
        return False
    return True


def listings(
    targets: Sequence[Target], entries: int, rounds: int, chance: random.Random, say: Say
) -> list[Row]:
    """`ls -l` and scandir of a directory of *entries* files, in milliseconds."""
    measures = ((LS_COLD, LS_AGAIN, ls_ms), (SCAN_COLD, SCAN_AGAIN, scan_ms))
    names = [name for cold, again, _ in measures for name in (cold, again)]
    rows = {name: Row(name, "ms", False, {}) for name in names}
    say(f"ls -l of {entries} entries")
    for target in targets:
        fill(target.path / "listed", entries)
    for number, target in rounds_of(targets, rounds, chance):
        for cold, again, action in measures:
            forgotten = _forget_caches()
            for name in (cold, again):
                value = action(target.path / "listed", entries)
                if number and (forgotten or name == again):
                    rows[name].samples.setdefault(target.label, []).append(value)
    for target in targets:
        shutil.rmtree(target.path / "listed")
    return list(rows.values())
