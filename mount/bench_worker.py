"""What replacing the worker costs an application, and what a file costs the worker.

What it keeps true: the pause is what a thread sees that never stops doing metadata operations:
the longest time between two answers, whatever the reason. A kill waits for the standby to be
ready, since the promise is made for that. An error that reaches the thread ends the measurement:
no restart may cause one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fs.errors import CkptfsError
from mount import lifecycle, rundir
from mount.bench_report import MEMORY, MOUNT, PAUSE_KILL, PAUSE_RESTART, Row

READY_S = 60.0
POLL_S = 0.01
FILES_PER_DIRECTORY = 1000

Say = Callable[[str], None]


class Load:
    """A thread that makes, renames and removes files; keeps the longest time without an answer."""

    def __init__(self, directory: Path) -> None:
        self.error: OSError | None = None
        self.longest_s = 0.0
        self.answers = 0
        self._directory = directory
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="bench-load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(READY_S)

    def _run(self) -> None:
        path, other = f"{self._directory}/load", f"{self._directory}/load.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        last_s = time.perf_counter()
        try:
            while not self._stop:
                fd = os.open(path, flags, 0o600)
                last_s = self._answered(last_s)
                os.close(fd)
                last_s = self._answered(last_s)
                os.rename(path, other)
                last_s = self._answered(last_s)
                os.unlink(other)
                last_s = self._answered(last_s)
        except OSError as error:
            self.error = error

    def _answered(self, last_s: float) -> float:
        now_s = time.perf_counter()
        self.longest_s = max(self.longest_s, now_s - last_s)
        self.answers += 1
        return now_s

    def wait_answers(self, count: int) -> None:
        """Until that many more answers have come. CkptfsError on an error, or when none come."""
        wanted, deadline_s = self.answers + count, time.monotonic() + READY_S
        while self.answers < wanted:
            if self.error is not None:
                raise CkptfsError(f"an application saw an error in a restart: {self.error}")
            if time.monotonic() > deadline_s:
                raise CkptfsError(f"no answer for {READY_S:.0f} s after a restart of the worker")
            time.sleep(POLL_S)


def _ready(run: rundir.RunDir, unlike_pid: int | None = None) -> rundir.SupervisorState:
    """The state once there are a worker (another than *unlike_pid*) and a standby."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        state = run.supervisor()
        if (
            state is not None
            and state.worker_pid not in (None, unlike_pid)
            and state.standby_pid is not None
        ):
            return state
        time.sleep(POLL_S)
    raise CkptfsError(f"{run.mountpoint()}: no worker with a standby within {READY_S:.0f} s")


def pauses(
    mountpoint: str, directory: Path, kills: int, chance: random.Random, say: Say
) -> list[Row]:
    """Milliseconds without an answer, for each kill -9 of the worker and each planned restart."""
    run = rundir.find(mountpoint)
    killed: list[float] = []
    planned: list[float] = []
    with Load(directory) as load:
        load.wait_answers(100)
        for number in range(kills):
            say(f"worker restarts, {number + 1} of {kills}")
            killed.append(_pause_ms(run, load, chance, lambda pid: os.kill(pid, signal.SIGKILL)))
            planned.append(
                _pause_ms(
                    run, load, chance, lambda _: lifecycle.restart(mountpoint, timeout_s=READY_S)
                )
            )
    return [
        Row(PAUSE_KILL, "ms", False, {MOUNT: killed}),
        Row(PAUSE_RESTART, "ms", False, {MOUNT: planned}),
    ]


def _pause_ms(
    run: rundir.RunDir, load: Load, chance: random.Random, restart: Callable[[int], object]
) -> float:
    pid = _ready(run).worker_pid
    assert pid is not None
    time.sleep(chance.uniform(0.05, 0.15))
    load.wait_answers(10)
    load.longest_s = 0.0
    restart(pid)
    _ready(run, unlike_pid=pid)
    load.wait_answers(100)
    return load.longest_s * 1e3


def _anonymous_bytes(pid: int | None) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise CkptfsError(f"/proc/{pid}/status does not say RssAnon")


def _index_bytes(run: rundir.RunDir) -> int:
    return sum(path.stat().st_blocks * 512 for path in run.index.iterdir())


def memory_per_file(mountpoint: str, directory: Path, files: int, say: Say) -> list[Row]:
    """Bytes that a file costs beside its contents: the worker's own memory, and the index.

    A fresh worker is measured, so that memory freed before is not taken for none.
    """
    run = rundir.find(mountpoint)
    _ready(run)
    lifecycle.restart(mountpoint, timeout_s=READY_S)
    state = _ready(run)
    say(f"memory of {files} files")
    processes = (state.worker_pid, state.supervisor_pid)
    for path in (directory / "first", directory / "files"):
        path.mkdir()
    _make_files(directory / "first", 200)  # what a worker allocates once
    anonymous, index = [_anonymous_bytes(pid) for pid in processes], _index_bytes(run)
    _make_files(directory / "files", files)
    worker, supervisor = (
        (_anonymous_bytes(pid) - before) / files
        for pid, before in zip(processes, anonymous, strict=True)
    )
    index_share = (_index_bytes(run) - index) / files
    for path in (directory / "first", directory / "files"):
        shutil.rmtree(path)
    parts = {
        MEMORY: worker + supervisor + index_share,
        f"{MEMORY}, worker": worker,
        f"{MEMORY}, supervisor": supervisor,
        f"{MEMORY}, index": index_share,
    }
    return [Row(name, "bytes", False, {MOUNT: [value]}) for name, value in parts.items()]


def _make_files(directory: Path, count: int) -> None:
    for number in range(count):
        inside = f"{directory}/{number // FILES_PER_DIRECTORY}"
        if number % FILES_PER_DIRECTORY == 0:
            os.mkdir(inside)
        path = f"{inside}/checkpoint-{number:08d}.pt"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.stat(path)
