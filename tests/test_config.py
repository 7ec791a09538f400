"""Sizes, settings, and mount(8)'s options."""

from __future__ import annotations

from pathlib import Path

import pytest

from fs.errors import CkptfsError
from mount import helper, rundir, sysmount
from mount.config import ConfigError, load, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("512M", 512 << 20),
        ("1.5 TiB", 3 << 39),
        ("1073741824", 1 << 30),
        ("50%", 32 << 30),
        ("12.5 %", 8 << 30),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text, 64 << 30) == size_bytes


@pytest.mark.parametrize("text", ["", "8GB8", "-1GiB", "0%", "101%", "many", "1MiB", "1e9"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text, 64 << 30)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('size = "1GiB"\nname = "a"\nhang_timeout_s = 3.0\n')
    settings = load(path, {"size": "2GiB", "name": None})
    assert (settings.size, settings.name, settings.hang_timeout_s) == ("2GiB", "a", 3.0)
    assert load(None, {}).size == "50%"


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65, "a b"])
def test_names(name: str) -> None:
    if name:
        with pytest.raises(ConfigError, match="name"):
            load(None, {"name": name})


def test_default_names_are_valid_and_differ() -> None:
    paths = ["/ckpt", "/mnt/ckpt", "/mnt-ckpt/x", "/with space", "/", "/é" + "x" * 300]
    names = [rundir.default_name(path) for path in paths]
    assert len(set(names)) == len(paths)
    for name in names:
        load(None, {"name": name})


def test_mount_8_options() -> None:
    line = ["ckptfs", "/ckpt", "-o", "rw,size=8GiB,require_passthrough,nofail,x-systemd.after=a"]
    want = ["mount", "/ckpt", "--size", "8GiB", "--require-passthrough"]
    assert helper.translate(line) == want
    assert helper.translate(["fast", "/ckpt", "-o", "rw"]) == ["mount", "/ckpt", "--name", "fast"]
    assert helper.translate(["ckptfs", "/c", "-n", "-t", "fuse.ckptfs"]) == ["mount", "/c"]
    with pytest.raises(CkptfsError, match="sise"):
        helper.translate(["ckptfs", "/ckpt", "-o", "sise=8GiB"])
    with pytest.raises(CkptfsError, match="usage"):
        helper.translate(["/ckpt"])


def test_mount_table() -> None:
    text = "ckptfs:a /mnt/a\\040b fuse.ckptfs rw,nosuid 0 0\nproc /proc proc rw 0 0\nshort\n"
    entries = sysmount.parse_mounts(text)
    assert entries[0] == ("ckptfs:a", "/mnt/a b", "fuse.ckptfs", "rw,nosuid")
    assert len(entries) == 2
