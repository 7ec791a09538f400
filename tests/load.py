"""A load whose every result is checked: run as `python load.py DIRECTORY STOP_FILE SEED`.

Each round makes, writes, renames, links and removes things of its own and insists on the exact outcome, so an operation
that is executed twice, or not at all, ends it with a traceback. Prints the number of rounds.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path


def expect(error: type[OSError], action: object, *args: object) -> None:
    try:
        action(*args)  # type: ignore[operator]
    except error:
        return
    raise AssertionError(f"{action}{args} succeeded")


def one_round(top: Path, rng: random.Random, n: int) -> None:
    data = rng.randbytes(rng.choice([0, 17, 4096, 300_000]))
    path, final = top / f"f{n}.tmp", top / f"f{n % 7}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert os.write(fd, data) == len(data)
    expect(FileExistsError, os.open, path, os.O_CREAT | os.O_EXCL)
    os.ftruncate(fd, len(data) + 100)
    os.fsync(fd)
    assert os.fstat(fd).st_size == len(data) + 100
    os.close(fd)
    os.rename(path, final)
    expect(FileNotFoundError, os.stat, path)
    assert final.read_bytes() == data + bytes(100)
    directory = top / f"d{n}"
    os.mkdir(directory)
    expect(FileExistsError, os.mkdir, directory)
    os.link(final, directory / "link")
    assert os.stat(final).st_nlink == 2
    os.symlink(f"../{final.name}", directory / "sym")
    assert (directory / "sym").read_bytes()[:8] == (data + bytes(100))[:8]
    os.setxattr(directory / "link", "user.n", str(n).encode(), os.XATTR_CREATE)
    assert os.getxattr(final, "user.n") == str(n).encode()
    os.removexattr(final, "user.n")
    expect(OSError, os.removexattr, final, "user.n")
    assert sorted(os.listdir(directory)) == ["link", "sym"]
    gone = os.open(directory / "link", os.O_RDONLY)
    for name in ("link", "sym"):
        os.unlink(directory / name)
        expect(FileNotFoundError, os.unlink, directory / name)
    assert os.pread(gone, len(data), 0) == data
    os.close(gone)
    os.rmdir(directory)
    expect(FileNotFoundError, os.rmdir, directory)
    assert os.stat(final).st_nlink == 1


def main() -> None:
    top, stop, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    rounds = 0
    while not stop.exists():
        one_round(top, rng, rounds)
        rounds += 1
    left = sorted(os.listdir(top))
    assert left == [f"f{i}" for i in range(min(rounds, 7))], left
    print(rounds)


if __name__ == "__main__":
    main()
