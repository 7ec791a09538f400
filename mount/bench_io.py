"""Sequential writes and reads, and torch.save / torch.load.

What it keeps true: the loop measured does system calls and nothing else (one buffer, made
before), every write goes to a fresh file, since the allocation of its memory is part of it, and
what is read was just written.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from fs.errors import CkptfsError
from mount.bench_report import TORCH_LOAD, TORCH_SAVE, Row
from mount.bench_targets import Target

BLOCKS = ((4 << 10, "4 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB"))
TORCH_DEADLINE_S = 900.0

Say = Callable[[str], None]


def warm(size_bytes: int) -> None:
    """Touch that much memory once: what a virtual machine has not yet touched is slow to get."""
    piece = os.urandom(1 << 20)
    with mmap.mmap(-1, size_bytes) as memory:
        for offset in range(0, size_bytes - len(piece) + 1, len(piece)):
            memory[offset : offset + len(piece)] = piece


def write_file(path: Path, size_bytes: int, block: memoryview) -> float:
    """Write a new file of whole blocks; seconds from open to close. Raises OSError."""
    count, expected, write = size_bytes // len(block), len(block), os.write
    start_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(count):
            if write(fd, block) != expected:
                raise OSError(28, "short write", str(path))
    finally:
        os.close(fd)
    return time.perf_counter() - start_s


def read_file(path: Path, size_bytes: int, block: memoryview) -> float:
    """Read a file of whole blocks; seconds from open to close. Raises OSError."""
    count, expected, readv = size_bytes // len(block), len(block), os.readv
    buffers = [block]
    start_s = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(count):
            if readv(fd, buffers) != expected:
                raise OSError(5, "short read", str(path))
    finally:
        os.close(fd)
    return time.perf_counter() - start_s


def sequential(
    targets: Sequence[Target], size_bytes: int, rounds: int, chance: random.Random, say: Say
) -> list[Row]:
    """GB/s (10**9) for each block size; the first round of each target is not counted."""
    rows = []
    with mmap.mmap(-1, BLOCKS[-1][0]) as memory:
        memory[:] = os.urandom(len(memory))
        with memoryview(memory) as whole:
            for block_bytes, name in BLOCKS:
                say(f"sequential, {name}")
                total = size_bytes // block_bytes * block_bytes
                with whole[:block_bytes] as block:
                    rows += _blocks(targets, total, block, name, rounds, chance)
    return rows


def _blocks(
    targets: Sequence[Target],
    size_bytes: int,
    block: memoryview,
    name: str,
    rounds: int,
    chance: random.Random,
) -> list[Row]:
    written: dict[str, list[float]] = {target.label: [] for target in targets}
    read: dict[str, list[float]] = {target.label: [] for target in targets}
    for number in range(rounds + 1):
        for target in chance.sample(targets, len(targets)):
            path = target.path / "data"
            try:
                write_s = write_file(path, size_bytes, block)
                read_s = read_file(path, size_bytes, block)
            finally:
                path.unlink(missing_ok=True)
            if number:
                written[target.label].append(size_bytes / write_s / 1e9)
                read[target.label].append(size_bytes / read_s / 1e9)
    return [
        Row(f"write {name}", "GB/s", True, written),
        Row(f"read {name}", "GB/s", True, read),
    ]


def find_torch_python(wanted: str | None) -> str | None:
    """A Python that can import torch: the one asked for, or this one; None when it cannot.

    Raises CkptfsError when the one asked for cannot.
    """
    python = wanted or sys.executable
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    try:
        done = subprocess.run([python, "-c", code], timeout=60, check=False, capture_output=True)
    except OSError as error:
        raise CkptfsError(f"{python}: {error.strerror}") from error
    if done.returncode == 0:
        return python
    if wanted:
        raise CkptfsError(f"{wanted}: cannot import torch there")
    return None


def torch_rows(
    python: str, targets: Sequence[Target], size_bytes: int, rounds: int, chance: random.Random
) -> list[Row]:
    """GB/s of torch.save and torch.load of a state dict, in another process. Raises CkptfsError."""
    order = {
        "directories": {target.label: str(target.path) for target in targets},
        "size_bytes": size_bytes,
        "rounds": rounds,
        "seed": chance.randrange(1 << 30),
    }
    script = str(Path(__file__).with_name("bench_torch.py"))
    try:
        done = subprocess.run(
            [python, "-W", "ignore", script, json.dumps(order)],
            capture_output=True,
            text=True,
            timeout=TORCH_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CkptfsError(f"torch did not end within {TORCH_DEADLINE_S:.0f} s") from error
    if done.returncode:
        raise CkptfsError(f"torch failed: {done.stderr.strip()[-500:]}")
    seconds = json.loads(done.stdout)
    rows = []
    for name, key in ((TORCH_SAVE, "save"), (TORCH_LOAD, "load")):
        samples: dict[str, list[float]] = defaultdict(list)
        for label, values in seconds[key].items():
            samples[label] = [size_bytes / value / 1e9 for value in values]
        rows.append(Row(name, "GB/s", True, dict(samples)))
    return rows
