"""The examples do what they say: the loop resumes exactly, and the quickstart ends clean, also when interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.frameworks import lib

EXAMPLES = harness.REPO_ROOT / "examples"
TRAIN = (sys.executable, EXAMPLES / "train.py")
OPTIONS = ("--steps", "60", "--every", "5", "--keep", "2", "--width", "256")


def last_line(output: str) -> str:
    return output.splitlines()[-1]


def kill_after(directory: Path, checkpoint: str) -> None:
    """Train until a checkpoint of that name is there, then SIGKILL, at no particular moment."""
    command = [*map(str, TRAIN), str(directory), *OPTIONS, "--pause-s", "0.01"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **lib.ENVIRONMENT},
        start_new_session=True,
    )
    try:
        # Newer ones count as well: `keep` removes those that this loop may not have seen.
        seen = lambda: any(p.name >= checkpoint for p in directory.glob("step-*.pt"))  # noqa: E731
        harness.wait_until(seen, 60, f"{checkpoint} of train.py", interval_s=0.005)
        assert process.poll() is None, "was done before it could be killed"
    finally:
        lib.kill_session(process)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lane", ["passthrough"], indirect=True)
def test_train_killed_and_resumed(torch: Any, ckpt: Path, tmpfs_dir: Path) -> None:
    uninterrupted = last_line(lib.run(*TRAIN, tmpfs_dir / "run", *OPTIONS))
    assert re.fullmatch(r"done: step 60, loss [0-9.e-]+", uninterrupted)

    run = ckpt / "run"
    kill_after(run, "step-000010.pt")
    kill_after(run, "step-000030.pt")
    output = lib.run(*TRAIN, run, *OPTIONS)
    assert output.startswith("resumed from step-0000")
    assert last_line(output) == uninterrupted
    assert sorted(path.name for path in run.iterdir()) == ["step-000055.pt", "step-000060.pt"]
    # Once more: nothing left to do, and it says the same.
    assert last_line(lib.run(*TRAIN, run, *OPTIONS)) == uninterrupted


def test_train_removes_what_it_could_not_finish(torch: Any, ckpt: Path) -> None:
    (ckpt / "step-000003.pt.tmp").write_bytes(b"half a checkpoint")
    output = lib.run(*TRAIN, ckpt, "--steps", "4", "--every", "2", "--width", "16")
    assert output.startswith("starting anew")
    assert sorted(path.name for path in ckpt.iterdir()) == ["step-000002.pt", "step-000004.pt"]


@pytest.fixture
def quickstart_env(torch: Any, tmp_path: Path) -> dict[str, str]:
    """Both virtual environments are the one we run in: installing is what tests/run.sh shows already."""
    reason = harness.why_no_passthrough()
    if reason is not None:
        pytest.fail(reason) if harness.in_ci() else pytest.skip(reason)
    if not (Path(sys.prefix) / "bin" / "ckptfs").exists():
        pytest.skip("the package is not installed in this environment; tests/run.sh installs it")
    # Short, for the socket in it.
    run_dir = harness.session_base() / "quickstart"
    return {
        "QUICKSTART_DAEMON_VENV": sys.prefix,
        "QUICKSTART_TRAIN_VENV": sys.prefix,
        "QUICKSTART_SIZE": "1GiB",
        "CKPTFS_RUN_DIR": str(run_dir),
        "PYTHONPATH": str(harness.REPO_ROOT),
    }


def assert_nothing_left(env: dict[str, str], mountpoint: Path) -> None:
    run_dir = Path(env["CKPTFS_RUN_DIR"])
    assert not mountpoint.exists(), "it removes the directory that it made"
    assert harness.mounts_under(mountpoint.parent) == []
    assert harness.mounts_under(run_dir) == []
    harness.wait_until(lambda: not harness.pids_carrying(str(run_dir)), 10, "the daemons' end")


@pytest.mark.mount
@pytest.mark.timeout(180)
def test_quickstart(quickstart_env: dict[str, str], tmp_path: Path) -> None:
    mountpoint = tmp_path / "ckpt"
    output = lib.run(EXAMPLES / "quickstart.sh", mountpoint, env=quickstart_env, timeout_s=120)
    assert "every value is as it was saved" in output
    assert "resumed from step-0000" in output
    assert "model.pt" in output
    assert last_line(output) == "== done"
    assert_nothing_left(quickstart_env, mountpoint)


@pytest.mark.mount
def test_quickstart_interrupted(quickstart_env: dict[str, str], tmp_path: Path) -> None:
    mountpoint = tmp_path / "ckpt"
    process = subprocess.Popen(
        [EXAMPLES / "quickstart.sh", mountpoint],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **quickstart_env},
        start_new_session=True,
    )
    try:
        harness.wait_until(lambda: os.path.ismount(mountpoint), 30, "the mount")
        time.sleep(1)  # into whatever it does next
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        lib.kill_session(process)
    assert_nothing_left(quickstart_env, mountpoint)
