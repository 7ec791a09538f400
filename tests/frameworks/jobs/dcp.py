"""One rank of a job that saves, or loads, with torch.distributed.checkpoint.

    dcp.py save ROOT     every way of saving, each into a directory of its own, then loaded by the same ranks
    dcp.py load ROOT     what other ranks, of another number, have saved

Values follow from names and places alone, so that any rank of any world can say what is right.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROWS, COLUMNS = 1003, 96  # rows that no world size divides


def sharded(mesh: Any, factor: float) -> dict[str, Any]:
    full = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * factor
    return {
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full.to(torch.bfloat16), mesh, [Shard(1)]),
        "replicated": distribute_tensor(full[:7].clone(), mesh, [Replicate()]),
        "step": int(factor * 1000),
    }


def assert_sharded(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["step"] == want["step"]
    for name in ("rows", "columns", "replicated"):
        assert torch.equal(got[name].to_local(), want[name].to_local()), name
        assert torch.equal(got[name].full_tensor(), want[name].full_tensor()), name


def own(rank: int, factor: float) -> dict[str, Any]:
    """What only this rank has: every rank's loader state, say."""
    return {
        f"own-{rank}": torch.full((50 + rank, 33), factor + rank),
        f"note-{rank}": f"from {rank}",
    }


def model_and_optimizer(mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """FSDP2 with one step taken, so that the optimizer has a state of shards too."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(37, 65), torch.nn.ReLU(), torch.nn.Linear(65, 11))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        # Not from a loss: the mean over ranks would differ in its last bits with their number.
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def full_values(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    parts = dict(model.named_parameters())
    parts |= {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {
        name: (part.full_tensor() if isinstance(part, DTensor) else part).detach().clone()
        for name, part in parts.items()
    }


def ways() -> list[tuple[str, float, dict[str, bool], bool]]:
    """(directory, factor, options of the writer, async?)"""
    found = []
    flags = itertools.product((True, False), repeat=3)
    for number, (single_file_per_rank, sync_files, in_background) in enumerate(flags):
        options = {"single_file_per_rank": single_file_per_rank, "sync_files": sync_files}
        name = f"single{single_file_per_rank:d}-sync{sync_files:d}-async{in_background:d}"
        found.append((name, 0.25 * (number + 1), options, in_background))
    return found


def save(root: Path, mesh: Any) -> None:
    rank = dist.get_rank()
    for name, factor, options, in_background in ways():
        state = sharded(mesh, factor) | own(rank, factor)
        writer = FileSystemWriter(
            root / name, thread_count=1 if options["single_file_per_rank"] else 2, **options
        )
        if in_background:
            done = dcp.async_save(state, storage_writer=writer)
            # Training goes on meanwhile, and must not change what is being saved.
            state["rows"].to_local().zero_()
            state[f"own-{rank}"].zero_()
            done.result(timeout=60)
        else:
            dcp.save(state, storage_writer=writer)
    model, optimizer = model_and_optimizer(mesh)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=root / "fsdp")
    dist.barrier()
    files = {path.name for path in (root / "fsdp").iterdir()}
    assert ".metadata" in files, files
    assert not any(name.endswith(".tmp") for name in files), files


def load(root: Path, mesh: Any, saved_by: int) -> None:
    rank = dist.get_rank()
    for name, factor, _, _ in ways():
        state = sharded(mesh, 0.0)
        # Each rank takes over the state of some rank of the world that saved.
        heir_of = rank % saved_by
        state |= own(heir_of, -1.0) | {f"note-{heir_of}": ""}
        dcp.load(state, storage_reader=FileSystemReader(root / name))
        assert_sharded(state, sharded(mesh, factor))
        for key, want in own(heir_of, factor).items():
            same = (
                torch.equal(state[key], want)
                if isinstance(want, torch.Tensor)
                else state[key] == want
            )
            assert same, f"{name}: {key}"

    model, optimizer = model_and_optimizer(mesh)
    want = full_values(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
            for part in optimizer.state[parameter].values():
                part.mul_(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=root / "fsdp")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    got = full_values(model, optimizer)
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def main() -> None:
    action, root = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING_FILE']}", rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))
    saved_by = int(root.name.removeprefix("world-"))
    if action == "save":
        save(root, mesh)
    load(root, mesh, saved_by)
    dist.barrier()
    print(f"rank {rank}: every value checked", flush=True)
    dist.destroy_process_group()
    # torch's background threads can abort a process that ends in the usual way ("terminate called without an active
    # exception"). All is checked and closed by now.
    os._exit(0)


main()
