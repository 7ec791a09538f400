"""statfs tells the budget of the arena."""

import os

from tests.posix.lib import Opened, write_file

MIB = 1 << 20


def free_bytes(path):
    got = os.statvfs(path)
    return got.f_bavail * got.f_frsize


def test_total_is_the_arenas_size(mnt_obj):
    got = os.statvfs(mnt_obj.path)
    assert got.f_blocks * got.f_frsize == mnt_obj.status()["arena"]["size_bytes"] == 4 << 30
    assert got.f_bfree <= got.f_blocks
    assert got.f_bavail == got.f_bfree
    assert got.f_namemax == 255


def test_free_falls_with_a_write_and_comes_back_with_unlink(ckpt):
    before = free_bytes(ckpt)
    path = write_file(ckpt / "f", b"x" * (32 * MIB))
    during = free_bytes(ckpt)
    # The index may grow a little beside the file.
    assert 32 * MIB <= before - during < 40 * MIB
    os.unlink(path)
    assert abs(free_bytes(ckpt) - before) < MIB


def test_free_comes_back_with_truncate_and_rename_over(ckpt):
    before = free_bytes(ckpt)
    path = write_file(ckpt / "f", b"x" * (16 * MIB))
    os.truncate(path, 0)
    assert abs(free_bytes(ckpt) - before) < MIB
    write_file(path, b"x" * (16 * MIB))
    write_file(ckpt / "g", b"")
    os.rename(ckpt / "g", path)
    assert abs(free_bytes(ckpt) - before) < MIB


def test_unlinked_open_file_counts_until_its_close(ckpt):
    before = free_bytes(ckpt)
    path = write_file(ckpt / "f", b"x" * (16 * MIB))
    with Opened(path) as fd:
        os.unlink(path)
        assert before - free_bytes(ckpt) >= 16 * MIB
        assert os.pread(fd, 1, 0) == b"x"
    from tests.harness import wait_until

    # RELEASE is asynchronous.
    wait_until(
        lambda: abs(free_bytes(ckpt) - before) < MIB, 5, "the space of an unlinked file to return"
    )


def test_inodes_are_counted(ckpt):
    before = os.statvfs(ckpt)
    for number in range(50):
        write_file(ckpt / f"f{number}", b"")
    after = os.statvfs(ckpt)
    assert before.f_files >= before.f_ffree > 0
    assert before.f_ffree - after.f_ffree == 50


def test_df_shows_the_mount(mnt_obj):
    import subprocess

    done = subprocess.run(
        ["df", "-B1", "--output=size,target", str(mnt_obj.path)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    size, target = done.stdout.splitlines()[1].split()
    assert (int(size), target) == (4 << 30, str(mnt_obj.path))
