"""`ckptfs doctor`: what of this machine decides whether, and in which lane, a mount will work.

What it keeps true: each finding says what was found and, unless all is well, what to do. "fail" is kept for
what stops every mount; what makes one slower or smaller is "warn". Nothing is changed. Judgements are
functions of facts that a test can make up; the functions named check_* gather the facts.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fs import memory
from mount import doctor_probe, fusedev, rundir, sysmount

Level = Literal["ok", "warn", "fail"]

PASSTHROUGH_KERNEL = (6, 9)
OLDEST_KERNEL = (5, 4)
CAP_SYS_ADMIN_BIT = 21
DEFAULT_SHARE = 2  # an arena takes half of the memory unless told otherwise
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
FUSE_CONF = Path("/etc/fuse.conf")
HELPERS = ("/sbin/mount.fuse.ckptfs", "/usr/sbin/mount.fuse.ckptfs")
NEEDED_MODULES = ("pyfuse3", "trio", "msgspec", "xxhash")


class Finding(msgspec.Struct, frozen=True):
    """One check: what was found, and what to do about it ("" when nothing)."""

    check: str
    level: Level
    found: str
    advice: str = ""


def gib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / (1 << 30):.1f} GiB"


# judgements of facts


def parse_release(release: str) -> tuple[int, int]:
    """Major and minor version of a kernel release; (0, 0) when it has none."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def has_capability(status: str, bit: int) -> bool:
    """Whether a capability is in effect, by the text of /proc/PID/status."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> bit & 1)


def in_first_user_namespace(uid_map: str) -> bool:
    """Whether uids are what they are outside, by the text of /proc/PID/uid_map."""
    return uid_map.split() == ["0", "0", "4294967295"]


def chosen(text: str) -> str:
    """The value in brackets of a sysfs choice such as "always [never] deny"."""
    match = re.search(r"\[(\S+)\]", text)
    return match[1] if match else ""


def judge_kernel(release: str) -> Finding:
    """Passthrough and resend came with 6.9."""
    version = parse_release(release)
    if version >= PASSTHROUGH_KERNEL:
        return Finding("kernel", "ok", f"Linux {release}: has passthrough and resend (6.9)")
    if version >= OLDEST_KERNEL:
        return Finding(
            "kernel",
            "warn",
            f"Linux {release}: no FUSE passthrough",
            "mounts use the plain lane (slower, same semantics); Linux 6.9 or later has passthrough",
        )
    return Finding(
        "kernel", "fail", f"Linux {release}: too old", "use Linux 5.4 or later, best 6.9 or later"
    )


def judge_passthrough(version: tuple[int, int], admin: bool, error: str | None) -> Finding:
    """*error*: of the probe, None when it worked or was not tried."""
    name = "passthrough"
    plain = "until then mounts use the plain lane"
    if version < PASSTHROUGH_KERNEL:
        return Finding(name, "warn", "not in this kernel", f"Linux 6.9 or later is needed; {plain}")
    if not admin:
        return Finding(
            name,
            "warn",
            "not allowed: CAP_SYS_ADMIN of the first user namespace is needed",
            f"mount as root; in a container give it --cap-add SYS_ADMIN (Kubernetes: "
            f"securityContext.capabilities.add) without a user namespace of its own; {plain}",
        )
    if error is not None:
        return Finding(
            name,
            "warn",
            f"does not work: {error}",
            f"check CONFIG_FUSE_PASSTHROUGH=y in the kernel's configuration, and that no seccomp or "
            f"security module forbids it; {plain}",
        )
    return Finding(name, "ok", "works (a backing file was registered on a trial mount)")


def judge_privileges(uid: int, fusermount: str | None, conf: str) -> list[Finding]:
    """Root mounts itself; others through fusermount3, which obeys /etc/fuse.conf."""
    if uid == 0:
        return [Finding("privileges", "ok", "root")]
    if fusermount is None:
        found = f"uid {uid}, and fusermount3 is not installed"
        return [Finding("privileges", "fail", found, "install the package fuse3, or mount as root")]
    findings = [
        Finding(
            "privileges",
            "warn",
            f"uid {uid}, mounting through {fusermount}",
            "works in the plain lane with the arena in /dev/shm; root has passthrough and its own tmpfs",
        )
    ]
    if any(line.strip() == "user_allow_other" for line in conf.splitlines()):
        findings.append(Finding("fuse.conf", "ok", f"{FUSE_CONF} has user_allow_other"))
    else:
        findings.append(
            Finding(
                "fuse.conf",
                "warn",
                f"{FUSE_CONF} lacks user_allow_other: only uid {uid} can use its mounts, not even root",
                f"let root add the line user_allow_other to {FUSE_CONF}",
            )
        )
    return findings


def judge_huge_tmpfs(enabled: str, error: OSError | None, root: bool) -> Finding:
    """*enabled*: the value of shmem_enabled; *error*: of mounting a tmpfs with huge=within_size."""
    name = "huge tmpfs"
    if not root:
        found = "not tried: only root can mount the arena's tmpfs"
        return Finding(name, "warn", found, "mount as root for an arena that fills twice as fast")
    if enabled == "deny":
        return Finding(
            name,
            "warn",
            f"{SHMEM_ENABLED} is deny: the arena gets small pages and fills at half the speed",
            f"echo never > {SHMEM_ENABLED} (mounts that ask for huge pages then get them)",
        )
    if error is not None:
        return Finding(
            name,
            "warn",
            f"a tmpfs with huge=within_size cannot be mounted: {os.strerror(error.errno or 0)}",
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE; the arena works without, at half the speed",
        )
    return Finding(name, "ok", "a tmpfs with huge=within_size mounts")


def judge_memory(
    limit_bytes: int, available_bytes: int, kept: Sequence[tuple[str, int]]
) -> Finding:
    """*kept*: name and bytes used of the arenas that exist."""
    wanted_bytes = limit_bytes // DEFAULT_SHARE
    held = ", ".join(f"{name} {gib(used)}" for name, used in kept)
    found = f"{gib(available_bytes)} available of {gib(limit_bytes)}"
    found += f"; arenas hold {held}" if held else ""
    if available_bytes < wanted_bytes:
        return Finding(
            "memory",
            "warn",
            f"{found}: less than an arena of the default size (50%: {gib(wanted_bytes)}) can take",
            f"mount with --size {max(1, (available_bytes >> 30) * 3 // 4)}GiB or less, or free memory",
        )
    return Finding("memory", "ok", f"{found}; the default arena is {gib(wanted_bytes)}")


def judge_cgroups(limits: Iterable[memory.CgroupLimit], total_bytes: int) -> list[Finding]:
    """Limits that bind: an arena's pages count against the cgroup of the process that writes them."""
    binding = [limit for limit in limits if limit.limit_bytes < total_bytes]
    if not binding:
        return [Finding("cgroup", "ok", "no memory limit below this node's RAM")]
    return [
        Finding(
            "cgroup",
            "warn",
            f"{limit.path} allows {gib(limit.limit_bytes)}, {gib(limit.free_bytes)} of it are free",
            "what is written to the mount counts there, for whoever writes it: choose --size below "
            "the limit less what the job needs, or raise the limit (Kubernetes: resources.limits.memory)",
        )
        for limit in binding
    ]


def judge_swap(meminfo: dict[str, int]) -> Finding:
    """tmpfs pages may be swapped out."""
    total = meminfo.get("SwapTotal", 0)
    if total:
        return Finding(
            "swap",
            "warn",
            f"{gib(total)} of swap: under pressure checkpoints may go to disk",
            "turn it off (swapoff -a), or keep the arena well below the free memory",
        )
    return Finding("swap", "ok", "none: what is in the arena stays in RAM")


# gathering of facts


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def check_kernel() -> list[Finding]:
    """The kernel's version."""
    return [judge_kernel(platform.release())]


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
    version = parse_release(platform.release())
    first = in_first_user_namespace(_text("/proc/self/uid_map"))
    admin = first and has_capability(_text("/proc/self/status"), CAP_SYS_ADMIN_BIT)
    error = None
    if admin and version >= PASSTHROUGH_KERNEL:
        try:
            error = doctor_probe.passthrough()
        except OSError as failure:
            error = f"{failure.filename or 'the trial mount'}: {failure.strerror}"
    return [judge_passthrough(version, admin, error)]


def check_privileges() -> list[Finding]:
    """Who we are, and what that needs."""
    return judge_privileges(os.getuid(), shutil.which("fusermount3"), _text(FUSE_CONF))


def check_huge_tmpfs() -> list[Finding]:
    """A trial mount."""
    root = os.getuid() == 0
    error = doctor_probe.huge_tmpfs() if root else None
    return [judge_huge_tmpfs(chosen(_text(SHMEM_ENABLED)), error, root)]


def check_memory() -> list[Finding]:
    """RAM, cgroups, swap."""
    kept = [
        (run.name, shutil.disk_usage(run.arena).used)
        for run in rundir.all_run_dirs()
        if run.arena.is_dir() and os.path.ismount(run.arena)
    ]
    meminfo = memory.meminfo()
    return [
        judge_memory(memory.memory_limit_bytes(), memory.available_bytes(), kept),
        *judge_cgroups(memory.cgroup_limits(), meminfo["MemTotal"]),
        judge_swap(meminfo),
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
        if run.has_data() and run.state() == "unmounted":
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
