"""FIFOs, sockets and device nodes."""

import os
import socket
import stat

from tests.posix.lib import (
    NOBODY,
    Opened,
    assert_same,
    fails_with,
    in_child,
    outcome,
    spawn,
    write_file,
)


def test_fifo_carries_bytes_between_processes(ckpt):
    path = ckpt / "fifo"
    os.mkfifo(path, 0o600)
    assert stat.S_ISFIFO(path.stat().st_mode)

    def send():
        with Opened(path, os.O_WRONLY) as fd:
            for number in range(100):
                os.write(fd, b"%04d\n" % number)

    child = spawn(send)
    received = b""
    with Opened(path, os.O_RDONLY) as fd:
        while part := os.read(fd, 4096):
            received += part
    child.result()
    assert received == b"".join(b"%04d\n" % number for number in range(100))
    assert path.stat().st_size == 0


def test_fifo_errors(ckpt, tmpfs_dir):
    def scenario(root):
        os.mkfifo(root / "fifo")
        with Opened(root / "fifo", os.O_RDONLY | os.O_NONBLOCK) as fd:
            seek = fails_with(os.lseek, fd, 0, os.SEEK_SET)
        return (
            seek,
            fails_with(os.mkfifo, root / "fifo"),
            fails_with(os.open, root / "fifo", os.O_WRONLY | os.O_NONBLOCK),
            fails_with(os.truncate, root / "fifo", 0),
            fails_with(os.listdir, root / "fifo"),
        )

    assert_same(scenario, ckpt, tmpfs_dir)


def test_unix_socket_is_reached_through_its_path(ckpt):
    def serve(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(100).upper())

    # A socket's path has 108 bytes at most.
    path = str(ckpt / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        child = spawn(lambda: serve(server))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(b"hello")
            assert client.recv(100) == b"HELLO"
        child.result()
        os.rename(path, ckpt / "moved")
        os.unlink(ckpt / "moved")


def test_unix_socket_errors(ckpt, tmpfs_dir):
    def scenario(root):
        path = str(root / "s")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as second:
            server.bind(path)
            server.listen(1)
            taken = fails_with(second.bind, path)
            opened = fails_with(os.open, path, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as client:
            return taken, opened, fails_with(client.connect, path)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_device_nodes_are_kept_but_inert(ckpt, tmpfs_dir):
    """nodev: a node can be made by root, copied and archived; opening it gives EACCES."""

    def scenario(root):
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 300))
        seen = [
            (oct(s.st_mode), s.st_rdev) for s in (os.stat(root / "null"), os.stat(root / "disk"))
        ]
        return (
            seen,
            outcome(os.open, root / "null", os.O_RDWR),
            outcome(os.open, root / "disk", os.O_RDONLY),
        )

    assert assert_same(scenario, ckpt, tmpfs_dir)[1:] == ("EACCES", "EACCES")


def test_mknod_of_a_regular_file(ckpt, tmpfs_dir):
    def scenario(root):
        os.mknod(root / "f", stat.S_IFREG | 0o640)
        write_file(root / "f", b"x", 0o640)
        return (root / "f").read_bytes(), oct((root / "f").stat().st_mode)

    assert_same(scenario, ckpt, tmpfs_dir)


def test_mknod_by_others(ckpt, tmpfs_dir):
    def scenario(root):
        os.chmod(root, 0o777)

        def attempt():
            return (
                outcome(os.mknod, root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
                outcome(os.mkfifo, root / "fifo"),
                outcome(os.mknod, root / "f", stat.S_IFREG | 0o600),
                outcome(os.mknod, root / "s", stat.S_IFSOCK | 0o600),
            )

        return in_child(attempt, uid=NOBODY)

    assert_same(scenario, ckpt, tmpfs_dir)
