"""copy_file_range, sendfile, splice."""

import os
import socket
import subprocess
import threading

from tests.posix.lib import Opened, assert_same, fails_with, write_file

MIB = 1 << 20


def copy_all(source, target, length, offset_src=None, offset_dst=None):
    done = 0
    while done < length:
        count = os.copy_file_range(
            source,
            target,
            length - done,
            None if offset_src is None else offset_src + done,
            None if offset_dst is None else offset_dst + done,
        )
        if count == 0:
            break
        done += count
    return done


def test_copy_file_range_within_the_mount(ckpt):
    data = os.urandom(3 * MIB + 5)
    source = write_file(ckpt / "a", data)
    with Opened(source, os.O_RDONLY) as src, Opened(ckpt / "b", os.O_RDWR | os.O_CREAT) as dst:
        assert copy_all(src, dst, len(data) + 100) == len(data)
        assert os.fstat(dst).st_size == len(data)
    assert (ckpt / "b").read_bytes() == data


def test_copy_file_range_at_offsets_and_within_one_file(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "a", bytes(range(200)))
        with Opened(path) as fd, Opened(path) as other:
            copied = copy_all(fd, other, 50, 0, 100)
            overlapping = fails_with(os.copy_file_range, fd, other, 50, 0, 10)
            beyond = os.copy_file_range(fd, other, 50, 1000, 0)
        return copied, overlapping, beyond, path.read_bytes()

    assert_same(scenario, ckpt, tmpfs_dir)


def test_copy_file_range_between_filesystems(ckpt, tmpfs_dir):
    """The kernel may say EXDEV between two kinds of filesystem; what is copied must be right."""
    data = os.urandom(MIB)
    write_file(ckpt / "a", data)
    try:
        with Opened(ckpt / "a") as src, Opened(tmpfs_dir / "b", os.O_RDWR | os.O_CREAT) as dst:
            copy_all(src, dst, MIB)
        assert (tmpfs_dir / "b").read_bytes() == data
    except OSError as exc:
        assert os.strerror(exc.errno) == os.strerror(18)


def test_copy_file_range_errors(ckpt, tmpfs_dir):
    def scenario(root):
        path = write_file(root / "a", b"x" * 100)
        with (
            Opened(path, os.O_RDONLY) as reader,
            Opened(root / "b", os.O_WRONLY | os.O_CREAT) as writer,
            Opened(root / "c", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as appender,
            Opened(root, os.O_RDONLY) as directory,
        ):
            return (
                fails_with(os.copy_file_range, reader, reader, 10, 0, 50),
                fails_with(os.copy_file_range, writer, writer, 10, 0, 50),
                fails_with(os.copy_file_range, reader, appender, 10),
                fails_with(os.copy_file_range, directory, writer, 10),
            )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_sendfile_out_and_in(ckpt, tmpfs_dir):
    data = os.urandom(2 * MIB)
    write_file(ckpt / "a", data)
    left, right = socket.socketpair()
    received = bytearray()

    def receive():
        while part := right.recv(1 << 16):
            received.extend(part)

    thread = threading.Thread(target=receive)
    thread.start()
    with Opened(ckpt / "a", os.O_RDONLY) as src:
        sent = 0
        while sent < len(data):
            sent += os.sendfile(left.fileno(), src, sent, len(data) - sent)
    left.close()
    thread.join(30)
    right.close()
    assert received == data
    write_file(tmpfs_dir / "s", data)
    with Opened(tmpfs_dir / "s") as src, Opened(ckpt / "t", os.O_WRONLY | os.O_CREAT) as dst:
        sent = 0
        while sent < len(data):
            sent += os.sendfile(dst, src, sent, len(data) - sent)
    assert (ckpt / "t").read_bytes() == data


def test_splice_through_a_pipe(ckpt):
    data = os.urandom(300_000)
    write_file(ckpt / "a", data)
    read_end, write_end = os.pipe()
    with (
        Opened(ckpt / "a", os.O_RDONLY) as src,
        Opened(ckpt / "b", os.O_WRONLY | os.O_CREAT) as dst,
    ):
        done = 0
        while done < len(data):
            count = os.splice(src, write_end, 65536, offset_src=done)
            done += count
            while count:
                count -= os.splice(read_end, dst, count)
    os.close(read_end)
    os.close(write_end)
    assert (ckpt / "b").read_bytes() == data


def test_cp_and_tar_keep_bytes_modes_and_times(ckpt, tmpfs_dir):
    (tmpfs_dir / "tree" / "sub").mkdir(parents=True)
    write_file(tmpfs_dir / "tree" / "sub" / "f", os.urandom(MIB), 0o640)
    os.symlink("sub/f", tmpfs_dir / "tree" / "l")
    os.link(tmpfs_dir / "tree" / "sub" / "f", tmpfs_dir / "tree" / "hard")
    os.utime(tmpfs_dir / "tree" / "sub" / "f", ns=(1, 1_234_567_890_123_456_789))
    subprocess.run(["cp", "-a", f"{tmpfs_dir}/tree", f"{ckpt}/cp"], check=True, timeout=60)
    command = f"tar -C {tmpfs_dir} -cf - tree | tar -C {ckpt} -xf -"
    subprocess.run(["sh", "-c", command], check=True, timeout=60)
    for copy in (ckpt / "cp", ckpt / "tree"):
        got = (copy / "sub" / "f").stat()
        assert (copy / "sub" / "f").read_bytes() == (tmpfs_dir / "tree/sub/f").read_bytes()
        assert oct(got.st_mode) == "0o100640" and got.st_nlink == 2
        assert got.st_mtime_ns // 10**9 == 1_234_567_890
        assert os.readlink(copy / "l") == "sub/f"
    assert (ckpt / "cp" / "sub" / "f").stat().st_mtime_ns == 1_234_567_890_123_456_789
