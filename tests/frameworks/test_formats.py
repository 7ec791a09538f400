"""Libraries with file formats of their own: safetensors, h5py, zarr, numpy, SQLite."""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import lib


def weights(torch: Any, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(2000, 301, generator=generator),
        "half": torch.randn(77, 91, generator=generator).to(torch.bfloat16),
        "ids": torch.randint(0, 1 << 40, (1001,), generator=generator),
        "none": torch.empty(0, 5),
        "scalar": torch.tensor(1.5 + seed),
    }


def test_safetensors(torch: Any, ckpt: Path) -> None:
    """Save, load whole, load slices from the mapping, replace while an older mapping is alive."""
    safetensors = lib.need("safetensors")
    torch_files = lib.need("safetensors.torch")
    path = ckpt / "model.safetensors"
    want, newer = weights(torch), weights(torch, 1)
    metadata = {"step": "3"}  # one entry: safetensors writes several in any order
    torch_files.save_file(want, path, metadata=metadata)
    got = torch_files.load_file(path)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    same = path.read_bytes() == torch_files.save(want, metadata=metadata)
    assert same, "the file is not what safetensors made in memory"

    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata()["step"] == "3"
        assert torch.equal(file.get_slice("embed")[500:700, 3:], want["embed"][500:700, 3:])
        temporary = ckpt / "model.safetensors.tmp"
        torch_files.save_file(newer, temporary)
        os.replace(temporary, path)
        assert torch.equal(file.get_tensor("embed"), want["embed"])
    got = torch_files.load_file(path)
    assert all(torch.equal(got[name], newer[name]) for name in newer)
    assert os.listdir(ckpt) == ["model.safetensors"]


def test_safetensors_saved_over_itself(torch: Any, ckpt: Path) -> None:
    torch_files = lib.need("safetensors.torch")
    path = ckpt / "model.safetensors"
    for seed in range(4):
        want = weights(torch, seed)
        if seed % 2:
            del want["embed"]  # smaller: nothing of the larger one may remain
        torch_files.save_file(want, path)
        got = torch_files.load_file(path)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert os.listdir(ckpt) == ["model.safetensors"]


def test_h5py(ckpt: Path) -> None:
    """Chunked, compressed, resized and contiguous data sets; reopened to append; locked against a second writer."""
    h5py, numpy = lib.need("h5py"), lib.need("numpy")
    path = ckpt / "data.h5"
    rows = numpy.random.default_rng(1).normal(size=(3000, 64))
    with h5py.File(path, "w") as file:
        file["plain"] = rows
        file.create_dataset(
            "packed", data=rows[:1000], chunks=(100, 64), compression="gzip", maxshape=(None, 64)
        )
        file["packed"].attrs["epoch"] = 3
        file.create_group("deep/er")["text"] = ["a", "ä", ""]
        # HDF5 locks what it has open for writing.
        text = f"import h5py; h5py.File({str(path)!r}, 'a')"
        with pytest.raises(AssertionError, match=r"(?i)unable to lock file"):
            lib.run(sys.executable, "-c", text)
    with h5py.File(path, "a") as file:
        file["packed"].resize(3000, axis=0)
        file["packed"][1000:] = rows[1000:]
        file["plain"][17] = 0
    with h5py.File(path, "r") as file:
        assert numpy.array_equal(file["packed"][:], rows)
        assert numpy.array_equal(file["plain"][18:], rows[18:])
        assert not file["plain"][17].any()
        assert file["packed"].attrs["epoch"] == 3
        assert [text.decode() for text in file["deep/er/text"]] == ["a", "ä", ""]


def test_h5py_one_writes_and_another_reads(ckpt: Path) -> None:
    """SWMR: a reader in another process follows a growing data set."""
    h5py, numpy = lib.need("h5py"), lib.need("numpy")
    path = ckpt / "log.h5"
    reader = f"""
import h5py
with h5py.File({str(path)!r}, "r", swmr=True) as file:
    values = file["loss"]
    values.refresh()
    print(len(values), int(values[:].sum()))
"""
    with h5py.File(path, "w", libver="latest") as file:
        losses = file.create_dataset(
            "loss", shape=(0,), maxshape=(None,), chunks=(100,), dtype="i8"
        )
        file.swmr_mode = True
        for count in (1, 1000, 2500):
            losses.resize((count,))
            losses[:] = numpy.arange(count)
            losses.flush()
            said = lib.run(sys.executable, "-c", reader).split()
            assert said == [str(count), str(count * (count - 1) // 2)]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_zarr(ckpt: Path) -> None:
    """Groups, sharded and compressed chunks, append, partial overwrite, consolidation, deletion."""
    zarr, numpy = lib.need("zarr"), lib.need("numpy")
    rows = numpy.random.default_rng(2).normal(size=(700, 300))
    root = zarr.open_group(ckpt / "run.zarr", mode="w")
    array = root.create_array(
        "layers/weight", shape=(500, 300), chunks=(50, 60), shards=(100, 120), dtype="f8"
    )
    array[:] = rows[:500]
    array.append(rows[500:])
    array[13:29, 7:250] = 0
    root.create_array("removed", data=rows[:100])
    root.attrs["step"] = 12
    del root["removed"]
    zarr.consolidate_metadata(ckpt / "run.zarr")

    again = zarr.open_group(ckpt / "run.zarr", mode="r")
    want = rows.copy()
    want[13:29, 7:250] = 0
    assert numpy.array_equal(again["layers/weight"][:], want)
    assert again.attrs["step"] == 12
    assert list(again) == ["layers"]
    assert not list((ckpt / "run.zarr").rglob("*.partial*")), "zarr's temporary files are renamed"


def test_numpy(ckpt: Path) -> None:
    """npz (a zip that is sought in while written), and a memmap written through."""
    numpy = lib.need("numpy")
    rows = numpy.arange(100_000).reshape(1000, 100)
    numpy.savez_compressed(ckpt / "a.npz", rows=rows, name=numpy.array("x"))
    with numpy.load(ckpt / "a.npz") as loaded:
        assert numpy.array_equal(loaded["rows"], rows)
        assert loaded["name"] == "x"
    mapped = numpy.lib.format.open_memmap(ckpt / "m.npy", mode="w+", dtype="i8", shape=rows.shape)
    mapped[:] = rows
    mapped.flush()
    # Seen by read() while still mapped, and back.
    assert numpy.array_equal(numpy.load(ckpt / "m.npy"), rows)
    with open(ckpt / "m.npy", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write((-5).to_bytes(8, "little", signed=True))
    assert mapped[-1, -1] == -5


def test_sqlite_wal_from_two_processes(ckpt: Path) -> None:
    """WAL needs shared mappings and byte-range locks that both processes see alike."""
    path = ckpt / "run.sqlite"
    database = sqlite3.connect(path, isolation_level=None)
    assert database.execute("pragma journal_mode = wal").fetchone() == ("wal",)
    database.execute("create table account (id integer primary key, amount integer)")
    database.execute("create table entry (writer integer, number integer, text text)")
    database.executemany(
        "insert into account values (?, 1000)", [(number,) for number in range(100)]
    )

    transactions = 300
    job = (sys.executable, lib.JOBS / "sqlite_writer.py", path)
    commands = [(*job, str(writer), str(transactions)) for writer in range(2)]
    lib.run_all(commands, timeout_s=90, envs=[{}, {}])

    assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert database.execute("select sum(amount) from account").fetchone() == (100_000,)
    entries = database.execute(
        "select writer, count(*), sum(number) from entry group by writer"
    ).fetchall()
    total = transactions * (transactions - 1) // 2
    assert entries == [(0, transactions, total), (1, transactions, total)]
    database.close()
    assert os.listdir(ckpt) == ["run.sqlite"], "the last one to close removes the log"


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist"])
def test_sqlite_rollback_journals(ckpt: Path, journal: str) -> None:
    path = ckpt / "run.sqlite"
    database = sqlite3.connect(path, isolation_level=None)
    assert database.execute(f"pragma journal_mode = {journal}").fetchone() == (journal,)
    database.execute("create table t (x)")
    database.execute("begin")
    database.executemany("insert into t values (?)", [("a" * 3000,)] * 2000)
    database.execute("rollback")
    database.executemany("insert into t values (?)", [(number,) for number in range(20)])
    database.close()
    again = sqlite3.connect(path)
    assert again.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert again.execute("select sum(x) from t").fetchone() == (190,)
    again.close()
