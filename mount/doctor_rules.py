"""What `ckptfs doctor` makes of the facts: facts in, findings out, no I/O.

What it keeps true: each finding says what was found and, unless all is well, what to do. "fail" is kept for
what stops every mount; what makes one slower or smaller is "warn".
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from fs import memory

Level = Literal["ok", "warn", "fail"]

PASSTHROUGH_KERNEL = (6, 9)
OLDEST_KERNEL = (5, 4)
DEFAULT_SHARE = 2  # an arena takes half of the memory unless told otherwise
SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
FUSE_CONF = "/etc/fuse.conf"


class Finding(msgspec.Struct, frozen=True):
    """One check: what was found, and what to do about it ("" when nothing)."""

    check: str
    level: Level
    found: str
    advice: str = ""


def gib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / (1 << 30):.1f} GiB"


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
            f"mount as root, in a container with that capability and without a user namespace of "
            f"its own; {plain}",
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


def judge_privileges(uid: int, may_mount: bool, fusermount: str | None, conf: str) -> list[Finding]:
    """Root mounts itself; others through fusermount3, which obeys /etc/fuse.conf."""
    if uid == 0 and may_mount:
        return [Finding("privileges", "ok", "root, with CAP_SYS_ADMIN")]
    if uid == 0:
        return [
            Finding(
                "privileges",
                "fail",
                "root without CAP_SYS_ADMIN: mount(2) is not allowed",
                "in a container give it --cap-add SYS_ADMIN (Kubernetes: "
                "securityContext.capabilities.add), or mount outside and share the directory",
            )
        ]
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


def judge_huge_tmpfs(enabled: str, error: OSError | None, may_mount: bool) -> Finding:
    """*enabled*: the value of shmem_enabled; *error*: of mounting a tmpfs with huge=within_size."""
    name = "huge tmpfs"
    if not may_mount:
        found = "not tried: mounting the arena's tmpfs needs root with CAP_SYS_ADMIN"
        return Finding(name, "warn", found, "mount as root for an arena that fills twice as fast")
    if enabled == "deny":
        return Finding(
            name,
            "warn",
            f"{SHMEM_ENABLED} is deny: the arena gets small pages and fills at half the speed",
            f"echo never > {SHMEM_ENABLED} (mounts that ask for huge pages then get them)",
        )
    if error is not None and error.errno == errno.EPERM:
        found = "not allowed here (a user namespace?)"
        return Finding(name, "warn", found, "mount outside for an arena that fills twice as fast")
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
