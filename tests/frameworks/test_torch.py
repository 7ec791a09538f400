"""torch.save and torch.load, every way of calling them."""

from __future__ import annotations

import collections
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Mount


def state(torch: Any, seed: int = 0, rows: int = 3000) -> dict[str, Any]:
    """A state dict with all that real ones have: dtypes, views of shared storage, scalars, empty tensors."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 257, generator=generator)
    return {
        "weight": weight,
        "tied": weight,  # shares storage; must still do so after loading
        "transposed": weight.t(),
        "half": weight[:100].to(torch.bfloat16),
        "float16": weight[:100].half(),
        "float8": weight[:64].to(torch.float8_e4m3fn),
        "bits": torch.randint(0, 255, (12345,), dtype=torch.uint8, generator=generator),
        "long": torch.arange(seed, seed + 1000),
        "complex": torch.complex(weight[:10], weight[10:20]),
        "bool": weight[:10] > 0,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(seed + 0.5),
        "step": seed,
        "name": "näme",
    }


def assert_same(torch: Any, got: Any, want: Any, where: str = "state") -> None:
    """Equal in structure, dtype, shape and every bit."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), where
        assert (got.dtype, got.shape) == (want.dtype, want.shape), where
        raw_got = got.contiguous().view(-1).view(torch.uint8) if got.numel() else got
        raw_want = want.contiguous().view(-1).view(torch.uint8) if want.numel() else want
        assert torch.equal(raw_got, raw_want), where
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        for key, value in want.items():
            assert_same(torch, got[key], value, f"{where}[{key!r}]")
    else:
        assert got == want, where


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "pickle"])
def test_save_then_load(torch: Any, ckpt: Path, mmap: bool, weights_only: bool) -> None:
    path = ckpt / "model.pt"
    want = state(torch)
    torch.save(want, path)
    got = torch.load(path, mmap=mmap, weights_only=weights_only)
    assert_same(torch, got, want)
    assert got["weight"].untyped_storage().data_ptr() == got["tied"].untyped_storage().data_ptr()


def test_arbitrary_objects_need_weights_only_off(torch: Any, ckpt: Path) -> None:
    path = ckpt / "objects.pt"
    want = {"history": collections.deque([1, 2.5, "x"], maxlen=3), "path": Path("a/b")}
    torch.save(want, path)
    assert torch.load(path, weights_only=False) == want
    with pytest.raises(Exception, match="weights_only"):
        torch.load(path, weights_only=True)


def test_the_bytes_are_those_saved_elsewhere(torch: Any, ckpt: Path, tmpfs_dir: Path) -> None:
    """Seen as bytes, the file is the one that tmpfs would have."""
    for directory in (ckpt, tmpfs_dir):
        torch.save(state(torch), directory / "model.pt")
    same = (ckpt / "model.pt").read_bytes() == (tmpfs_dir / "model.pt").read_bytes()
    assert same, "not the bytes that tmpfs has"


def test_overwriting_in_place_leaves_nothing_of_the_old(torch: Any, ckpt: Path) -> None:
    path = ckpt / "last.pt"
    sizes = []
    for seed, rows in enumerate((3000, 50, 6000, 3000)):
        want = state(torch, seed, max(rows, 100))
        torch.save(want, path)
        assert_same(torch, torch.load(path, weights_only=True), want)
        assert_same(torch, torch.load(path, mmap=True, weights_only=True), want)
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0] == sizes[3] < sizes[2]


def test_replacing_by_rename_keeps_what_is_mapped(torch: Any, ckpt: Path) -> None:
    """The usual way to be safe: whoever has the old checkpoint mapped goes on seeing it."""
    path = ckpt / "last.pt"
    old, new = state(torch, 1), state(torch, 2)
    torch.save(old, path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    with open(ckpt / "last.pt.tmp", "wb") as file:
        torch.save(new, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(ckpt / "last.pt.tmp", path)
    assert_same(torch, torch.load(path, weights_only=True), new)
    assert_same(torch, mapped, old)
    assert os.listdir(ckpt) == ["last.pt"]


def test_a_mapped_load_is_private(torch: Any, ckpt: Path) -> None:
    path = ckpt / "model.pt"
    want = state(torch)
    torch.save(want, path)
    before = path.read_bytes()
    mapped = torch.load(path, mmap=True, weights_only=True)
    mapped["weight"].zero_()
    assert mapped["weight"].count_nonzero() == 0
    same = path.read_bytes() == before
    assert same, "the mapping wrote through to the file"
    assert_same(torch, torch.load(path, weights_only=True), want)


def test_a_shared_mapping_writes_the_file(torch: Any, ckpt: Path) -> None:
    path = ckpt / "shared.bin"
    count = 1_000_003
    mapped = torch.from_file(str(path), shared=True, size=count, dtype=torch.int32)
    mapped.copy_(torch.arange(count, dtype=torch.int32))
    again = torch.from_file(str(path), shared=True, size=count, dtype=torch.int32)
    assert torch.equal(again, torch.arange(count, dtype=torch.int32))
    del mapped, again
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32)
    assert torch.equal(data, torch.arange(count, dtype=torch.int32))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_file_objects_and_the_old_format(torch: Any, ckpt: Path, zipped: bool) -> None:
    path = ckpt / "model.pt"
    want = state(torch)
    if not zipped:
        del want["float8"]  # torch itself cannot load it from the old format with weights_only
    with open(path, "wb") as file:
        torch.save(want, file, _use_new_zipfile_serialization=zipped)
    with open(path, "rb") as file:
        assert_same(torch, torch.load(file, weights_only=True), want)
    memory = io.BytesIO(path.read_bytes())
    assert_same(torch, torch.load(memory, weights_only=True), want)


def test_training_goes_on_exactly_after_loading(torch: Any, ckpt: Path) -> None:
    """Model, optimizer and generator state: two further steps give the same weights, bit for bit."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any) -> None:
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        },
        ckpt / "train.pt",
    )
    for _ in range(2):
        step(model, optimizer)

    resumed, resumed_optimizer = make()
    saved = torch.load(ckpt / "train.pt", weights_only=True, mmap=True)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    for _ in range(2):
        step(resumed, resumed_optimizer)
    assert_same(torch, dict(resumed.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_more_than_4_gib(torch: Any, lane: str, make_mount: Callable[..., Mount]) -> None:
    """Offsets beyond 32 bits, both for a record's length and for where the next record begins."""
    gib = 1 << 30
    size = 4 * gib + 300 * (1 << 20)
    # Untouched zeros take no memory; only the marks do.
    big = torch.zeros(size, dtype=torch.uint8)
    places = [0, 1, 2 * gib - 1, 2 * gib, 4 * gib - 4096, 4 * gib - 1, 4 * gib, size - 1]
    for mark, place in enumerate(places, start=1):
        big[place] = mark
    after = torch.arange(100_000)

    path = make_mount(size="6GiB", lane=lane).path / "big.pt"
    torch.save({"big": big, "after": after}, path)
    assert path.stat().st_size > size

    for options in ({"mmap": True}, {}):
        got = torch.load(path, weights_only=True, **options)
        assert torch.equal(got["after"], after)
        assert got["big"].shape == big.shape
        assert [int(got["big"][place]) for place in places] == list(range(1, len(places) + 1))
        assert sum(int(part.count_nonzero()) for part in got["big"].split(gib)) == len(places)
        del got
