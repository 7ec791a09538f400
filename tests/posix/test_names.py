"""Names: any bytes, up to 255 of them."""

import os

import pytest

from tests.posix.lib import assert_same, fails_with, write_file


def test_any_byte_but_slash_and_nul(ckpt):
    root = os.fsencode(ckpt)
    expected = []
    for value in range(1, 256):
        if value == ord("/"):
            continue
        name = b"<%c>" % value
        write_file(root + b"/" + name, b"%d" % value)
        expected.append(name)
    assert sorted(os.listdir(root)) == sorted(expected)
    for name in expected:
        with open(root + b"/" + name, "rb") as file:
            assert file.read() == b"%d" % name[1]
        os.unlink(root + b"/" + name)
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    "name",
    [
        b" ",
        b"...",
        b"-rf",
        b"\n",
        b"\xff\xfe invalid utf-8 \xc3",
        "e\u0301".encode(),
        "\u00e9".encode(),
        b"%s%n",
        b"'; DROP TABLE inode; --",
        b"a\\b",
        b"*?[",
        "\U0001f4be".encode() * 60,
    ],
    ids=ascii,
)
def test_strange_names_in_every_operation(ckpt, name):
    root = os.fsencode(ckpt)
    path = root + b"/" + name
    write_file(path, b"x")
    assert os.listdir(root) == [name]
    os.rename(path, root + b"/dir")
    os.mkdir(path)
    os.rename(root + b"/dir", path + b"/" + name)
    os.symlink(name, path + b"/link")
    os.link(path + b"/" + name, path + b"/hard")
    with open(path + b"/link", "rb") as file:
        assert file.read() == b"x"
    for entry in (name, b"link", b"hard"):
        os.unlink(path + b"/" + entry)
    os.rmdir(path)


def test_names_differ_by_case_and_normal_form(ckpt):
    for name in ("a", "A", "\u00e9", "e\u0301"):
        write_file(ckpt / name, name.encode())
    assert len(os.listdir(ckpt)) == 4
    assert (ckpt / "A").read_bytes() == b"A"


def test_longest_names(ckpt, tmpfs_dir):
    def scenario(root):
        longest = "n" * 255
        write_file(root / longest, b"x")
        os.rename(root / longest, root / ("m" * 255))
        os.mkdir(root / longest)
        os.symlink("x", root / longest / longest)
        too_long = root / ("n" * 256)
        return sorted(os.listdir(root)), [
            fails_with(os.stat, too_long),
            fails_with(os.open, too_long, os.O_CREAT | os.O_WRONLY),
            fails_with(os.mkdir, too_long),
            fails_with(os.symlink, "x", too_long),
            fails_with(os.link, root / ("m" * 255), too_long),
            fails_with(os.rename, root / longest, too_long),
            fails_with(os.mkfifo, too_long),
            fails_with(os.unlink, too_long),
            fails_with(os.rmdir, too_long),
        ]

    assert set(assert_same(scenario, ckpt, tmpfs_dir)[1]) == {"ENAMETOOLONG"}


def test_length_counts_bytes_not_characters(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / ("\u00e9" * 127 + "x"))
        return fails_with(write_file, root / ("\u00e9" * 128))

    assert assert_same(scenario, ckpt, tmpfs_dir) == "ENAMETOOLONG"
