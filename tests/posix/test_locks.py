"""flock, fcntl record locks and open-file-description locks between processes."""

import fcntl
import os
import struct
import time

from tests.posix.lib import Opened, in_child, outcome, spawn, write_file

F_OFD_SETLK = 37
EX_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
SH_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB


def lock_range(fd, kind, start, length, command=fcntl.F_SETLK):
    packed = struct.pack("hhqqi", kind, os.SEEK_SET, start, length, 0)
    fcntl.fcntl(fd, command, packed)


def in_other(path, action):
    """`action(fd)` on a fresh open of `path` in another process: None, or the name of its errno."""

    def body():
        with Opened(path) as fd:
            return outcome(action, fd)

    return in_child(body)


def test_flock_excludes_other_processes(ckpt):
    path = write_file(ckpt / "f")
    with Opened(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert in_other(path, lambda other: fcntl.flock(other, EX_NOW)) == "EAGAIN"
        assert in_other(path, lambda other: fcntl.flock(other, SH_NOW)) == "EAGAIN"
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert in_other(path, lambda other: fcntl.flock(other, SH_NOW)) is None
        assert in_other(path, lambda other: fcntl.flock(other, EX_NOW)) == "EAGAIN"
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert in_other(path, lambda other: fcntl.flock(other, EX_NOW)) is None


def test_flock_belongs_to_the_open_file(ckpt):
    path = write_file(ckpt / "f")
    with Opened(path) as first, Opened(path) as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert outcome(fcntl.flock, second, EX_NOW) == "EAGAIN"
        copy = os.dup(first)
        os.close(copy)
        assert outcome(fcntl.flock, second, EX_NOW) == "EAGAIN"


def test_flock_on_a_directory(ckpt):
    with Opened(ckpt, os.O_RDONLY) as first, Opened(ckpt, os.O_RDONLY) as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert outcome(fcntl.flock, second, EX_NOW) == "EAGAIN"


def test_locks_end_with_the_process(ckpt):
    path = write_file(ckpt / "f")

    def hold_both():
        fd = os.open(path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        fcntl.lockf(fd, fcntl.LOCK_EX)

    in_child(hold_both)
    with Opened(path) as fd:
        fcntl.flock(fd, EX_NOW)
        fcntl.lockf(fd, EX_NOW)


def test_waiting_for_a_flock_ends_when_it_is_free(ckpt):
    path = write_file(ckpt / "f")

    def wait():
        with Opened(path) as fd:
            start = time.monotonic()
            fcntl.flock(fd, fcntl.LOCK_EX)
            return time.monotonic() - start

    with Opened(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        child = spawn(wait)
        time.sleep(0.4)
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert 0.2 < child.result(10) < 8


def test_record_locks_are_per_range_and_process(ckpt):
    path = write_file(ckpt / "f", bytes(100))
    with Opened(path) as fd:
        lock_range(fd, fcntl.F_WRLCK, 10, 10)
        assert in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 0, 10)) is None
        assert in_other(path, lambda o: lock_range(o, fcntl.F_RDLCK, 15, 1)) in ("EAGAIN", "EACCES")
        assert in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 20, 0)) is None
        lock_range(fd, fcntl.F_RDLCK, 10, 10)
        assert in_other(path, lambda o: lock_range(o, fcntl.F_RDLCK, 15, 1)) is None
        lock_range(fd, fcntl.F_UNLCK, 10, 5)
        assert in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 10, 5)) is None
        assert in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 15, 5)) in ("EAGAIN", "EACCES")


def test_record_locks_fall_at_any_close_of_the_process(ckpt):
    path = write_file(ckpt / "f", bytes(100))
    with Opened(path) as fd:
        lock_range(fd, fcntl.F_WRLCK, 0, 0)
        os.close(os.open(path, os.O_RDONLY))
        assert in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 0, 0)) is None


def test_getlk_names_the_holder(ckpt):
    path = write_file(ckpt / "f", bytes(100))

    def ask():
        with Opened(path) as fd:
            packed = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            return struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, packed))

    with Opened(path) as fd:
        lock_range(fd, fcntl.F_WRLCK, 10, 10)
        assert in_child(ask) == (fcntl.F_WRLCK, os.SEEK_SET, 10, 10, os.getpid())


def test_open_file_description_locks(ckpt):
    path = write_file(ckpt / "f", bytes(100))
    with Opened(path) as first, Opened(path) as second:
        lock_range(first, fcntl.F_WRLCK, 0, 50, F_OFD_SETLK)
        assert outcome(lock_range, second, fcntl.F_WRLCK, 49, 1, F_OFD_SETLK) == "EAGAIN"
        lock_range(second, fcntl.F_WRLCK, 50, 50, F_OFD_SETLK)
        os.close(os.open(path, os.O_RDONLY))
        assert outcome(lock_range, second, fcntl.F_WRLCK, 0, 50, F_OFD_SETLK) == "EAGAIN"
        assert (
            in_other(path, lambda o: lock_range(o, fcntl.F_WRLCK, 0, 50, F_OFD_SETLK)) == "EAGAIN"
        )


def test_locks_do_not_stop_reading_and_writing(ckpt):
    path = write_file(ckpt / "f", b"x")
    with Opened(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        lock_range(fd, fcntl.F_WRLCK, 0, 0)
        assert in_child(lambda: write_file(path, b"y") and path.read_bytes()) == b"y"
