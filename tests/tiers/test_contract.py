"""What every tier does alike. Each test runs on S3 (Ceph), a directory (with and without xattrs) and in memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fs.body import FileBody
from fs.tiers.tier import (
    Tier,
    TierBadBytes,
    TierError,
    TierObjectChanged,
    TierObjectMissing,
    TierRefused,
    TierUploadMissing,
)
from tests.tiers.lib import MIB, listed, random_bytes, read

META = {"ckptfs-kind": "file", "ckptfs-mode": "0640", "ckptfs-mtime-ns": "1700000000123456789"}
# Names that a path can have and that are hard for somebody on the way: URLs, XML, headers.
ODD_NAMES = [
    "with space",
    " space at the ends ",
    "a+b",
    "100%",
    "%41%2F%00",
    "a&b=c?d#e;f,g@h:i",
    "ü-é-漢-🙂",
    "e\u0301",  # not normalised
    "\uf780\uf7ff",  # bytes that are no UTF-8
    "cr\rlf\ntab\t",
    "control\x01\x1f\x7f",
    "\ufffe\uffff",
    ".hidden",
    "..two",
    "...",
    "~tilde",
    "quote'\"`",
    "back\\slash",
    "<xml>&amp;]]>",
    "*?[a]{b}|$(c)!^",
    "2~upload",
]


class Slow(io.BytesIO):
    """A body that gives few bytes at a time, whatever is asked for."""

    def __len__(self) -> int:
        return len(self.getvalue())

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(1000)


def upload(tier: Tier, key: str, parts: list[bytes], meta: dict[str, str]) -> str:
    """A multipart upload of *parts*: the ETag."""
    upload_id = tier.start(key, meta)
    sent = [
        (number, tier.put_part(key, upload_id, number, data))
        for number, data in enumerate(parts, 1)
    ]
    return tier.complete(key, upload_id, sent)


# whole objects


@pytest.mark.parametrize("size", [0, 1, 65537, 3 * MIB + 5])
def test_what_was_put_is_read(tier: Tier, size: int) -> None:
    before_ns = time.time_ns()
    data = random_bytes(size)
    etag = tier.put("a/file", data, {"ckptfs-kind": "file"})
    info = tier.head("a/file")
    assert (info.key, info.size, info.etag) == ("a/file", size, etag)
    assert info.meta == {"ckptfs-kind": "file"}
    assert '"' not in etag and etag
    assert abs(info.modified_ns - before_ns) < 120e9
    assert read(tier, "a/file") == data
    assert tier.read("a/file", size) == (data, info)


def test_bodies_from_files_and_slow_ones(tier: Tier, tmp_path: Any) -> None:
    data = random_bytes(2 * MIB + 17)
    path = tmp_path / "source"
    path.write_bytes(b"x" * 100 + data + b"y" * 100)
    fd = os.open(path, os.O_RDONLY)
    try:
        body = FileBody(fd, 100, len(data))
        body.read()  # an earlier attempt that came half the way
        tier.put("from file", body, {})
        assert body.digest() is not None
    finally:
        os.close(fd)
    assert read(tier, "from file") == data
    tier.put("slow", Slow(data), {})
    assert read(tier, "slow") == data


def test_a_body_that_ends_early_makes_nothing(tier: Tier, tmp_path: Any) -> None:
    path = tmp_path / "source"
    path.write_bytes(random_bytes(MIB))
    tier.put("old", b"old", {})
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(TierBadBytes):
            tier.put("new", FileBody(fd, 0, 3 * MIB), {})
        with pytest.raises(TierBadBytes):
            tier.put("old", FileBody(fd, 0, 3 * MIB), {})
    finally:
        os.close(fd)
    with pytest.raises(TierObjectMissing):
        tier.head("new")
    assert read(tier, "old") == b"old"


def test_put_replaces_bytes_and_metadata(tier: Tier) -> None:
    first = tier.put("file", b"one", {"ckptfs-a": "1", "ckptfs-b": "2"})
    second = tier.put("file", b"two!", {"ckptfs-a": "3"})
    assert first != second
    assert tier.head("file").meta == {"ckptfs-a": "3"}
    assert read(tier, "file") == b"two!"
    assert listed(tier) == (["file"], [])


def test_metadata_of_the_greatest_size(tier: Tier) -> None:
    meta = {f"ckptfs-{name}": name * 250 for name in "abcdefg"}
    meta["ckptfs-last"] = "".join(map(chr, range(33, 127)))
    assert 1900 < sum(len(name) + len(value) for name, value in meta.items()) <= 2048
    tier.put("put", b"x", meta)
    assert tier.head("put").meta == meta
    upload(tier, "upload", [b"x"], meta)
    assert tier.head("upload").meta == meta
    tier.copy("put", "copy", meta, None)
    assert tier.head("copy").meta == meta


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(tier: Tier, name: str) -> None:
    key = f"dir {name}/{name}"
    etag = tier.put(key, b"put", {"ckptfs-a": "b"})
    assert tier.head(key).key == key
    assert read(tier, key) == b"put"
    assert listed(tier, deep=True) == ([key], [])
    assert listed(tier) == ([], [f"dir {name}/"])
    assert listed(tier, f"dir {name}/") == ([key], [])
    tier.copy(key, key + "c", {}, etag)
    upload_id = tier.start(key + "m", {})
    assert [found.key for found in tier.uploads()] == [key + "m"]
    part = tier.put_part(key + "m", upload_id, 1, b"part")
    assert [found.number for found in tier.parts(key + "m", upload_id)] == [1]
    tier.complete(key + "m", upload_id, [(1, part)])
    assert listed(tier, deep=True)[0] == [key, key + "c", key + "m"]
    assert read(tier, key + "c") == b"put" and read(tier, key + "m") == b"part"
    for gone in (key, key + "c", key + "m"):
        tier.delete(gone)
    assert listed(tier, deep=True) == ([], [])


def test_a_key_of_the_greatest_length(tier: Tier) -> None:
    length = min(1024, tier.limits.max_key_bytes)
    key = "/".join(["ü" * 100] * 12).encode()[:length].decode(errors="ignore")
    key = key.rstrip("/")
    key += "x" * (length - len(key.encode()))
    assert len(key.encode()) == length
    tier.put(key, b"x", {})
    upload(tier, key, [b"y"], {})
    assert listed(tier, deep=True)[0] == [key]
    assert read(tier, key) == b"y"
    tier.delete(key)


def test_delete_is_the_same_twice(tier: Tier) -> None:
    tier.put("a/b/file", b"x", {})
    tier.delete("a/b/file")
    tier.delete("a/b/file")
    tier.delete("never/there")
    assert listed(tier) == ([], [])
    for call in (
        lambda: tier.head("a/b/file"),
        lambda: tier.read("a/b/file", 10),
        lambda: tier.read_into("a/b/file", 0, memoryview(bytearray(1)), None),
        lambda: tier.copy("a/b/file", "c", {}, None),
        lambda: tier.head("a"),
        lambda: tier.head("a/b/file/below"),
    ):
        with pytest.raises(TierObjectMissing, match="a"):
            call()


# reading


def test_ranges(tier: Tier) -> None:
    data = random_bytes(100_000)
    tier.put("file", data, {})
    for offset, length in [(0, 1), (99_999, 1), (0, 100_000), (1234, 70_000), (500, 0)]:
        assert read(tier, "file", offset, length) == data[offset : offset + length]
    for offset, length in [(0, 100_001), (99_999, 2), (100_000, 1), (200_000, 5)]:
        with pytest.raises(TierBadBytes, match="file"):
            read(tier, "file", offset, length)
    with pytest.raises(TierBadBytes, match="file"):
        tier.read("file", 99_999)


def test_only_the_version_that_was_asked_for(tier: Tier) -> None:
    old = tier.put("file", b"one", {})
    new = tier.put("file", b"two", {})
    buffer = bytearray(3)
    with pytest.raises(TierObjectChanged, match="file"):
        tier.read_into("file", 0, memoryview(buffer), old)
    assert buffer == bytes(3)
    tier.read_into("file", 0, memoryview(buffer), new)
    assert buffer == b"two"
    tier.read_into("file", 1, memoryview(buffer)[:2], None)
    assert buffer == b"woo"
    with pytest.raises(TierObjectChanged, match="file"):
        tier.copy("file", "copy", {}, old)
    with pytest.raises(TierObjectMissing):
        tier.head("copy")


# directories


def test_directories_are_objects_whose_keys_end_in_a_slash(tier: Tier) -> None:
    meta = {"ckptfs-kind": "directory", "ckptfs-mode": "0750"}
    tier.put("a/", b"", meta)
    tier.put("a/b/", b"", {})
    tier.put("a/b/file", b"x", {})
    tier.put("a/b/", b"", meta)  # again, with what is in it
    assert tier.head("a/").size == 0 and tier.head("a/").meta == meta
    assert tier.head("a/b/").meta == meta
    assert listed(tier) == ([], ["a/"])
    assert listed(tier, "a/") == (["a/"], ["a/b/"])
    assert listed(tier, "a/b/") == (["a/b/", "a/b/file"], [])
    assert listed(tier, deep=True) == (["a/", "a/b/", "a/b/file"], [])
    tier.copy("a/", "c/", {"ckptfs-x": "y"}, None)
    assert tier.head("c/").meta == {"ckptfs-x": "y"}
    tier.copy("c/", "c/", {"ckptfs-x": "z"}, tier.head("c/").etag)
    assert tier.head("c/").meta == {"ckptfs-x": "z"}
    tier.delete("a/b/")  # the file in it stays
    with pytest.raises(TierObjectMissing):
        tier.head("a/b/")
    assert listed(tier, deep=True) == (["a/", "a/b/file", "c/"], [])
    tier.delete("a/b/file")
    assert listed(tier, deep=True) == (["a/", "c/"], [])
    tier.delete("a/")
    tier.delete("c/")
    assert listed(tier) == ([], [])


# listings


def test_listings_page_by_page_in_order(tier: Tier) -> None:
    tier.page_size = 3  # type: ignore[attr-defined]
    rng = random.Random(7)
    keys = {
        f"{a}{b}"
        for a in ("", "d/", "d.x/", "d/e/", "d0/", "é/", "\uf780/", "x\x01/")
        for b in ("a", "b", "b.c", "z z", "~", "\ufffd", "🙂")
    }
    keys |= {"d/", "d/e/", "empty/"}
    shuffled = sorted(keys)
    rng.shuffle(shuffled)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: tier.put(key, b"", {}), shuffled))
    in_order = sorted(keys, key=lambda key: key.encode())
    assert listed(tier, deep=True) == (in_order, [])
    below = [key for key in in_order if key.startswith("d/")]
    assert listed(tier, "d/", deep=True) == (below, [])
    for prefix in ("", "d/", "d/e/", "x\x01/", "nothing/"):
        below = [key.removeprefix(prefix) for key in in_order if key.startswith(prefix)]
        objects = [prefix + key for key in below if "/" not in key]
        prefixes = [
            prefix + name + "/"
            for name in dict.fromkeys(k.partition("/")[0] for k in below if "/" in k)
        ]
        assert listed(tier, prefix) == (objects, prefixes), prefix


def test_a_listing_says_what_head_says(tier: Tier) -> None:
    tier.put("a/put", b"x" * 10, META)
    upload(tier, "a/upload", [b"y" * 20], META)
    tier.copy("a/put", "a/copy", META, None)
    found = {each.key: each for each in tier.list("a/").objects}
    assert set(found) == {"a/put", "a/upload", "a/copy"}
    for key, each in found.items():
        info = tier.head(key)
        assert (each.size, each.etag) == (info.size, info.etag)
        assert abs(each.modified_ns - info.modified_ns) < 1e9  # HEAD gives whole seconds


# multipart uploads


def test_an_upload_in_parts(tier: Tier) -> None:
    least = tier.limits.min_part_bytes
    pieces = [random_bytes(max(least, MIB)), random_bytes(max(least, MIB)), random_bytes(12345)]
    tier.put("file", b"what was there", {})
    upload_id = tier.start("file", META)
    etags: dict[int, str] = {}
    for number in (3, 1):  # in any order
        etags[number] = tier.put_part("file", upload_id, number, pieces[number - 1])
    assert [(part.number, part.size, part.etag) for part in tier.parts("file", upload_id)] == [
        (1, len(pieces[0]), etags[1]),
        (3, len(pieces[2]), etags[3]),
    ]
    tier.put_part("file", upload_id, 2, random_bytes(least))
    etags[2] = tier.put_part("file", upload_id, 2, Slow(pieces[1]))  # again: the last one counts
    assert [part.size for part in tier.parts("file", upload_id)] == [len(p) for p in pieces]
    assert read(tier, "file") == b"what was there"
    etag = tier.complete("file", upload_id, sorted(etags.items()))
    info = tier.head("file")
    assert (info.etag, info.size, info.meta) == (etag, sum(map(len, pieces)), META)
    assert read(tier, "file") == b"".join(pieces)
    assert (
        read(tier, "file", len(pieces[0]) - 5, 10)
        == (pieces[0] + pieces[1])[len(pieces[0]) - 5 :][:10]
    )
    assert list(tier.uploads()) == []


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3)])
def test_parts_of_equal_size_in_any_order(tier: Tier, order: tuple[int, ...]) -> None:
    size = max(tier.limits.min_part_bytes, 100_000)
    pieces = [random_bytes(size) for _ in range(3)] + [random_bytes(777)]
    upload_id = tier.start("file", META)
    etags = {n: tier.put_part("file", upload_id, n, pieces[n - 1]) for n in order}
    tier.complete("file", upload_id, sorted(etags.items()))
    assert read(tier, "file") == b"".join(pieces)


def test_a_lost_answer_to_complete(tier: Tier) -> None:
    upload_id = tier.start("file", META)
    part = tier.put_part("file", upload_id, 1, b"bytes")
    etag = tier.complete("file", upload_id, [(1, part)])
    with contextlib.suppress(TierUploadMissing):  # a tier may still know that it was done
        assert tier.complete("file", upload_id, [(1, part)]) == etag
    info = tier.head("file")
    assert (info.etag, info.meta) == (etag, META)
    assert read(tier, "file") == b"bytes"


def test_uploads_that_are_gone(tier: Tier) -> None:
    upload_id = tier.start("a/file", {})
    part = tier.put_part("a/file", upload_id, 1, b"bytes")
    tier.abort("a/file", upload_id)
    tier.abort("a/file", upload_id)
    assert list(tier.uploads()) == []
    for call in (
        lambda: tier.complete("a/file", upload_id, [(1, part)]),
        lambda: tier.put_part("a/file", upload_id, 1, b"bytes"),
        lambda: tier.parts("a/file", upload_id),
        lambda: tier.parts("a/file", "never-there"),
        lambda: tier.put_part("a/file", "never-there", 1, b"bytes"),
        lambda: tier.complete("a/file", "never-there", [(1, part)]),
    ):
        with pytest.raises(TierUploadMissing, match="a/file"):
            call()
    tier.abort("a/file", "never-there")
    assert listed(tier, deep=True) == ([], [])


def test_parts_that_are_not_those_that_were_sent(tier: Tier) -> None:
    upload_id = tier.start("file", {})
    tier.put_part("file", upload_id, 1, b"bytes")
    with pytest.raises(TierUploadMissing):
        tier.complete("file", upload_id, [(1, "0" * 32)])
    with pytest.raises(TierUploadMissing):
        tier.complete(
            "file", upload_id, [(1, tier.parts("file", upload_id)[0].etag), (2, "0" * 32)]
        )
    with pytest.raises(TierObjectMissing):
        tier.head("file")


def test_uploads_below_a_prefix(tier: Tier) -> None:
    tier.page_size = 2  # type: ignore[attr-defined]
    started_ns = time.time_ns()
    ids = {
        (key, tier.start(key, {}))
        for key in itertools.chain(["ckpt/a", "ckpt2/a", "x"], ["ckpt/b"] * 3, ["ckpt/ü +%"])
    }
    found = list(tier.uploads())
    assert {(each.key, each.upload_id) for each in found} == ids
    assert all(each.started_ns and abs(each.started_ns - started_ns) < 120e9 for each in found)
    below = {(each.key, each.upload_id) for each in tier.uploads("ckpt/")}
    assert below == {each for each in ids if each[0].startswith("ckpt/")}
    assert [each.key for each in tier.uploads("ckpt/a")] == ["ckpt/a"]
    assert list(tier.uploads("nothing")) == []
    for key, upload_id in ids:
        tier.abort(key, upload_id)
    assert list(tier.uploads()) == []


def test_parts_page_by_page(tier: Tier) -> None:
    tier.page_size = 2  # type: ignore[attr-defined]
    upload_id = tier.start("file", {})
    etags = [tier.put_part("file", upload_id, n, bytes([n]) * n) for n in range(1, 8)]
    there = tier.parts("file", upload_id)
    assert [(p.number, p.size, p.etag) for p in there] == list(
        zip(range(1, 8), range(1, 8), etags, strict=True)
    )


# copies


def test_copies(tier: Tier) -> None:
    data = random_bytes(50_000)
    etag = tier.put("a/file", data, META)
    made = tier.copy("a/file", "b/c/file", {"ckptfs-mode": "0600"}, etag)
    info = tier.head("b/c/file")
    assert (info.etag, info.size, info.meta) == (made, len(data), {"ckptfs-mode": "0600"})
    assert read(tier, "b/c/file") == data
    assert tier.head("a/file").meta == META
    tier.copy("b/c/file", "a/file", {}, None)  # onto another
    assert tier.head("a/file").meta == {}
    tier.delete("b/c/file")
    assert read(tier, "a/file") == data


def test_a_copy_onto_itself_changes_metadata_only(tier: Tier) -> None:
    data = random_bytes(50_000)
    etag = tier.put("file", data, META)
    changed = {"ckptfs-mode": "0600", "ckptfs-mtime-ns": "1600000000000000000"}
    for meta in (changed, META, {}):
        etag = tier.copy("file", "file", meta, etag)
        assert tier.head("file") == tier.read("file", len(data))[1]
        assert tier.head("file").meta == meta and tier.head("file").etag == etag
        assert read(tier, "file") == data


@pytest.mark.parametrize("target", ["copy", "file"])
def test_copies_of_what_is_too_large_for_one_call(tier: Tier, target: str) -> None:
    tier.limits = tier.limits._replace(max_copy_bytes=MIB)
    tier.copy_part_bytes = 5 * MIB  # type: ignore[attr-defined]
    data = random_bytes(11 * MIB)
    etag = tier.put("file", data, META)
    made = tier.copy("file", target, {"ckptfs-a": "b"}, etag)
    assert tier.head(target).etag == made
    assert tier.head(target).meta == {"ckptfs-a": "b"}
    assert read(tier, target) == data
    assert list(tier.uploads()) == []
    with pytest.raises(TierObjectChanged):
        tier.copy("file", target, {}, "0" * 32)


# many at once


def test_calls_from_many_threads(tier: Tier) -> None:
    least = max(tier.limits.min_part_bytes, 100_000)

    def one(number: int) -> None:
        data = random.Random(number).randbytes(2000 + number)
        key = f"dir {number % 3}/{number}"
        for _ in range(3):
            tier.put(key, data, {"ckptfs-n": str(number)})
            assert read(tier, key) == data
        tier.copy(key, f"{key}.copy", {}, None)
        tier.delete(f"{key}.copy")
        if number % 4 == 0:
            upload(tier, f"{key}.upload", [data * (least // len(data) + 1), data], {})
        tier.delete(key)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(24)))
    assert listed(tier, deep=True)[0] == sorted(f"dir {n % 3}/{n}.upload" for n in range(0, 24, 4))


def test_readers_see_one_version_whole(tier: Tier) -> None:
    versions = [bytes([n]) * 200_000 for n in range(8)]
    tier.put("file", versions[0], {})
    seen = 0

    def write() -> None:
        for version in versions[1:] * 3:
            tier.put("file", version, {"ckptfs-n": str(version[0])})

    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(write)
        while not writing.done():
            try:
                data, info = tier.read("file", MIB)
                assert data in versions
                assert info.meta in ({}, {"ckptfs-n": str(data[0])})
                buffer = bytearray(200_000)
                tier.read_into("file", 0, memoryview(buffer), info.etag)
                assert bytes(buffer) == data
                seen += 1
            except TierObjectChanged:
                pass
            except TierError as error:  # Ceph may answer 500 while an object is replaced
                assert type(error) is TierError
        writing.result()
    assert seen
    assert read(tier, "file") == versions[-1]


# what cannot be


def test_errors_name_the_object_and_are_of_one_family(tier: Tier) -> None:
    with pytest.raises(TierError) as caught:
        tier.head("some/where")
    assert tier.url("some/where") in str(caught.value)
    assert tier.url("some/where").startswith(tier.describe())
    with pytest.raises(TierRefused):
        tier.put("x" * 5000, b"", {})
    tier.check()
