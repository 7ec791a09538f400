"""Opening, reading, writing and unlinking regular files."""

import errno
import mmap
import os
import stat

import pytest

from tests.posix.lib import Opened, assert_same, fails_with, in_child, linkat_fd, spawn, write_file

MIB = 1 << 20


def test_written_bytes_are_read_back(ckpt):
    data = os.urandom(5 * MIB + 17)
    path = write_file(ckpt / "f", data)
    assert path.read_bytes() == data
    assert path.stat().st_size == len(data)
    assert in_child(lambda: path.read_bytes() == data)


def test_pread_and_pwrite_at_any_offset(ckpt, tmpfs_dir):
    def scenario(root):
        with Opened(root / "f", os.O_RDWR | os.O_CREAT) as fd:
            os.pwrite(fd, b"abc", 10)
            os.pwrite(fd, b"z" * 5000, 4094)
            os.pwrite(fd, b"", 99999)
            whole = os.pread(fd, 20000, 0)
            return whole, os.pread(fd, 10, 9090), os.pread(fd, 10, 10000), os.fstat(fd).st_size

    assert_same(scenario, ckpt, tmpfs_dir)


def test_readv_writev_and_many_small_writes(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        for number in range(1000):
            assert os.writev(fd, [b"%04d" % number, b"", b"\n"]) == 5
        buffers = [bytearray(7), bytearray(4993)]
        assert os.preadv(fd, buffers, 0) == 5000
        assert bytes(buffers[0] + buffers[1]) == b"".join(b"%04d\n" % n for n in range(1000))


def test_another_descriptor_sees_a_write_at_once(ckpt):
    path = ckpt / "f"
    with Opened(path, os.O_WRONLY | os.O_CREAT) as writer, Opened(path, os.O_RDONLY) as reader:
        for text in (b"one", b"two", b"three"):
            os.write(writer, text)
            assert os.read(reader, 100) == text
            assert path.stat().st_size == os.fstat(writer).st_size == os.fstat(reader).st_size
            assert in_child(lambda: path.stat().st_size) == os.fstat(writer).st_size


def test_o_excl_has_one_winner(ckpt):
    path = ckpt / "f"

    def compete():
        won = []
        for number in range(50):
            try:
                os.close(os.open(f"{path}{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                won.append(number)
            except FileExistsError:
                pass
        return won

    children = [spawn(compete) for _ in range(4)]
    assert sorted(n for child in children for n in child.result()) == list(range(50))


def test_o_excl_refuses_a_dangling_symlink(ckpt, tmpfs_dir):
    def scenario(root):
        os.symlink("nowhere", root / "link")
        return fails_with(os.open, root / "link", os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    assert assert_same(scenario, ckpt, tmpfs_dir) == "EEXIST"


def test_o_creat_through_a_dangling_symlink_makes_its_target(ckpt):
    os.symlink("target", ckpt / "link")
    write_file(ckpt / "link", b"x")
    assert (ckpt / "target").read_bytes() == b"x"


def test_o_trunc_empties_while_others_have_it_open(ckpt):
    path = write_file(ckpt / "f", b"x" * 100000)
    with Opened(path, os.O_RDWR) as reader:
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        assert os.fstat(reader).st_size == 0
        assert os.pread(reader, 10, 0) == b""
        os.pwrite(reader, b"new", 2)
        assert path.read_bytes() == b"\0\0new"


def test_o_append_ignores_the_position(ckpt):
    path = write_file(ckpt / "f", b"start")
    with Opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"-1")
        os.pwrite(fd, b"-2", 0)
    assert path.read_bytes() == b"start-1-2"


def test_appends_of_two_processes_never_overwrite_each_other(ckpt):
    path = write_file(ckpt / "log", b"")

    def append(letter):
        with Opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            for _ in range(1000):
                assert os.write(fd, letter * 99 + b"\n") == 100

    for child in [spawn(lambda letter=letter: append(letter)) for letter in (b"a", b"b")]:
        child.result()
    lines = path.read_bytes().splitlines()
    assert sorted(lines) == [b"a" * 99] * 1000 + [b"b" * 99] * 1000


def test_o_direct_reads_and_writes(ckpt):
    path = ckpt / "f"
    block = mmap.mmap(-1, MIB)
    block.write(os.urandom(MIB))
    with Opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
        assert os.write(fd, block) == MIB
        assert os.pwrite(fd, block, 2 * MIB) == MIB
        back = mmap.mmap(-1, MIB)
        assert os.preadv(fd, [back], 2 * MIB) == MIB
        assert back[:] == block[:]
    assert path.read_bytes() == block[:] + bytes(MIB) + block[:]


def test_o_direct_and_buffered_descriptors_agree(ckpt):
    path = ckpt / "f"
    block = mmap.mmap(-1, 4096)
    with (
        Opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as direct,
        Opened(path, os.O_RDWR) as buffered,
    ):
        block[:] = b"a" * 4096
        os.pwrite(direct, block, 0)
        assert os.pread(buffered, 4096, 0) == b"a" * 4096
        os.pwrite(buffered, b"b" * 4096, 0)
        os.preadv(direct, [block], 0)
        assert block[:] == b"b" * 4096


def test_unlinked_file_lives_while_open(ckpt):
    path = write_file(ckpt / "f", b"before")
    with Opened(path, os.O_RDWR) as fd:
        os.unlink(path)
        assert not path.exists()
        assert os.fstat(fd).st_nlink == 0
        assert os.read(fd, 100) == b"before"
        os.pwrite(fd, b"after!" * 1000, 0)
        os.ftruncate(fd, 5000)
        assert os.pread(fd, 12, 0) == b"after!after!"
        assert os.fstat(fd).st_size == 5000
        os.fchmod(fd, 0o600)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        os.fsync(fd)
        # The name is free for another file, which is not this one.
        write_file(path, b"other")
        assert os.fstat(fd).st_ino != path.stat().st_ino
        assert os.pread(fd, 6, 0) == b"after!"
    assert path.read_bytes() == b"other"


def test_unlinked_file_lives_while_only_open_for_reading(ckpt):
    path = write_file(ckpt / "f", b"x" * MIB)
    with Opened(path, os.O_RDONLY) as fd:
        os.unlink(path)
        assert len(os.pread(fd, 2 * MIB, 0)) == MIB
        assert os.fstat(fd).st_nlink == 0


def test_unlinked_file_reopens_through_proc(ckpt):
    path = write_file(ckpt / "f", b"kept")
    with Opened(path, os.O_RDWR) as fd:
        os.unlink(path)
        with Opened(f"/proc/self/fd/{fd}", os.O_RDWR) as again:
            assert os.read(again, 10) == b"kept"
            os.pwrite(again, b"K", 0)
        assert os.pread(fd, 10, 0) == b"Kept"


def test_closing_one_of_two_descriptors_of_an_unlinked_file_keeps_it(ckpt):
    path = write_file(ckpt / "f", b"kept")
    with Opened(path, os.O_RDWR) as first:
        with Opened(path, os.O_RDONLY):
            os.unlink(path)
        assert os.pread(first, 10, 0) == b"kept"


def test_o_tmpfile_gets_a_name_by_linkat(ckpt):
    with Opened(ckpt, os.O_TMPFILE | os.O_RDWR, 0o640) as fd:
        os.write(fd, b"secret")
        assert os.fstat(fd).st_nlink == 0
        assert list(ckpt.iterdir()) == []
        linkat_fd(fd, ckpt / "named")
        assert os.fstat(fd).st_nlink == 1
    assert (ckpt / "named").read_bytes() == b"secret"
    assert stat.S_IMODE((ckpt / "named").stat().st_mode) == 0o640


def test_o_tmpfile_with_o_excl_gets_no_name(ckpt, tmpfs_dir):
    def scenario(root):
        with Opened(root, os.O_TMPFILE | os.O_RDWR | os.O_EXCL) as fd:
            return fails_with(linkat_fd, fd, root / "named")

    assert assert_same(scenario, ckpt, tmpfs_dir) == "ENOENT"


def test_o_path_and_o_nofollow(ckpt, tmpfs_dir):
    def scenario(root):
        write_file(root / "f")
        os.symlink("f", root / "link")
        with Opened(root / "f", os.O_PATH) as fd:
            of_path = (fails_with(os.read, fd, 1), fails_with(os.write, fd, b"x"))
            assert os.fstat(fd).st_size == 4
        with Opened(root / "link", os.O_PATH | os.O_NOFOLLOW) as fd:
            assert stat.S_ISLNK(os.fstat(fd).st_mode)
            target = os.readlink("", dir_fd=fd)
        return of_path, target, fails_with(os.open, root / "link", os.O_NOFOLLOW | os.O_RDONLY)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_descriptor_mode_is_kept(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "f")
        with Opened(path, os.O_RDONLY) as fd:
            read_only = fails_with(os.write, fd, b"x"), fails_with(os.ftruncate, fd, 0)
        with Opened(path, os.O_WRONLY) as fd:
            write_only = fails_with(os.read, fd, 1)
        return read_only, write_only

    assert_same(scenario, ckpt, tmpfs_dir)


def test_umask_and_mode_of_new_files(ckpt, tmpfs_dir):
    def scenario(root):
        def create():
            os.umask(0o027)
            os.close(os.open(root / "f", os.O_CREAT | os.O_WRONLY, 0o666))
            os.close(os.open(root / "g", os.O_CREAT | os.O_WRONLY, 0o777))
            os.mkdir(root / "d", 0o777)
            return [oct((root / name).stat().st_mode) for name in "fgd"]

        return in_child(create)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_create_without_write_permission_can_still_write(ckpt):
    with Opened(ckpt / "f", os.O_CREAT | os.O_RDWR, 0o000) as fd:
        os.write(fd, b"mine")
        assert os.pread(fd, 10, 0) == b"mine"


def test_descriptor_inherited_over_fork_shares_its_position(ckpt):
    with Opened(ckpt / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"parent")
        in_child(lambda: os.write(fd, b"child"))
        os.write(fd, b"again")
        assert os.pread(fd, 100, 0) == b"parentchildagain"


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, MIB - 1, MIB + 1, 9 * MIB])
def test_file_of_any_size_reads_back_after_rewriting(ckpt, size_bytes):
    path = ckpt / "f"
    for _ in range(2):
        data = os.urandom(size_bytes)
        write_file(path, data)
        assert path.read_bytes() == data


def test_write_beyond_the_largest_offset(ckpt, tmpfs_dir):
    def scenario(root):
        with Opened(root / "f", os.O_RDWR | os.O_CREAT) as fd:
            return (
                fails_with(os.pwrite, fd, b"x", (1 << 63) - 1),
                fails_with(os.ftruncate, fd, -1),
                fails_with(os.lseek, fd, -1, os.SEEK_SET),
            )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_file_size_limit_of_the_process(ckpt, tmpfs_dir):
    import resource
    import signal

    def scenario(root):
        def limited():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
            with Opened(root / "f", os.O_RDWR | os.O_CREAT) as fd:
                written = os.write(fd, b"x" * 20000)
                return written, fails_with(os.write, fd, b"y"), fails_with(os.ftruncate, fd, 20000)

        return in_child(limited)

    assert assert_same(scenario, ckpt, tmpfs_dir) == (10000, "EFBIG", "EFBIG")


def test_o_path_descriptor_does_not_keep_an_unlinked_file(ckpt):
    """An exception: the kernel does not tell us of O_PATH, so such a descriptor alone keeps no bytes.

    It may say the file is gone, or still have it; never other bytes, also when the name is used again.
    """
    path = write_file(ckpt / "f", b"first")
    with Opened(path, os.O_PATH) as fd:
        os.unlink(path)
        write_file(path, b"second")
        try:
            with Opened(f"/proc/self/fd/{fd}", os.O_RDONLY) as again:
                assert os.read(again, 10) == b"first"
        except OSError as exc:
            assert exc.errno in (errno.ENOENT, errno.ESTALE)
