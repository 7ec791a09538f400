"""Tools people keep checkpoints with: git, rsync, tar, cp; and the two that try a filesystem's patience, fio and
stress-ng."""

from __future__ import annotations

import filecmp
import os
import random
from pathlib import Path

import pytest

from tests.frameworks import lib


def make_tree(root: Path, files: int = 150) -> None:
    """Directories, odd names, empty and larger files, links of both kinds, a hole, modes, times, xattrs."""
    chance = random.Random(4)
    root.mkdir()
    for number in range(files):
        directory = root / f"step-{number % 7}" / ("nested" if number % 3 else ".hidden dir")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"shard {number}.bin"
        path.write_bytes(chance.randbytes(chance.choice((0, 1, 4096, 70_001))))
        path.chmod(chance.choice((0o644, 0o600, 0o755)))
        stamp = 1_700_000_000_000_000_000 + chance.randrange(10**15)
        os.utime(path, ns=(stamp, stamp))
    some = root / "step-0" / "nested" / "shard 7.bin"
    os.setxattr(some, "user.sha", b"\x00\xff value")
    os.link(some, root / "hard")
    (root / "latest").symlink_to("step-6")
    (root / "dangling").symlink_to("nowhere/at all")
    (root / "empty").mkdir(mode=0o700)
    with open(root / "sparse", "wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    (root / os.fsdecode(b"raw-\xff\xfe")).write_bytes(b"not utf-8")


def assert_same_tree(left: Path, right: Path) -> None:
    """Names, kinds, link targets, modes, sizes and contents."""
    for here, directories, files in os.walk(left):
        there = right / Path(here).relative_to(left)
        assert sorted(os.listdir(here)) == sorted(os.listdir(there)), there
        for name in directories + files:
            one, two = Path(here, name), there / name
            assert one.lstat().st_mode == two.lstat().st_mode, two
            if one.is_symlink():
                assert os.readlink(one) == os.readlink(two)
            elif one.is_file():
                assert filecmp.cmp(one, two, shallow=False), two


def git(repository: Path, *arguments: str | os.PathLike[str]) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0")
    return lib.run("git", "-C", repository, *identity, *arguments)


def test_git(ckpt: Path, tmpfs_dir: Path) -> None:
    """commit, clone (by hard links, by copying, and from elsewhere), branch, gc, fsck."""
    lib.need_command("git")
    outside = tmpfs_dir / "outside"
    make_tree(outside)
    lib.run("git", "init", "-q", "-b", "main", outside)
    git(outside, "add", "-A")
    git(outside, "commit", "-qm", "one")

    lib.run("git", "clone", "-q", outside, ckpt / "clone", timeout_s=60)
    lib.run("git", "clone", "-q", ckpt / "clone", ckpt / "linked")
    lib.run("git", "clone", "-q", "--no-local", ckpt / "clone", ckpt / "copied")
    work = ckpt / "linked"
    git(work, "checkout", "-qb", "side")
    for number in range(20):
        (work / f"new-{number}").write_text(f"{number}\n" * 100)
        git(work, "add", "-A")
        git(work, "commit", "-qm", f"change {number}")
    git(work, "mv", "step-0", "renamed")
    git(work, "commit", "-qam", "rename")
    git(work, "push", "-q", ckpt / "copied", "side")
    git(work, "checkout", "-q", "main")
    git(work, "merge", "-q", "--no-ff", "-m", "merge", "side")
    git(work, "gc", "-q", "--prune=now")
    for repository in (ckpt / "clone", ckpt / "copied", work):
        assert "error" not in git(repository, "fsck", "--full", "--strict", "--no-progress")
        assert git(repository, "status", "--porcelain") == ""
    assert git(work, "rev-list", "--count", "HEAD").strip() == "23"
    assert git(ckpt / "copied", "rev-parse", "side") == git(work, "rev-parse", "side")
    # What git checked out here is what it checks out elsewhere.
    lib.run("git", "clone", "-q", work, tmpfs_dir / "back")
    for name in os.listdir(tmpfs_dir / "back"):
        if name != ".git" and (tmpfs_dir / "back" / name).is_dir():
            assert_same_tree(tmpfs_dir / "back" / name, work / name)


def test_rsync(ckpt: Path, tmpfs_dir: Path) -> None:
    """There, incrementally, with deletion, and back: in the end rsync finds nothing to do."""
    lib.need_command("rsync")
    source, copy, back = tmpfs_dir / "source", ckpt / "copy", ckpt / "back"
    make_tree(source)
    options = ("-aHXS", "--delete")
    lib.run("rsync", *options, f"{source}/", copy)
    (source / "step-1" / "nested" / "shard 1.bin").write_bytes(b"changed" * 10_000)
    (source / "step-2" / "nested" / "shard 2.bin").unlink()
    (source / "added").write_bytes(b"new")
    lib.run("rsync", *options, f"{source}/", copy)
    lib.run("rsync", *options, "--inplace", "--no-S", f"{copy}/", back)
    for one, other in ((source, copy), (copy, back), (back, source)):
        assert_same_tree(one, other)
        changes = lib.run("rsync", "-aHXn", "--checksum", "--delete", "-i", f"{one}/", other)
        assert changes == "", f"{one} -> {other}"
    assert os.getxattr(back / "hard", "user.sha") == b"\x00\xff value"
    assert (back / "hard").stat().st_ino == (
        back / "step-0" / "nested" / "shard 7.bin"
    ).stat().st_ino


def test_tar(ckpt: Path, tmpfs_dir: Path) -> None:
    """Packed on the mount, unpacked on the mount and elsewhere; `tar --compare` agrees everywhere."""
    make_tree(ckpt / "tree")
    archive = ckpt / "tree.tar"
    lib.run("tar", "--xattrs", "-S", "-C", ckpt, "-cf", archive, "tree")
    for directory in (ckpt / "unpacked", tmpfs_dir):
        directory.mkdir(exist_ok=True)
        lib.run("tar", "--xattrs", "-C", directory, "-xpf", archive)
        assert_same_tree(ckpt / "tree", directory / "tree")
        assert lib.run("tar", "--xattrs", "-C", directory, "--compare", "-f", archive) == ""
        assert os.getxattr(directory / "tree" / "hard", "user.sha") == b"\x00\xff value"
    # Appending rewrites the end of the archive in place.
    (ckpt / "more").write_bytes(b"more")
    lib.run("tar", "-C", ckpt, "-rf", archive, "more")
    assert lib.run("tar", "-xOf", archive, "more") == "more"
    lib.run("sh", "-c", "tar -cf - tree | gzip -1 >z.tgz && tar -dzf z.tgz", cwd=ckpt)


@pytest.mark.parametrize(
    "option", ["--sparse=auto", "--sparse=always", "--sparse=never", "--reflink=auto"]
)
def test_cp(ckpt: Path, option: str) -> None:
    source, copy = ckpt / "source", ckpt / "copy"
    mib = 1 << 20
    with open(source, "wb") as file:
        for place in (0, 17 * mib, 63 * mib):
            file.seek(place)
            file.write(os.urandom(mib))
        file.truncate(80 * mib)
    lib.run("cp", "-p", option, source, copy)
    assert filecmp.cmp(source, copy, shallow=False)
    assert copy.stat().st_mtime_ns == source.stat().st_mtime_ns
    used = copy.stat().st_blocks * 512
    if option == "--sparse=never":
        assert used >= 80 * mib
    else:
        # Holes are kept to the arena's page size, huge pages included.
        assert used <= 24 * mib, f"{used / mib:.0f} MiB for 3 MiB of data"


def test_cp_of_a_tree(ckpt: Path, tmpfs_dir: Path) -> None:
    make_tree(tmpfs_dir / "tree")
    lib.run("cp", "-a", tmpfs_dir / "tree", ckpt / "one")
    lib.run("cp", "-a", ckpt / "one", ckpt / "two")
    lib.run("mv", ckpt / "two", tmpfs_dir / "three")  # across filesystems
    for copy in (ckpt / "one", tmpfs_dir / "three"):
        assert_same_tree(tmpfs_dir / "tree", copy)
    lib.run("rm", "-r", ckpt / "one")
    assert os.listdir(ckpt) == []


FIO_ENGINES = [
    ("psync", "0"),
    ("psync", "1"),
    ("pvsync2", "0"),
    ("libaio", "1"),
    ("mmap", "0"),
]


@pytest.mark.parametrize(("engine", "direct"), FIO_ENGINES)
@pytest.mark.parametrize("pattern", ["write", "randrw"])
def test_fio_verify(ckpt: Path, tmp_path: Path, engine: str, direct: str, pattern: str) -> None:
    """fio writes blocks that carry a checksum and their place, and reads them back."""
    lib.need_command("fio")
    lib.run(
        "fio",
        f"--name={pattern}",
        f"--directory={ckpt}",
        f"--ioengine={engine}",
        f"--direct={direct}",
        f"--rw={pattern}",
        "--bsrange=4k-256k",
        "--size=24m",
        "--numjobs=2",
        "--iodepth=8",
        "--fsync=64",
        "--verify=xxhash",
        "--verify_fatal=1",
        "--verify_backlog=32",
        "--do_verify=1",
        "--randseed=7",
        timeout_s=60,
        cwd=tmp_path,  # where it leaves its verify state
    )
    # Space comes back, so that the next test has room.
    for path in ckpt.iterdir():
        path.unlink()


# File stressors that pass on tmpfs and need neither a device nor another filesystem.
STRESSORS = """
access aio chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fcntl file-ioctl filename
flock fpunch fsize fstat getdent handle hdd inode-flags inotify io iomix lease link locka lockf lockofd mknod msync open
readahead rename revio seek sendfile splice symlink sync-file touch utime xattr
""".split()
STRESSORS_AT_ONCE = 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(STRESSORS), STRESSORS_AT_ONCE))
def test_stress_ng(ckpt: Path, first: int) -> None:
    """A few stressors at the same time, each checking its own results; nothing stays behind."""
    lib.need_command("stress-ng")
    names = STRESSORS[first : first + STRESSORS_AT_ONCE]
    workers = [argument for name in names for argument in (f"--{name}", "1")]
    # Exit status 7 is about its own statistics: a stressor was ended while it was counting. What it verified
    # of the filesystem is in the other statuses and in its last words.
    said = lib.run(
        "sh",
        "-c",
        'status=0; stress-ng "$@" || status=$?; [ $status = 7 ] || exit $status',
        "stress-ng",
        f"--temp-path={ckpt}",
        "--timeout=1",
        "--verify",
        "--hdd-bytes=32m",
        "--iomix-bytes=32m",
        *workers,
        timeout_s=60,
    )
    assert " successful run completed" in said
    assert os.listdir(ckpt) == []
