"""A tier in a directory: what lies on the disk, what others do to it, and disks that fail."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fs.objects import metadata_of
from fs.tiers import dirfiles, dirmeta, dirparts
from fs.tiers.directory import DirectoryTier
from fs.tiers.dirmeta import HIDDEN
from fs.tiers.tier import (
    TierError,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)
from fs.types import Attr
from tests.tiers.lib import MIB, listed, random_bytes, read

MTIME_NS = 1_700_000_000_123_456_789


def meta_of(mode: int, uid: int = 0, gid: int = 0) -> dict[str, str]:
    """Metadata as writeback makes them."""
    return metadata_of(
        Attr(
            ino=5,
            mode=mode,
            nlink=1,
            uid=uid,
            gid=gid,
            rdev=0,
            size=0,
            blocks=0,
            atime_ns=0,
            mtime_ns=MTIME_NS,
            ctime_ns=0,
            generation=1,
        ),
        None,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "tier"
    directory.mkdir()
    return directory


@pytest.fixture(params=["attributes", "sidecars"])
def tier(request: pytest.FixtureRequest, root: Path) -> DirectoryTier:
    return DirectoryTier(str(root), attributes=request.param == "attributes")


def names_below(root: Path) -> list[str]:
    """What a person sees, without what is hidden."""
    return sorted(
        str(path.relative_to(root)) for path in root.rglob("*") if HIDDEN not in path.parts
    )


def leftovers(root: Path) -> list[Path]:
    """Files below the hidden directory that are of no object."""
    return [p for p in (root / HIDDEN).rglob("*") if p.is_file() and p.parent.name != "meta"]


def test_objects_are_plain_files(tier: DirectoryTier, root: Path) -> None:
    tier.put("run/", b"", meta_of(stat.S_IFDIR | 0o750))
    tier.put("run/step 1/model.pt", b"weights", meta_of(stat.S_IFREG | 0o640, 1234, 5678))
    upload_id = tier.start("run/large", meta_of(stat.S_IFREG | 0o4444))
    part = tier.put_part("run/large", upload_id, 1, b"part")
    tier.complete("run/large", upload_id, [(1, part)])
    assert names_below(root) == ["run", "run/large", "run/step 1", "run/step 1/model.pt"]
    assert (root / "run/step 1/model.pt").read_bytes() == b"weights"
    status = (root / "run/step 1/model.pt").stat()
    assert (status.st_mtime_ns, stat.S_IMODE(status.st_mode)) == (MTIME_NS, 0o640)
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (1234, 5678)
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o750
    assert stat.S_IMODE((root / "run/large").stat().st_mode) == 0o444
    assert stat.S_IMODE((root / HIDDEN).stat().st_mode) == 0o700
    assert leftovers(root) == []


def test_names_are_those_of_the_filesystem(tier: DirectoryTier, root: Path) -> None:
    tier.put("caf\uf7e9/\uf7ff", b"x", {})
    assert os.listdir(os.fsencode(root / os.fsdecode(b"caf\xe9"))) == [b"\xff"]
    assert listed(tier, deep=True) == (["caf\uf7e9/\uf7ff"], [])
    (root / os.fsdecode(b"other\xfe")).write_bytes(b"y")
    assert read(tier, "other\uf7fe") == b"y"


@pytest.mark.parametrize(
    "key", ["..", "../x", "a/../x", "a/./x", "a//b", "/a", "a\0b", "x" * 256, HIDDEN, HIDDEN + "/x"]
)
def test_keys_that_would_lead_elsewhere(tier: DirectoryTier, root: Path, key: str) -> None:
    (root.parent / "x").write_bytes(b"not the tier's")
    for call in (
        lambda: tier.put(key, b"x", {}),
        lambda: tier.head(key),
        lambda: tier.delete(key),
        lambda: tier.start(key, {}),
        lambda: tier.list(key + "/"),
    ):
        with pytest.raises(TierRefused):
            call()
    assert names_below(root) == []
    assert (root.parent / "x").read_bytes() == b"not the tier's"


def test_links_are_not_followed(tier: DirectoryTier, root: Path) -> None:
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere/file").write_bytes(b"secret")
    (root / "link").symlink_to(root.parent / "elsewhere")
    (root / "file").symlink_to(root.parent / "elsewhere/file")
    os.mkfifo(root / "fifo")
    assert listed(tier, deep=True) == ([], [])
    for key in ("file", "fifo", "link/"):
        with pytest.raises(TierObjectMissing):
            tier.head(key)
    with pytest.raises(TierRefused, match="no directory"):
        tier.put("link/new", b"x", {})
    assert os.listdir(root.parent / "elsewhere") == ["file"]
    tier.put("file", b"ours", {})  # in the link's place
    assert read(tier, "file") == b"ours"
    assert (root.parent / "elsewhere/file").read_bytes() == b"secret"


def test_one_name_is_a_file_or_a_directory(tier: DirectoryTier) -> None:
    tier.put("a", b"x", {})
    for key in ("a/b", "a/b/c", "a/"):
        with pytest.raises(TierRefused, match=r"a is there and no directory"):
            tier.put(key, b"", {})
    tier.put("b/c", b"x", {})
    tier.put("d/", b"", {})
    for key in ("b", "d"):
        with pytest.raises(TierRefused, match=f"the directory {key}/"):
            tier.put(key, b"x", {})
    tier.delete("b/c")
    tier.delete("d/")
    tier.put("b", b"file", {})
    tier.delete("a")
    tier.put("a/b", b"x", {})
    assert listed(tier, deep=True)[0] == ["a/b", "b"]


def test_files_that_others_put_there(tier: DirectoryTier, root: Path) -> None:
    (root / "dir/deep").mkdir(parents=True)
    (root / "dir/file").write_bytes(b"theirs")
    (root / "empty").mkdir()
    info = tier.head("dir/file")
    assert (info.size, info.meta) == (6, {})
    assert read(tier, "dir/file") == b"theirs"
    assert listed(tier) == ([], ["dir/", "empty/"])  # an empty directory is one
    assert listed(tier, deep=True)[0] == ["dir/file"]
    (root / "dir/file").write_bytes(b"longer")
    os.utime(root / "dir/file", ns=(1, 1))
    assert tier.head("dir/file").etag != info.etag
    tier.delete("dir/file")
    assert names_below(root) == ["dir", "dir/deep", "empty"]


def test_a_file_that_was_changed_from_outside_has_no_metadata(
    tier: DirectoryTier, root: Path
) -> None:
    for change in ("write", "replace", "touch"):
        etag = tier.put("file", b"ours", {"ckptfs-a": "b"})
        if change == "write":
            (root / "file").write_bytes(b"data")
        elif change == "replace":
            (root.parent / "new").write_bytes(b"data")
            os.replace(root.parent / "new", root / "file")
        else:
            os.utime(root / "file", ns=(1, 1))
        info = tier.head("file")
        assert info.meta == {} and info.etag != etag, change
        assert tier.list("").objects[0].etag == info.etag


def test_a_copy_of_the_whole_directory_is_the_same_tier(root: Path) -> None:
    tier = DirectoryTier(str(root))
    tier.put("a/", b"", {"ckptfs-kind": "directory"})
    tier.put("a/file", b"x" * 1000, meta_of(stat.S_IFREG | 0o600))
    info = tier.head("a/file")
    subprocess.run(["cp", "-a", root, f"{root}2"], check=True, timeout=30)
    copy = DirectoryTier(f"{root}2")
    assert copy.head("a/file") == info
    assert copy.head("a/").meta == {"ckptfs-kind": "directory"}


def test_sidecars_come_and_go_with_their_files(root: Path) -> None:
    tier = DirectoryTier(str(root), attributes=False)
    for n in range(3):
        tier.put("a/file", bytes([n]) * (n + 1), {"ckptfs-n": str(n)})
        tier.put("a/", b"", {"ckptfs-n": str(n)})
        tier.copy("a/file", "a/file", {"ckptfs-mtime-ns": str(10**18 + n)}, None)
    assert len(list((root / HIDDEN / "meta").iterdir())) == 2
    assert tier.head("a/file").meta == {"ckptfs-mtime-ns": str(10**18 + 2)}
    tier.delete("a/file")
    tier.delete("a/")
    assert list((root / HIDDEN / "meta").iterdir()) == []


def test_metadata_that_do_not_fit_into_an_attribute(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DirectoryTier(str(root))
    tier.put("file", b"x", {"ckptfs-a": "old"})
    tier.put("dir/", b"", {"ckptfs-a": "old"})

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space in the inode")

    monkeypatch.setattr(dirmeta.os, "setxattr", full)
    tier.copy("file", "file", {"ckptfs-a": "new"}, None)
    tier.put("dir/", b"", {"ckptfs-a": "new"})
    assert tier.head("file").meta == tier.head("dir/").meta == {"ckptfs-a": "new"}
    monkeypatch.undo()
    tier.copy("file", "file", {"ckptfs-a": "newer"}, None)
    assert tier.head("file").meta == {"ckptfs-a": "newer"}


def test_damaged_metadata_are_none(root: Path) -> None:
    tier = DirectoryTier(str(root))
    tier.put("file", b"x", {"ckptfs-a": "b"})
    for damage in (b"", b"{", b"[]", b'{"etag":1}', b"\xff"):
        os.setxattr(root / "file", dirmeta.ATTRIBUTE, damage)
        assert tier.head("file").meta == {}


def test_parts_in_place_are_not_written_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DirectoryTier(str(root))
    pieces = [random_bytes(MIB), random_bytes(MIB), random_bytes(10)]
    upload_id = tier.start("file", {})
    etags = [(n, tier.put_part("file", upload_id, n, piece)) for n, piece in enumerate(pieces, 1)]

    def copied(*args: object) -> None:
        raise AssertionError("bytes were copied")

    monkeypatch.setattr(dirparts, "copy_range", copied)
    tier.complete("file", upload_id, etags)
    assert read(tier, "file") == b"".join(pieces)
    assert leftovers(root) == []


def test_not_all_parts_that_were_sent_are_used(root: Path) -> None:
    tier = DirectoryTier(str(root))
    pieces = [random_bytes(1000), random_bytes(1000), random_bytes(3000)]
    upload_id = tier.start("file", {})
    etags = {n: tier.put_part("file", upload_id, n, piece) for n, piece in enumerate(pieces, 1)}
    tier.complete("file", upload_id, [(1, etags[1]), (3, etags[3])])
    assert read(tier, "file") == pieces[0] + pieces[2]
    assert leftovers(root) == []


def test_uploads_outlive_the_process(root: Path) -> None:
    tier = DirectoryTier(str(root))
    upload_id = tier.start("file", {"ckptfs-a": "b"})
    etags = [(1, tier.put_part("file", upload_id, 1, b"12345"))]
    again = DirectoryTier(str(root))
    assert [part.etag for part in again.parts("file", upload_id)] == [etags[0][1]]
    etags.append((2, again.put_part("file", upload_id, 2, b"678")))
    again.complete("file", upload_id, etags)
    assert again.read("file", 10)[0] == b"12345678"
    assert again.head("file").meta == {"ckptfs-a": "b"}


def test_an_upload_of_which_a_part_is_half_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DirectoryTier(str(root))
    upload_id = tier.start("file", {})
    etag = tier.put_part("file", upload_id, 1, b"old" * 1000)
    monkeypatch.setattr(
        dirparts.os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    )
    with pytest.raises(TierError, match="broken"):
        tier.put_part("file", upload_id, 1, b"new" * 1000)
    monkeypatch.undo()
    assert tier.parts("file", upload_id) == []
    with pytest.raises(TierUploadMissing):
        tier.complete("file", upload_id, [(1, etag)])


def test_what_crashes_leave_is_cleared_up_after_a_day(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DirectoryTier(str(root))
    tier.put("file", b"x", {})
    left = root / HIDDEN / "tmp" / "left"
    left.write_bytes(b"half")
    (root / HIDDEN / "tmp" / "dead-upload").mkdir()
    tier.check()
    assert len(leftovers(root)) == 1
    monkeypatch.setattr(dirfiles.time, "time", lambda: time.time_ns() / 1e9 + 2 * 86400)
    tier.check()
    assert list((root / HIDDEN / "tmp").iterdir()) == []
    assert read(tier, "file") == b"x"


def all_calls(tier: DirectoryTier) -> list[object]:
    return [
        tier.check,
        lambda: tier.put("a/file", b"x", {}),
        lambda: tier.head("a/file"),
        lambda: tier.read("a/file", 10),
        lambda: tier.read_into("a/file", 0, memoryview(bytearray(1)), None),
        lambda: tier.list(""),
        lambda: tier.list("a/", deep=True),
        lambda: tier.copy("a/file", "b", {}, None),
        lambda: tier.delete("a/file"),
        lambda: tier.start("a/file", {}),
        lambda: list(tier.uploads()),
        lambda: tier.parts("a/file", "0" * 32),
        lambda: tier.abort("a/file", "0" * 32),
    ]


def test_no_directory(tier: DirectoryTier, root: Path) -> None:
    root.rmdir()
    for call in all_calls(tier):
        with pytest.raises(TierRefused, match=r"there is no directory.*create it"):
            call()  # type: ignore[operator]
    assert not root.exists()


def test_a_disk_that_is_unmounted_from_under_it(tier: DirectoryTier, root: Path) -> None:
    tier.put("a/file", b"x", {})
    root.rename(f"{root}.away")
    root.mkdir()
    for call in all_calls(tier):
        with pytest.raises(TierRefused, match=r"another directory than at first.*mounted"):
            call()  # type: ignore[operator]
    assert os.listdir(root) == []
    root.rmdir()
    os.rename(f"{root}.away", root)
    assert read(tier, "a/file") == b"x"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
class TestDisksThatFail:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "disk"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], timeout=30, check=False
        )
        if done.returncode:
            pytest.skip("this container may not mount")
        yield path
        subprocess.run(["umount", path], check=True, timeout=30)

    def test_a_full_disk_may_pass_and_harms_nothing(self, disk: Path) -> None:
        tier = DirectoryTier(str(disk))
        tier.put("file", b"old", {"ckptfs-a": "b"})
        upload_id = tier.start("upload", {})
        for call in (
            lambda: tier.put("file", bytes(5 * MIB), {}),
            lambda: tier.put("new", bytes(5 * MIB), {}),
            lambda: tier.put_part("upload", upload_id, 1, bytes(5 * MIB)),
        ):
            with pytest.raises(TierError, match="No space left") as caught:
                call()
            assert type(caught.value) is TierError
        assert read(tier, "file") == b"old" and tier.head("file").meta == {"ckptfs-a": "b"}
        assert listed(tier, deep=True) == (["file"], [])
        assert tier.parts("upload", upload_id) == []
        tier.abort("upload", upload_id)
        tier.put("new", bytes(2 * MIB), {})  # there is room again
        assert leftovers(disk) == []

    def test_a_read_only_disk_is_refused_and_can_be_read(self, disk: Path) -> None:
        tier = DirectoryTier(str(disk))
        tier.put("file", b"x", {})
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)
        for call in (
            lambda: tier.put("file", b"y", {}),
            lambda: tier.delete("file"),
            lambda: tier.start("new", {}),
            lambda: tier.copy("file", "file", {}, None),
        ):
            with pytest.raises(TierRefused, match="Read-only"):
                call()
        assert read(tier, "file") == b"x"
        tier.check()


def test_errors_of_the_disk_are_told_apart() -> None:
    passing = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE]
    lasting = [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG]
    for code in passing:
        error = dirfiles.os_error(OSError(code, os.strerror(code)), "storing x")
        assert type(error) is TierError and os.strerror(code) in str(error)
    for code in lasting:
        assert type(dirfiles.os_error(OSError(code, "x"), "storing x")) is TierRefused


def test_a_listing_while_files_come_and_go(tier: DirectoryTier, root: Path) -> None:
    tier.page_size = 5
    for n in range(20):
        tier.put(f"d{n:02}/file", b"x", {})
    page = tier.list("", deep=True)
    assert [found.key for found in page.objects] == [f"d{n:02}/file" for n in range(5)]
    shutil.rmtree(root / "d04")
    shutil.rmtree(root / "d05")
    tier.put("d01/late", b"x", {})
    tier.put("d06/a", b"x", {})
    page = tier.list("", deep=True, token=page.next_token)
    keys = [found.key for found in page.objects]
    assert keys == ["d06/a", "d06/file", "d07/file", "d08/file", "d09/file"]
