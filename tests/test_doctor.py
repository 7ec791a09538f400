"""`ckptfs doctor`: facts made up, and one look at the machine that the tests run on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fs.memory import CgroupLimit
from mount import doctor, doctor_rules
from mount.doctor_rules import Finding
from tests.harness import REPO_ROOT

GIB = 1 << 30


def level(finding: Finding) -> str:
    """Whatever is not well says what to do about it."""
    assert (finding.level == "ok") == (finding.advice == ""), finding
    return finding.level


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.9.0", "ok"),
        ("6.18.44-generic", "ok"),
        ("7.0", "ok"),
        ("6.8.12-amd64", "warn"),
        ("5.15.0-91-generic", "warn"),
        ("4.18.0-553.el8", "fail"),
        ("nonsense", "fail"),
    ],
)
def test_kernel(release, expected):
    assert level(doctor_rules.judge_kernel(release)) == expected


def test_capability_is_read_from_the_effective_set():
    status = "CapPrm:\t000001ffffffffff\nCapEff:\t{}\nCapBnd:\t000001ffffffffff\n"
    assert doctor_rules.has_capability(status.format("000001ffffffffff"), 21)
    assert doctor_rules.has_capability(status.format("0000000000200000"), 21)
    assert not doctor_rules.has_capability(status.format("000001ffffdfffff"), 21)
    assert not doctor_rules.has_capability("", 21)


def test_root_of_a_container_is_not_in_the_first_user_namespace():
    assert doctor_rules.in_first_user_namespace("         0          0 4294967295\n")
    assert not doctor_rules.in_first_user_namespace("         0     100000      65536\n")


def test_passthrough():
    assert level(doctor_rules.judge_passthrough((6, 18), True, None)) == "ok"
    assert level(doctor_rules.judge_passthrough((6, 6), True, None)) == "warn"
    without = doctor_rules.judge_passthrough((6, 18), False, None)
    assert level(without) == "warn"
    assert "CAP_SYS_ADMIN" in without.found
    failing = doctor_rules.judge_passthrough((6, 18), True, "registering a backing file: EPERM")
    assert level(failing) == "warn"
    assert "registering a backing file: EPERM" in failing.found


def test_privileges():
    (root,) = doctor_rules.judge_privileges(0, True, None, "")
    assert level(root) == "ok"
    (powerless,) = doctor_rules.judge_privileges(0, False, "/usr/bin/fusermount3", "")
    assert level(powerless) == "fail"
    (helpless,) = doctor_rules.judge_privileges(1000, False, None, "user_allow_other\n")
    assert level(helpless) == "fail"
    assert "fuse3" in helpless.advice
    allowed = doctor_rules.judge_privileges(
        1000, False, "/usr/bin/fusermount3", "user_allow_other\n"
    )
    assert [level(finding) for finding in allowed] == ["warn", "ok"]
    commented = doctor_rules.judge_privileges(
        1000, False, "/usr/bin/fusermount3", "#user_allow_other\n"
    )
    assert [level(finding) for finding in commented] == ["warn", "warn"]


def test_huge_tmpfs():
    assert doctor_rules.chosen("always within_size advise [never] deny force\n") == "never"
    assert level(doctor_rules.judge_huge_tmpfs("never", None, True)) == "ok"
    denied = doctor_rules.judge_huge_tmpfs("deny", None, True)
    assert level(denied) == "warn"
    assert "shmem_enabled" in denied.advice
    refused = OSError(errno.EINVAL, "Invalid argument")
    assert level(doctor_rules.judge_huge_tmpfs("", refused, True)) == "warn"
    assert level(doctor_rules.judge_huge_tmpfs("never", None, False)) == "warn"


def test_memory_is_held_against_the_default_arena():
    assert level(doctor_rules.judge_memory(24 * GIB, 12 * GIB, [])) == "ok"
    tight = doctor_rules.judge_memory(24 * GIB, 8 * GIB, [("mnt-ckpt", 10 * GIB)])
    assert level(tight) == "warn"
    assert "mnt-ckpt 10.0 GiB" in tight.found
    assert "--size 6GiB" in tight.advice


def test_only_cgroups_that_bind_are_reported():
    loose = CgroupLimit("/sys/fs/cgroup/big", 100 * GIB, 0, 0)
    tight = CgroupLimit("/sys/fs/cgroup/pod", 4 * GIB, 3 * GIB, GIB // 2)
    assert [level(f) for f in doctor_rules.judge_cgroups([loose], 24 * GIB)] == ["ok"]
    (finding,) = doctor_rules.judge_cgroups([loose, tight], 24 * GIB)
    assert level(finding) == "warn"
    assert "/sys/fs/cgroup/pod allows 4.0 GiB, 1.5 GiB of it are free" in finding.found


def test_swap():
    assert level(doctor_rules.judge_swap({"SwapTotal": 0})) == "ok"
    assert level(doctor_rules.judge_swap({"SwapTotal": 8 * GIB})) == "warn"


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    def check_broken() -> list[Finding]:
        raise OSError(errno.EACCES, "Permission denied", "/somewhere")

    monkeypatch.setattr(doctor, "CHECKS", (check_broken, doctor.check_kernel))
    broken, kernel = doctor.run_checks()
    assert (broken.check, broken.level) == ("broken", "warn")
    assert "/somewhere: Permission denied" in broken.found
    assert kernel.check == "kernel"


def test_missing_device(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.fusedev, "DEVICE", str(tmp_path / "fuse"))
    (finding,) = doctor.check_device()
    assert level(finding) == "fail"


def test_missing_library(monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED_MODULES", ("no_such_library",))
    (finding,) = doctor.check_python()
    assert level(finding) == "fail"
    assert "no_such_library" in finding.advice


def test_mountpoints(tmp_path):
    (finding,) = doctor.check_mountpoint(str(tmp_path / "missing"))
    assert level(finding) == "fail"
    (finding,) = doctor.check_mountpoint(str(tmp_path))
    assert level(finding) == "ok"
    (tmp_path / "file").touch()
    (finding,) = doctor.check_mountpoint(str(tmp_path))
    assert level(finding) == "warn"


def doctor_command(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, list[dict]]:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mount.doctor_cli import doctor; doctor()",
            "--json",
            *arguments,
        ],
        cwd=REPO_ROOT,
        env=env or dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def test_the_command_covers_everything_and_leaves_nothing(tmp_path):
    before = Path("/proc/self/mounts").read_text().count("ckptfs-doctor")
    env = dict(os.environ) | {"CKPTFS_RUN_DIR": str(tmp_path)}
    status, findings = doctor_command(env=env)
    checks = {finding["check"] for finding in findings}
    assert checks >= {
        "kernel",
        "/dev/fuse",
        "privileges",
        "passthrough",
        "huge tmpfs",
        "memory",
        "cgroup",
        "swap",
        "leftovers",
        "mount helper",
        "libraries",
    }
    assert status == any(finding["level"] == "fail" for finding in findings)
    assert Path("/proc/self/mounts").read_text().count("ckptfs-doctor") == before


def test_leftovers_are_found_with_the_way_out(make_mount):
    mount = make_mount(size="64MiB")
    (mount.path / "kept").write_bytes(b"x" * 4096)
    _, findings = doctor_command(str(mount.path), env=mount.env)
    assert not [f for f in findings if f["check"] == "leftovers" and mount.name in f["advice"]]
    assert [f["found"] for f in findings if f["check"] == "mountpoint"] == [
        f"{mount.path}: mounted, {mount.lane} lane"
    ]

    mount.kill_supervisor()
    _, findings = doctor_command(str(mount.path), env=mount.env)
    (dead,) = [
        f
        for f in findings
        if f["found"] == f"{mount.path}: a dead mount" and f["check"] == "leftovers"
    ]
    assert f"ckptfs mount {mount.path}" in dead["advice"]

    mount.cli("umount", str(mount.path))
    _, findings = doctor_command(env=mount.env)
    (kept,) = [f for f in findings if f["check"] == "leftovers" and mount.name in f["advice"]]
    assert "nobody serves" in kept["found"]
    assert f"ckptfs umount {mount.name} --discard" in kept["advice"]
