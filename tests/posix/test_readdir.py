"""Listing large directories while they change."""

import ctypes
import os
import subprocess

import pytest

from tests.posix.lib import Opened, all_names, getdents, in_child, spawn, write_file

ENTRIES = 5000
SMALL_BUFFER_BYTES = 1024


def fill(directory, count=ENTRIES, prefix="entry"):
    with Opened(directory, os.O_RDONLY) as fd:
        for number in range(count):
            name = f"{prefix}-{number:06d}"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))


def entries_of(names):
    return [name for name in names if name not in (b".", b"..")]


def test_small_buffers_list_everything_once(ckpt):
    fill(ckpt)
    with Opened(ckpt, os.O_RDONLY) as fd:
        names = all_names(fd, SMALL_BUFFER_BYTES)
    assert names.count(b".") == names.count(b"..") == 1
    assert sorted(entries_of(names)) == sorted(os.fsencode(name) for name in os.listdir(ckpt))
    assert len(names) == ENTRIES + 2


def test_listing_is_stable_while_entries_are_removed(ckpt):
    """Each step lists a little and removes what it saw; nothing that remains is missed or shown twice."""
    fill(ckpt)
    seen = []
    with Opened(ckpt, os.O_RDONLY) as fd:
        while entries := getdents(fd, SMALL_BUFFER_BYTES):
            for name in entries_of([entry[3] for entry in entries]):
                seen.append(name)
                os.unlink(name, dir_fd=fd)
    assert len(seen) == len(set(seen)) == ENTRIES
    assert os.listdir(ckpt) == []


def test_listing_is_stable_while_another_process_removes_every_second(ckpt):
    fill(ckpt)
    removed = {b"entry-%06d" % number for number in range(0, ENTRIES, 2)}

    def remove():
        for name in sorted(removed):
            os.unlink(os.fsencode(ckpt) + b"/" + name)

    with Opened(ckpt, os.O_RDONLY) as fd:
        seen = entries_of([entry[3] for entry in getdents(fd, SMALL_BUFFER_BYTES)])
        child = spawn(remove)
        seen += entries_of(all_names(fd, SMALL_BUFFER_BYTES))
        child.result()
        rest = entries_of(all_names(fd, SMALL_BUFFER_BYTES))
    assert rest == []
    assert len(seen) == len(set(seen))
    remaining = [name for name in seen if name not in removed]
    assert sorted(remaining) == [b"entry-%06d" % number for number in range(1, ENTRIES, 2)]


def test_entries_made_meanwhile_do_not_disturb_the_listing(ckpt):
    fill(ckpt, 1000)
    seen = []
    number = 0
    with Opened(ckpt, os.O_RDONLY) as fd:
        while entries := getdents(fd, SMALL_BUFFER_BYTES):
            seen += entries_of([entry[3] for entry in entries])
            # Few enough per step that a listing which shows new entries still comes to its end.
            for _ in range(3):
                if number < 500:
                    write_file(ckpt / f"new-{number:06d}", b"")
                    number += 1
    assert len(seen) == len(set(seen))
    assert sorted(name for name in seen if name.startswith(b"entry")) == [
        b"entry-%06d" % n for n in range(1000)
    ]


def test_renames_meanwhile_do_not_hide_other_entries(ckpt):
    fill(ckpt, 1000)
    seen = []
    number = 0
    with Opened(ckpt, os.O_RDONLY) as fd:
        while entries := getdents(fd, SMALL_BUFFER_BYTES):
            seen += entries_of([entry[3] for entry in entries])
            if number < 1000:
                os.rename(ckpt / f"entry-{number:06d}", ckpt / f"renamed-{number:06d}")
                number += 97
    untouched = {b"entry-%06d" % n for n in range(1000) if n % 97 or n >= number}
    assert untouched <= set(seen)
    assert all(seen.count(name) == 1 for name in untouched)


def test_changes_of_files_during_a_listing_are_not_undone_by_it(ckpt):
    """A listing also carries attributes; those it gathered earlier must not replace newer ones."""
    fill(ckpt, 2000)
    with Opened(ckpt, os.O_RDONLY) as fd:
        names = entries_of([entry[3] for entry in getdents(fd, SMALL_BUFFER_BYTES)])
        for number in range(0, 2000, 7):
            path = ckpt / f"entry-{number:06d}"
            write_file(path, b"x" * number, 0o600)
            os.utime(path, ns=(number, number))
            os.setxattr(path, "user.a", b"b")
        os.link(ckpt / "entry-000007", ckpt.parent / "linked")
        names += entries_of(all_names(fd, SMALL_BUFFER_BYTES))
    os.unlink(ckpt.parent / "linked")
    assert len(names) == 2000
    for number in range(0, 2000, 7):
        got = (ckpt / f"entry-{number:06d}").stat()
        assert (got.st_size, oct(got.st_mode), got.st_mtime_ns) == (number, "0o100600", number)
        assert got.st_nlink == 1


def test_rm_r_of_a_large_tree(ckpt):
    tree = ckpt / "tree"
    for number in range(5):
        (tree / f"d{number}").mkdir(parents=True)
        fill(tree / f"d{number}", ENTRIES // 5)
    fill(tree, ENTRIES)
    subprocess.run(["rm", "-r", str(tree)], check=True, timeout=60)
    assert not tree.exists()


def test_seek_to_a_cookie_goes_on_from_there(ckpt):
    fill(ckpt, 300)
    with Opened(ckpt, os.O_RDONLY) as fd:
        entries = []
        while part := getdents(fd, SMALL_BUFFER_BYTES):
            entries += part
        cookies = [entry[1] for entry in entries]
        assert len(set(cookies)) == len(cookies)
        names = [entry[3] for entry in entries]
        for at in (0, 1, 5, 150, len(names) - 2):
            os.lseek(fd, cookies[at], os.SEEK_SET)
            assert all_names(fd, SMALL_BUFFER_BYTES) == names[at + 1 :]
        os.lseek(fd, 0, os.SEEK_SET)
        assert all_names(fd, SMALL_BUFFER_BYTES) == names


def test_cookies_stay_good_when_entries_before_and_at_them_are_removed(ckpt):
    fill(ckpt, 300)
    with Opened(ckpt, os.O_RDONLY) as fd:
        entries = []
        while part := getdents(fd, SMALL_BUFFER_BYTES):
            entries += part
        for entry in entries[:200]:
            if entry[3] not in (b".", b".."):
                os.unlink(entry[3], dir_fd=fd)
        os.lseek(fd, entries[199][1], os.SEEK_SET)
        assert all_names(fd, SMALL_BUFFER_BYTES) == [entry[3] for entry in entries[200:]]


def test_telldir_and_seekdir(ckpt):
    fill(ckpt, 200)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = ctypes.c_void_p
    libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(libc.opendir(os.fsencode(ckpt)))

    def next_name():
        record = libc.readdir(stream)
        # d_name lies behind d_ino, d_off, d_reclen and d_type.
        return ctypes.string_at(record + 19) if record else None

    first = [next_name() for _ in range(50)]
    place = libc.telldir(stream)
    rest = list(iter(next_name, None))
    libc.seekdir(stream, ctypes.c_long(place))
    assert list(iter(next_name, None)) == rest
    libc.rewinddir(stream)
    assert [next_name() for _ in range(50)] == first
    libc.closedir(stream)
    assert len(first + rest) == 202


def test_a_listing_begun_again_shows_new_entries(ckpt):
    with Opened(ckpt, os.O_RDONLY) as fd:
        assert entries_of(all_names(fd)) == []
        write_file(ckpt / "new")
        os.lseek(fd, 0, os.SEEK_SET)
        assert entries_of(all_names(fd)) == [b"new"]
        os.unlink(ckpt / "new")
        os.lseek(fd, 0, os.SEEK_SET)
        assert entries_of(all_names(fd)) == []


@pytest.mark.parametrize("buffer_bytes", [512, 4096, 65536, 1 << 20])
def test_long_names_with_any_buffer(ckpt, buffer_bytes):
    expected = sorted(b"%03d" % number + b"n" * 252 for number in range(100))
    for name in expected:
        write_file(os.fsencode(ckpt) + b"/" + name, b"")
    with Opened(ckpt, os.O_RDONLY) as fd:
        assert sorted(entries_of(all_names(fd, buffer_bytes))) == expected


def test_too_small_a_buffer_is_einval(ckpt):
    write_file(ckpt / ("n" * 255))
    with Opened(ckpt, os.O_RDONLY) as fd, pytest.raises(OSError, match="Invalid argument"):
        while getdents(fd, 64):
            pass


def test_directories_made_and_listed_by_several_processes(ckpt):
    def work(who):
        (ckpt / who).mkdir()
        fill(ckpt / who, 300)
        fill(ckpt, 100, who)
        return len(os.listdir(ckpt / who))

    children = [spawn(lambda who=who: work(who)) for who in ("a", "b", "c")]
    assert [child.result() for child in children] == [300] * 3
    assert len(os.listdir(ckpt)) == 303
    assert in_child(lambda: len(os.listdir(ckpt))) == 303
