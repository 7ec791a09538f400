"""`ckptfs doctor`: what of this machine decides whether, and in which lane, a mount will work.

What it keeps true: nothing is changed, trial mounts are gone when it ends, and a check that cannot be made
is a finding of its own. The functions here gather facts; doctor_rules judges them.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from fs import memory
from mount import doctor_probe, doctor_rules, fusedev, rundir, sysmount
from mount.doctor_rules import Finding, gib

CAP_SYS_ADMIN_BIT = 21
HELPERS = ("/sbin/mount.fuse.ckptfs", "/usr/sbin/mount.fuse.ckptfs")
NEEDED_MODULES = ("pyfuse3", "trio", "msgspec", "xxhash")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _may_mount() -> bool:
    return os.getuid() == 0 and doctor_rules.has_capability(
        _text("/proc/self/status"), CAP_SYS_ADMIN_BIT
    )


def check_kernel() -> list[Finding]:
    """The kernel's version."""
    return [doctor_rules.judge_kernel(platform.release())]


def check_device() -> list[Finding]:
    """/dev/fuse."""
    name = "/dev/fuse"
    if not os.path.exists(fusedev.DEVICE):
        advice = "modprobe fuse; in a container, pass the device: docker run --device /dev/fuse"
        return [Finding(name, "fail", "not there", advice)]
    try:
        os.close(os.open(fusedev.DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if os.getuid() and shutil.which("fusermount3"):
            return [Finding(name, "ok", "there; fusermount3 opens it")]
        advice = "check its mode (0666 is usual) and the container's device rules"
        return [Finding(name, "fail", f"cannot be opened: {error.strerror}", advice)]
    return [Finding(name, "ok", "there, and can be opened")]


def check_passthrough() -> list[Finding]:
    """A trial mount, where it may be tried."""
    version = doctor_rules.parse_release(platform.release())
    admin = _may_mount() and doctor_rules.in_first_user_namespace(_text("/proc/self/uid_map"))
    error = None
    if admin and version >= doctor_rules.PASSTHROUGH_KERNEL:
        try:
            error = doctor_probe.passthrough()
        except OSError as failure:
            error = f"{failure.filename or 'the trial mount'}: {failure.strerror}"
    return [doctor_rules.judge_passthrough(version, admin, error)]


def check_privileges() -> list[Finding]:
    """Who we are, and what that needs."""
    fusermount = shutil.which("fusermount3")
    return doctor_rules.judge_privileges(
        os.getuid(), _may_mount(), fusermount, _text(doctor_rules.FUSE_CONF)
    )


def check_huge_tmpfs() -> list[Finding]:
    """A trial mount."""
    may_mount = _may_mount()
    error = doctor_probe.huge_tmpfs() if may_mount else None
    return [
        doctor_rules.judge_huge_tmpfs(
            doctor_rules.chosen(_text(doctor_rules.SHMEM_ENABLED)), error, may_mount
        )
    ]


def check_memory() -> list[Finding]:
    """RAM, cgroups, swap."""
    kept = [
        (run.name, shutil.disk_usage(run.arena).used)
        for run in rundir.all_run_dirs()
        if run.arena.is_dir() and os.path.ismount(run.arena)
    ]
    meminfo = memory.meminfo()
    return [
        doctor_rules.judge_memory(memory.memory_limit_bytes(), memory.available_bytes(), kept),
        *doctor_rules.judge_cgroups(memory.cgroup_limits(), meminfo["MemTotal"]),
        doctor_rules.judge_swap(meminfo),
    ]


def check_leftovers() -> list[Finding]:
    """Mounts whose supervisor is gone, and arenas that nobody serves."""
    findings = []
    for entry in sysmount.mounts():
        if entry.kind != sysmount.FUSE_TYPE or not entry.source.startswith("ckptfs:"):
            continue
        if sysmount.is_dead(entry.target):
            advice = f"`ckptfs mount {entry.target}` brings its files back, `ckptfs umount {entry.target}` ends it"
            findings.append(Finding("leftovers", "warn", f"{entry.target}: a dead mount", advice))
    for run in rundir.all_run_dirs():
        mounted = any(
            entry.source == fusedev.source_of(run.name) and entry.target == run.mountpoint()
            for entry in sysmount.mounts()
        )
        if run.has_data() and not run.is_live() and not mounted:
            used = shutil.disk_usage(run.arena).used if os.path.ismount(run.arena) else 0
            place = run.mountpoint() or "MOUNTPOINT"
            advice = (
                f"`ckptfs mount {place} --name {run.name}` brings its files back, "
                f"`ckptfs umount {run.name} --discard` frees the memory"
            )
            found = f"{run.path}: an arena nobody serves, {gib(used)}"
            findings.append(Finding("leftovers", "warn", found, advice))
    return findings or [Finding("leftovers", "ok", "no dead mount, no arena without a supervisor")]


def check_helper() -> list[Finding]:
    """What mount(8) and /etc/fstab need."""
    for path in HELPERS:
        if os.access(path, os.X_OK):
            return [Finding("mount helper", "ok", path)]
    advice = (
        "`ckptfs install-helper` writes it (needed for mount -t fuse.ckptfs and /etc/fstab only)"
    )
    return [Finding("mount helper", "warn", f"{HELPERS[0]} is missing", advice)]


def check_python() -> list[Finding]:
    """The libraries that a worker imports."""
    versions = []
    for name in NEEDED_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            advice = f"install it for this Python: pip install {name}"
            if name == "pyfuse3":
                advice += " (to build it: packages libfuse3-dev, pkg-config and a C compiler)"
            return [Finding("libraries", "fail", f"{name}: {error}", advice)]
        versions.append(f"{name} {getattr(module, '__version__', '')}".strip())
    return [Finding("libraries", "ok", ", ".join(versions))]


def check_mountpoint(mountpoint: str) -> list[Finding]:
    """The directory somebody wants to mount on, or has mounted on."""
    name = "mountpoint"
    if sysmount.is_dead(mountpoint):
        advice = f"`ckptfs mount {mountpoint}` clears it and brings the files back"
        return [Finding(name, "warn", f"{mountpoint}: a dead mount", advice)]
    if not os.path.isdir(mountpoint):
        return [Finding(name, "fail", f"{mountpoint}: no directory", f"mkdir -p {mountpoint}")]
    entry = sysmount.mount_at(os.path.realpath(mountpoint))
    if entry is not None and entry.kind == sysmount.FUSE_TYPE:
        state = rundir.find(mountpoint).supervisor()
        lane = state.lane if state is not None else "unknown"
        found = f"{mountpoint}: mounted, {lane} lane"
        if lane == "plain":
            advice = "see the finding on passthrough; `ckptfs umount` and mount again to change it"
            return [Finding(name, "warn", found, advice)]
        return [Finding(name, "ok", found)]
    if entry is None and os.listdir(mountpoint):
        advice = "choose an empty directory, or mount with --nonempty (what is in it is hidden)"
        return [Finding(name, "warn", f"{mountpoint}: not empty", advice)]
    return [Finding(name, "ok", f"{mountpoint}: can be mounted on")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_kernel,
    check_device,
    check_privileges,
    check_passthrough,
    check_huge_tmpfs,
    check_memory,
    check_leftovers,
    check_helper,
    check_python,
)


def run_checks(mountpoint: str | None = None) -> list[Finding]:
    """Every check; one that cannot be made is a warning of its own."""
    findings = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings += check()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            findings.append(Finding(name, "warn", f"could not be checked: {where}{error.strerror}"))
    if mountpoint is not None:
        findings += check_mountpoint(mountpoint)
    return findings
