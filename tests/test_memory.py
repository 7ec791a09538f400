"""How much RAM an arena may take: /proc and cgroup files as kernels and container runtimes write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fs import memory
from fs.memory import CgroupMount

MEMINFO = """MemTotal:       24684092 kB
MemFree:        12000000 kB
MemAvailable:   23000000 kB
HugePages_Total:       7
Hugepagesize:       2048 kB
"""
# Debian's layout of version 1: the hierarchy of another controller must not be taken for memory's.
CGROUP_V1 = "9:name=systemd:/\n4:memory:/kubepods/pod1/c2\n3:cpuset:/other\n0::/\n"
CGROUP_V2 = "0::/system.slice/docker-1.scope\n"
MOUNTINFO = (
    "30 23 0:26 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 /kubepods /sys/fs/cgroup/me\\040mory rw - cgroup cgroup rw,memory\n"
)


def test_meminfo_is_in_bytes():
    values = memory.parse_meminfo(MEMINFO)
    assert values["MemTotal"] == 24684092 * 1024
    assert values["HugePages_Total"] == 7


def test_memory_hierarchies_are_found_by_controller():
    assert memory.parse_cgroups(CGROUP_V1) == {1: "/kubepods/pod1/c2", 2: "/"}
    assert memory.parse_cgroups(CGROUP_V2) == {2: "/system.slice/docker-1.scope"}
    assert memory.parse_cgroups("") == {}


def test_cgroup_mounts_other_controllers_ignored_and_escapes_undone():
    assert memory.parse_cgroup_mounts(MOUNTINFO) == [
        CgroupMount(2, "/", "/sys/fs/cgroup/unified"),
        CgroupMount(1, "/kubepods", "/sys/fs/cgroup/me mory"),
    ]


def test_every_cgroup_up_to_the_visible_root_counts():
    mounts = [CgroupMount(2, "/", "/sys/fs/cgroup"), CgroupMount(1, "/kubepods", "/cg/memory")]
    assert memory.cgroup_directories({2: "/a/b", 1: "/kubepods/pod1/c2"}, mounts) == [
        (2, "/sys/fs/cgroup/a/b"),
        (2, "/sys/fs/cgroup/a"),
        (2, "/sys/fs/cgroup"),
        (1, "/cg/memory/pod1/c2"),
        (1, "/cg/memory/pod1"),
        (1, "/cg/memory"),
    ]


@pytest.mark.parametrize("path", ["/", "/../../somewhere", "/docker/1"])
def test_in_a_container_the_mount_itself_is_our_cgroup(path):
    mounts = [CgroupMount(1, "/docker/1", "/sys/fs/cgroup/memory")]
    assert memory.cgroup_directories({1: path}, mounts) == [(1, "/sys/fs/cgroup/memory")]


def test_no_limit_is_no_limit_in_both_versions():
    assert memory.parse_limit("max\n") is None
    assert memory.parse_limit("9223372036854771712\n") is None
    assert memory.parse_limit("") is None
    assert memory.parse_limit("1073741824\n") == 1 << 30


def test_page_cache_can_be_had_back_but_tmpfs_cannot():
    text = "anon 100\nactive_file 7\ninactive_file 30\nshmem 1000\ntotal_active_file 70\ntotal_inactive_file 300\n"
    assert memory.parse_reclaimable(text, 2) == 37
    assert memory.parse_reclaimable(text, 1) == 370


def test_the_smallest_limit_decides(tmp_path, monkeypatch):
    inner, outer = tmp_path / "a", tmp_path
    inner.mkdir()
    (outer / "memory.max").write_text("3000000\n")
    (outer / "memory.current").write_text("2900000\n")
    (outer / "memory.stat").write_text("inactive_file 50000\nactive_file 0\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.high").write_text("2000000\n")
    (inner / "memory.current").write_text("500000\n")
    texts = {
        "/proc/self/cgroup": "0::/a\n",
        "/proc/self/mountinfo": f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n",
    }
    read = memory._read
    monkeypatch.setattr(memory, "_read", lambda path: texts.get(path) or read(path))
    monkeypatch.setattr(memory, "meminfo", lambda: memory.parse_meminfo(MEMINFO))
    assert memory.memory_limit_bytes() == 2000000
    assert memory.available_bytes() == 3000000 - 2900000 + 50000


def test_here_and_now():
    total = memory.parse_meminfo(Path("/proc/meminfo").read_text())["MemTotal"]
    assert 0 < memory.available_bytes() <= memory.memory_limit_bytes() <= total
