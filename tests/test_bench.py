"""`ckptfs bench`: what it reports is what it measured, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mount import bench_io, bench_meta, bench_report, bench_targets
from mount.bench import BenchOptions, run_bench
from mount.bench_report import (
    ARENA,
    BASELINE,
    CYCLE,
    MEMORY,
    MOUNT,
    PAUSE_KILL,
    PAUSE_RESTART,
    READ_1M,
    SHM,
    WRITE_1M,
    BenchReport,
    Goal,
    Row,
    goals_of,
    judge,
    percentile,
)
from mount.bench_targets import PREFIX, Target
from tests.harness import REPO_ROOT

TINY = {"size_bytes": 4 << 20, "rounds": 1, "operations": 20, "entries": 200, "torch": False}


def left_in(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.glob(f"{PREFIX}*")]


# judging


def row(name: str, **samples: list[float]) -> Row:
    return Row(name, "u", True, {MOUNT: samples["ours"], SHM: samples.get("shm", [])})


def test_percentile_is_one_of_the_samples():
    assert percentile([5.0], 99) == 5.0
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 21), 99) == 20
    assert percentile([3, 1, 2], 50) == 2


def test_goals_are_held_to_medians_and_a_slow_outlier_does_not_decide():
    goal = Goal("write", SHM, True, 2.0)
    (verdict,) = judge([row("write", ours=[4, 4, 0.1], shm=[2, 2, 9])], [goal])
    assert (verdict.reached, verdict.met) == (2.0, True)
    (verdict,) = judge([row("write", ours=[3.9], shm=[2])], [goal])
    assert verdict.met is False
    (verdict,) = judge([row("cycle", ours=[6], shm=[2])], [Goal("cycle", SHM, False, 2.5)])
    assert (verdict.reached, verdict.met) == (3.0, False)


def test_a_pause_is_judged_by_its_worst_percent():
    goal = Goal("pause", "", False, 300, "p99")
    (verdict,) = judge([row("pause", ours=[10.0] * 19 + [301.0])], [goal])
    assert (verdict.reached, verdict.met) == (301.0, False)


def test_what_was_not_measured_is_not_met():
    verdicts = judge(
        [row("write", ours=[4])], [Goal("write", SHM, True, 2), *goals_of("passthrough")]
    )
    assert {verdict.met for verdict in verdicts} == {None}


def test_tables_show_ratios_and_misses():
    rows = [row(WRITE_1M, ours=[4.0], shm=[2.0]), row(READ_1M, ours=[1.0], shm=[2.0])]
    report = BenchReport({}, {}, rows, judge(rows, goals_of("passthrough")), [])
    measures = bench_report.measures_table(report)
    assert list(measures.columns[-1].cells) == ["2.00", "0.50"]
    goals = bench_report.goals_table(report)
    assert set(goals.columns[-1].cells) == {"met", "[red]missed[/red]", "not measured"}


# measuring


def test_files_are_written_and_read_whole(tmp_path):
    block = memoryview(bytearray(b"x" * 4096))
    assert bench_io.write_file(tmp_path / "f", 10 * 4096, block) > 0
    assert (tmp_path / "f").read_bytes() == bytes(block) * 10
    assert bench_io.read_file(tmp_path / "f", 10 * 4096, block) > 0
    with pytest.raises(OSError, match="short read"):
        bench_io.read_file(tmp_path / "f", 11 * 4096, block)


def test_each_round_visits_each_target_once_in_an_order_of_its_own(tmp_path):
    targets = [Target(str(number), tmp_path) for number in range(6)]
    orders = [[], [], [], []]
    for number, target in bench_meta.rounds_of(targets, 3, random.Random(1)):
        orders[number].append(target.label)
    assert [sorted(order) for order in orders] == [list("012345")] * 4
    assert len({tuple(order) for order in orders}) > 1


def test_an_incomplete_listing_is_an_error_and_not_a_fast_one(tmp_path):
    bench_meta.fill(tmp_path / "d", 5)
    assert bench_meta.scan_ms(tmp_path / "d", 5) > 0
    assert bench_meta.ls_ms(tmp_path / "d", 5) > 0
    with pytest.raises(RuntimeError, match="5 entries"):
        bench_meta.scan_ms(tmp_path / "d", 6)
    with pytest.raises(RuntimeError, match="5 of 6"):
        bench_meta.ls_ms(tmp_path / "d", 6)


def test_without_a_mount_the_other_targets_are_measured(tmp_path):
    options = BenchOptions(directories=(str(tmp_path),), baseline=False, seed=7, **TINY)
    report = run_bench(options)
    assert report.settings["seed"] == "7"
    assert report.verdicts == []
    for measured in report.rows:
        assert set(measured.samples) == {SHM, str(tmp_path)}, measured.name
        assert all(len(samples) == 1 for samples in measured.samples.values())
    assert left_in(Path("/dev/shm"), tmp_path) == []


# leaving nothing behind


def test_what_a_killed_bench_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path):
    dead = subprocess.run(["true"], check=True) and tmp_path / f"{PREFIX}{2**22 + 1}-x"
    (dead / "sub").mkdir(parents=True)
    living = tmp_path / f"{PREFIX}{os.getpid()}-y"
    living.mkdir()
    with bench_targets.directory_in(tmp_path) as path:
        assert sorted(left_in(tmp_path)) == sorted([living, path])
    assert left_in(tmp_path) == [living]


def bench_command(mount, *arguments: str) -> list[str]:
    code = "from mount.bench_cli import bench; bench()"
    tiny = ["--size-mib", "4", "--rounds", "1", "--operations", "20", "--entries", "200"]
    return [sys.executable, "-c", code, str(mount.path), *tiny, "--no-torch", *arguments]


def test_the_report_has_every_row_and_nothing_is_left(make_mount):
    mount = make_mount(size="256MiB")
    command = bench_command(mount, "--restarts", "2", "--memory-files", "300", "--json")
    done = subprocess.run(
        command, env=mount.env, cwd=REPO_ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {measured["name"]: measured["samples"] for measured in report["rows"]}
    blocks = ("4 KiB", "64 KiB", "1 MiB")
    for name in [f"{verb} {block}" for verb in ("write", "read") for block in blocks]:
        assert set(rows[name]) == {MOUNT, ARENA, SHM}, name
    singles = [name for name, _ in bench_meta.SINGLE]
    for name in (CYCLE, *singles, "ls -l again", "ls -l, nothing cached"):
        assert set(rows[name]) == {MOUNT, SHM, BASELINE}, name
    assert len(rows[PAUSE_KILL][MOUNT]) == 2
    assert len(rows[PAUSE_RESTART][MOUNT]) == 2
    assert len(rows[MEMORY][MOUNT]) == 1
    for name, samples in rows.items():
        if not name.startswith(MEMORY):  # of so few files it may be nothing
            assert min(min(values) for values in samples.values()) > 0, name
    assert len(report["verdicts"]) == len(goals_of(report["settings"]["lane"]))
    assert report["settings"]["lane"] == mount.lane

    assert os.listdir(mount.path) == []
    assert mount.status()["files"] == 0
    assert left_in(Path(mount.status()["arena"]["path"]), Path("/dev/shm"), Path("/tmp")) == []


def test_an_interrupted_bench_cleans_up(make_mount):
    mount = make_mount(size="256MiB")
    command = bench_command(mount, "--restarts", "1000")
    process = subprocess.Popen(
        command, env=mount.env, cwd=REPO_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        seen = b""
        for line in process.stderr:
            seen += line
            if b"worker restarts" in line:
                break
        assert b"worker restarts" in seen, seen
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0, seen
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert os.listdir(mount.path) == []
    assert left_in(Path(mount.status()["arena"]["path"]), Path("/dev/shm"), Path("/tmp")) == []
    assert f"{PREFIX}{process.pid}" not in Path("/proc/self/mounts").read_text()
