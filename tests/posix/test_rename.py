"""rename and renameat2."""

import os

import pytest

from tests.posix.lib import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Opened,
    assert_same,
    fails_with,
    outcome,
    renameat2,
    spawn,
    write_file,
)


def test_rename_moves_a_file_between_directories(ckpt):
    (ckpt / "a").mkdir()
    (ckpt / "b").mkdir()
    path = write_file(ckpt / "a" / "f", b"x")
    ino = path.stat().st_ino
    os.rename(path, ckpt / "b" / "g")
    assert not path.exists()
    assert (ckpt / "b" / "g").read_bytes() == b"x"
    assert (ckpt / "b" / "g").stat().st_ino == ino


def test_rename_over_a_file_replaces_it(ckpt):
    old, new = write_file(ckpt / "old", b"old"), write_file(ckpt / "new", b"new")
    os.rename(new, old)
    assert old.read_bytes() == b"new"
    assert os.listdir(ckpt) == ["old"]


def test_rename_over_an_open_file_leaves_its_readers_the_old_bytes(ckpt):
    old, new = write_file(ckpt / "old", b"old"), write_file(ckpt / "new", b"new!")
    with Opened(old, os.O_RDWR) as reader:
        os.rename(new, old)
        assert os.fstat(reader).st_nlink == 0
        assert os.read(reader, 10) == b"old"
        os.pwrite(reader, b"OLD", 0)
        assert os.pread(reader, 10, 0) == b"OLD"
        assert old.read_bytes() == b"new!"


def test_rename_of_an_open_file_keeps_its_descriptors(ckpt):
    path = write_file(ckpt / "a", b"")
    with Opened(path, os.O_WRONLY) as writer:
        os.write(writer, b"before ")
        os.rename(path, ckpt / "b")
        os.write(writer, b"after")
    assert (ckpt / "b").read_bytes() == b"before after"


def test_reader_sees_old_or_new_never_neither(ckpt):
    path = write_file(ckpt / "latest", b"0" * 1000)

    def replace():
        for number in range(300):
            write_file(ckpt / "tmp", b"%d" % (number % 10) * 1000)
            os.rename(ckpt / "tmp", path)

    child = spawn(replace)
    seen = set()
    for _ in range(300):
        data = path.read_bytes()
        assert len(data) == 1000 and len(set(data)) == 1
        seen.add(data[:1])
    child.result()


def test_rename_of_directories(ckpt, tmpfs_dir):
    def scenario(root):
        for name in ("full", "empty", "a/b/c", "moved"):
            (root / name).mkdir(parents=True)
        write_file(root / "full" / "f")
        write_file(root / "file")
        write_file(root / "moved" / "inside")
        os.rename(root / "moved", root / "empty")
        results = [
            fails_with(os.rename, root / "empty", root / "full"),
            fails_with(os.rename, root / "a", root / "file"),
            fails_with(os.rename, root / "file", root / "a"),
            fails_with(os.rename, root / "a", root / "a" / "b" / "c" / "x"),
            fails_with(os.rename, root / "a", root / "a" / "x"),
            fails_with(os.rename, root / "a" / "b", root / "a"),
            fails_with(os.rename, root / "absent", root / "x"),
            fails_with(os.rename, root / "file", root / "absent" / "x"),
            fails_with(os.rename, root / "file", root / "file" / "x"),
            fails_with(os.rename, f"{root}/a/.", root / "x"),
            fails_with(os.rename, f"{root}/a/..", root / "x"),
            fails_with(os.rename, root / "file", "/proc/x"),
        ]
        os.rename(root / "a", root / "a")
        return results, sorted(os.listdir(root)), os.listdir(root / "empty")

    assert_same(scenario, ckpt, tmpfs_dir)


def test_renamed_directory_keeps_everything_below(ckpt):
    (ckpt / "a" / "b" / "c").mkdir(parents=True)
    (ckpt / "z").mkdir()
    write_file(ckpt / "a" / "b" / "c" / "f", b"deep")
    with (
        Opened(ckpt / "a" / "b" / "c" / "f") as fd,
        Opened(ckpt / "a" / "b", os.O_RDONLY) as directory,
    ):
        os.rename(ckpt / "a" / "b", ckpt / "z" / "moved")
        assert (ckpt / "z" / "moved" / "c" / "f").read_bytes() == b"deep"
        assert os.pread(fd, 10, 0) == b"deep"
        assert os.listdir(directory) == ["c"]
        with Opened("..", os.O_RDONLY, dir_fd=directory) as parent:
            assert os.fstat(parent).st_ino == (ckpt / "z").stat().st_ino
    assert not (ckpt / "a" / "b").exists()


def test_directory_link_counts_follow_renames(ckpt, tmpfs_dir):
    def scenario(root):
        for name in ("a/one", "b/two"):
            (root / name).mkdir(parents=True)

        def counts():
            return [(root / name).stat().st_nlink for name in (".", "a", "b")]

        seen = [counts()]
        os.rename(root / "a" / "one", root / "b" / "one")
        seen.append(counts())
        os.rename(root / "b" / "one", root / "b" / "two")
        seen.append(counts())
        renameat2(root / "a", root / "b" / "two", RENAME_EXCHANGE)
        seen.append(counts())
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_rename_onto_a_hard_link_of_itself_does_nothing(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "a", b"x")
        os.link(root / "a", root / "b")
        os.rename(root / "a", root / "b")
        return sorted(os.listdir(root)), (root / "a").stat().st_nlink

    assert_same(scenario, ckpt, tmpfs_dir)


def test_rename_noreplace(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "a", b"a")
        write_file(root / "b", b"b")
        (root / "d").mkdir()
        results = [
            fails_with(renameat2, root / "a", root / "b", RENAME_NOREPLACE),
            fails_with(renameat2, root / "a", root / "d", RENAME_NOREPLACE),
            fails_with(renameat2, root / "absent", root / "b", RENAME_NOREPLACE),
            fails_with(renameat2, root / "a", root / "a", RENAME_NOREPLACE),
        ]
        renameat2(root / "a", root / "c", RENAME_NOREPLACE)
        return results, sorted(os.listdir(root)), (root / "c").read_bytes()

    assert assert_same(scenario, ckpt, tmpfs_dir)[0][0] == "EEXIST"


def test_rename_exchange(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "a", b"a")
        write_file(root / "b", b"b")
        (root / "d" / "sub").mkdir(parents=True)
        renameat2(root / "a", root / "b", RENAME_EXCHANGE)
        assert (root / "a").read_bytes() == b"b" and (root / "b").read_bytes() == b"a"
        renameat2(root / "a", root / "d", RENAME_EXCHANGE)
        assert (root / "d").read_bytes() == b"b" and (root / "a" / "sub").is_dir()
        results = [
            fails_with(renameat2, root / "b", root / "absent", RENAME_EXCHANGE),
            fails_with(renameat2, root / "absent", root / "b", RENAME_EXCHANGE),
            fails_with(renameat2, root / "a", root / "a" / "sub", RENAME_EXCHANGE),
            fails_with(renameat2, root / "a", root / "b", RENAME_EXCHANGE | RENAME_NOREPLACE),
            outcome(renameat2, root / "b", root / "b", RENAME_EXCHANGE),
        ]
        return results, sorted(os.listdir(root))

    assert_same(scenario, ckpt, tmpfs_dir)


@pytest.mark.parametrize("flags", [8, 1 << 20])
def test_unknown_rename_flags_are_refused(ckpt, tmpfs_dir, flags):
    def scenario(root):
        write_file(root / "a")
        return fails_with(renameat2, root / "a", root / "b", flags)

    assert assert_same(scenario, ckpt, tmpfs_dir) == "EINVAL"


def test_rename_over_symlinks_acts_on_the_link(ckpt):
    write_file(ckpt / "target", b"t")
    write_file(ckpt / "new", b"n")
    os.symlink("target", ckpt / "link")
    os.rename(ckpt / "new", ckpt / "link")
    assert not (ckpt / "link").is_symlink()
    assert (ckpt / "target").read_bytes() == b"t"
    os.symlink("target", ckpt / "l1")
    os.rename(ckpt / "l1", ckpt / "l2")
    assert os.readlink(ckpt / "l2") == "target"


def test_renames_of_two_processes_have_one_winner(ckpt):
    for number in range(50):
        write_file(ckpt / f"f{number}")

    def take(who):
        taken = []
        for number in range(50):
            if outcome(os.rename, ckpt / f"f{number}", ckpt / f"{who}{number}") is None:
                taken.append(number)
        return taken

    children = [spawn(lambda who=who: take(who)) for who in "xy"]
    taken = [child.result() for child in children]
    assert sorted(taken[0] + taken[1]) == list(range(50))
    assert len(os.listdir(ckpt)) == 50


def test_path_operations_while_the_file_is_replaced(ckpt):
    """Between the kernel's walk of a path and the request the file may be replaced: nobody may notice."""
    path = write_file(ckpt / "latest", b"0" * 1000)

    def replace():
        for number in range(400):
            write_file(ckpt / "tmp", b"%d" % (number % 10) * 1000)
            os.rename(ckpt / "tmp", path)

    child = spawn(replace)
    for _ in range(150):
        assert len(path.read_bytes()) == 1000
        os.truncate(path, 1000)
        os.chmod(path, 0o644)
        os.utime(path, ns=(1, 1))
        os.setxattr(path, "user.a", b"b")
        assert path.stat().st_size == 1000
    child.result(60)


def test_readers_while_the_file_is_removed_and_made_again(ckpt):
    """There or not there; no third answer."""
    path = ckpt / "f"

    def remake():
        for _ in range(300):
            write_file(path, b"x")
            os.unlink(path)

    child = spawn(remake)
    for _ in range(300):
        assert outcome(path.read_bytes) in (b"x", b"", "ENOENT")
        assert outcome(lambda: path.stat().st_mode) in (0o100644, "ENOENT")
    child.result(60)
