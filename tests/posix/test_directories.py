"""Directories: making, removing, walking, deep paths, removed ones that are still in use."""

import os
import shutil
import stat

from tests.posix.lib import Opened, assert_same, fails_with, in_child, outcome, write_file


def test_mkdir_and_rmdir(ckpt, tmpfs_dir):
    def scenario(root):
        os.mkdir(root / "d", 0o750)
        write_file(root / "f")
        os.mkdir(root / "full")
        write_file(root / "full" / "x")
        got = os.stat(root / "d")
        results = [
            oct(got.st_mode),
            got.st_nlink,
            fails_with(os.mkdir, root / "d"),
            fails_with(os.mkdir, root / "f"),
            fails_with(os.mkdir, root / "absent" / "d"),
            fails_with(os.mkdir, root / "f" / "d"),
            fails_with(os.rmdir, root / "full"),
            fails_with(os.rmdir, root / "f"),
            fails_with(os.rmdir, root / "absent"),
            fails_with(os.rmdir, f"{root}/d/."),
            fails_with(os.rmdir, f"{root}/d/.."),
            fails_with(os.unlink, root / "d"),
        ]
        os.rmdir(root / "d")
        return results, sorted(os.listdir(root))

    assert_same(scenario, ckpt, tmpfs_dir)


def test_directory_link_count_counts_subdirectories(ckpt, tmpfs_dir):
    def scenario(root):
        seen = [os.stat(root).st_nlink]
        for number in range(5):
            os.mkdir(root / f"d{number}")
            write_file(root / f"f{number}")
            seen.append(os.stat(root).st_nlink)
        for number in range(5):
            os.rmdir(root / f"d{number}")
            seen.append(os.stat(root).st_nlink)
        return seen

    assert_same(scenario, ckpt, tmpfs_dir)


def test_dot_and_dotdot_are_listed_first(ckpt):
    from tests.posix.lib import getdents

    (ckpt / "d").mkdir()
    write_file(ckpt / "d" / "f")
    for directory, parent in ((ckpt / "d", ckpt), (ckpt, ckpt.parent)):
        with Opened(directory, os.O_RDONLY) as fd:
            entries = {name: (ino, kind) for ino, _, kind, name in getdents(fd, 4096)}
        assert entries[b"."] == (directory.stat().st_ino, stat.S_IFDIR >> 12)
        assert entries[b".."][1] == stat.S_IFDIR >> 12
        assert (directory / "..").stat().st_ino == parent.stat().st_ino


def test_entry_types_and_inodes_are_right(ckpt):
    write_file(ckpt / "file")
    (ckpt / "directory").mkdir()
    os.symlink("x", ckpt / "symlink")
    os.mkfifo(ckpt / "fifo")
    with os.scandir(ckpt) as entries:
        found = {entry.name: entry for entry in entries}
    assert found["file"].is_file(follow_symlinks=False)
    assert found["directory"].is_dir(follow_symlinks=False)
    assert found["symlink"].is_symlink()
    for name, entry in found.items():
        assert entry.inode() == os.lstat(ckpt / name).st_ino


def test_removed_working_directory(ckpt, tmpfs_dir):
    def scenario(root):
        def inside():
            os.mkdir(root / "d")
            os.chdir(root / "d")
            os.rmdir(root / "d")
            return (
                os.listdir("."),
                os.stat(".").st_nlink,
                fails_with(os.getcwd),
                fails_with(os.open, "f", os.O_CREAT | os.O_WRONLY),
                fails_with(os.mkdir, "d"),
                fails_with(os.symlink, "x", "l"),
                fails_with(os.open, "f", os.O_RDONLY),
                outcome(os.stat, "..") is not None,
            )

        return in_child(inside)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_removed_directory_reads_empty_through_its_descriptor(ckpt):
    (ckpt / "d").mkdir()
    write_file(ckpt / "d" / "f")
    with Opened(ckpt / "d", os.O_RDONLY) as fd:
        shutil.rmtree(ckpt / "d")
        assert os.listdir(fd) == []
        assert os.fstat(fd).st_nlink == 0
        (ckpt / "d").mkdir()
        write_file(ckpt / "d" / "other")
        assert os.listdir(fd) == []
        assert os.fstat(fd).st_ino != (ckpt / "d").stat().st_ino


def test_paths_up_to_the_limit(ckpt, tmpfs_dir):
    """The whole path counts, so both roots are padded to one length."""

    def scenario(root):
        name = "n" * 200
        deep = root
        while len(os.fsencode(deep)) + 201 < 3900:
            deep = deep / name
            deep.mkdir()
        rest = 4095 - len(os.fsencode(deep)) - 1
        longest = deep / ("f" * rest)
        write_file(longest, b"deep")
        assert len(os.fsencode(longest)) == 4095
        return longest.read_bytes(), fails_with(os.stat, deep / ("f" * (rest + 1)))

    assert assert_same(scenario, ckpt, tmpfs_dir) == (b"deep", "ENAMETOOLONG")


def test_trees_deeper_than_a_path_can_name(ckpt):
    """60 levels of 200-byte names, by relative steps; `rm -rf` of it is part of the test's end."""
    name = "n" * 200

    def build():
        os.chdir(ckpt)
        for _ in range(60):
            os.mkdir(name)
            os.chdir(name)
        write_file("f", b"bottom")
        for _ in range(60):
            os.chdir("..")
        return os.stat(".").st_ino

    assert in_child(build) == ckpt.stat().st_ino


def test_many_levels(ckpt):
    deep = ckpt
    for level in range(300):
        deep = deep / f"{level}"
        deep.mkdir()
    write_file(deep / "f", b"x")
    assert (deep / "f").read_bytes() == b"x"
    os.rename(ckpt / "0", ckpt / "zero")
    moved = ckpt / "zero" / deep.relative_to(ckpt / "0")
    assert (moved / "f").read_bytes() == b"x"


def test_opening_a_directory(ckpt, tmpfs_dir):
    def scenario(root):
        (root / "d").mkdir()
        with Opened(root / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
            read = fails_with(os.read, fd, 10)
        write_file(root / "f")
        return (
            read,
            fails_with(os.open, root / "d", os.O_WRONLY),
            fails_with(os.open, root / "d", os.O_RDWR),
            fails_with(os.open, root / "d", os.O_RDONLY | os.O_CREAT),
            fails_with(os.open, root / "f", os.O_RDONLY | os.O_DIRECTORY),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_operations_relative_to_a_descriptor(ckpt):
    (ckpt / "d").mkdir()
    with Opened(ckpt / "d", os.O_RDONLY) as fd:
        os.mkdir("sub", dir_fd=fd)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.rename("f", "g", src_dir_fd=fd, dst_dir_fd=fd)
        os.symlink("g", "l", dir_fd=fd)
        os.link("g", "h", src_dir_fd=fd, dst_dir_fd=fd)
        assert sorted(os.listdir(fd)) == ["g", "h", "l", "sub"]
        os.rename(ckpt / "d", ckpt / "moved")
        os.unlink("l", dir_fd=fd)
        os.rmdir("sub", dir_fd=fd)
    assert sorted(os.listdir(ckpt / "moved")) == ["g", "h"]
