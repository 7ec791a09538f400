"""Helpers of the framework tests: optional imports, and processes that never outlive their deadline.

Frameworks are imported when a test asks for them, not when it is collected, so that the quick tests stay quick and a
machine without torch can still run the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import harness

JOBS = Path(__file__).parent / "jobs"
# Two cores are what the tests are planned for; more threads only fight each other. Nothing may ask a network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}
# Rendezvous of local processes must not depend on how the machine's name resolves.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def need(module: str) -> Any:
    """The module, or a skip that says what is missing; in CI nothing may be missing."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        if harness.in_ci():
            raise
        pytest.skip(f"{module} is not installed ({exc}); tests/run.sh installs it")


def need_command(command: str) -> str:
    """The path of a command, or a skip; in CI nothing may be missing."""
    found = shutil.which(command)
    if found is None:
        message = f"{command} is not installed; tests/run.sh installs it"
        pytest.fail(message) if harness.in_ci() else pytest.skip(message)
    return str(found)


def run(
    *command: str | os.PathLike[str],
    timeout_s: float = 60,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command to its end; its output. AssertionError with the output when it fails or takes too long."""
    return run_all([command], timeout_s=timeout_s, cwd=cwd, envs=[env or {}])[0]


def run_all(
    commands: Sequence[Sequence[str | os.PathLike[str]]],
    *,
    timeout_s: float,
    envs: Sequence[Mapping[str, str]],
    cwd: Path | None = None,
) -> list[str]:
    """Run commands at the same time; their outputs (stdout and stderr together) in order.

    Each is a session of its own, so that at the deadline everything it started ends with it. Output goes to files: a
    full pipe cannot block a process, nor a forgotten child keep us waiting.
    """
    outputs = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115 closed below
    processes: list[subprocess.Popen[bytes]] = []
    late = False
    try:
        for command, env, output in zip(commands, envs, outputs, strict=True):
            processes.append(
                subprocess.Popen(
                    [os.fspath(part) for part in command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=cwd,
                    env={**os.environ, **ENVIRONMENT, **env},
                    start_new_session=True,
                )
            )
        try:
            _wait(processes, timeout_s)
        except AssertionError:
            late = True
    finally:
        for process in processes:
            kill_session(process)
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read().decode(errors="replace"))
        output.close()
    codes = [process.returncode for process in processes]
    if late or any(codes):
        shown = "\n".join(
            f"--- {' '.join(map(str, command))}: exit status {code}\n{text[-6000:]}"
            for command, code, text in zip(commands, codes, texts, strict=True)
        )
        raise AssertionError(f"{f'not done within {timeout_s} s' if late else 'failed'}:\n{shown}")
    return texts


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Until all have ended, or one has failed: the others would only wait for it."""

    def ended() -> bool:
        codes = [process.poll() for process in processes]
        return None not in codes or any(codes)

    harness.wait_until(ended, timeout_s, "the end of the processes", interval_s=0.01)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """End a process started with start_new_session, and all it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def jobs(
    name: str, *argument_lists: Sequence[str | os.PathLike[str]], timeout_s: float = 100
) -> list[Any]:
    """Run jobs/NAME.py with each list of arguments, side by side; what each one's last line says, in JSON."""
    commands = [(sys.executable, JOBS / f"{name}.py", *arguments) for arguments in argument_lists]
    outputs = run_all(commands, timeout_s=timeout_s, envs=[{}] * len(commands))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def ranks(
    name: str, world_size: int, *arguments: str | os.PathLike[str], timeout_s: float = 100
) -> None:
    """Run jobs/NAME.py as `world_size` processes that find each other as torchrun's would."""
    with tempfile.TemporaryDirectory() as meeting:
        envs = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MEETING_FILE": f"{meeting}/store",
                **LOOPBACK,
            }
            for rank in range(world_size)
        ]
        command = (sys.executable, JOBS / f"{name}.py", *arguments)
        run_all([command] * world_size, timeout_s=timeout_s, envs=envs)
