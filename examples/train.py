#!/usr/bin/env python3
"""A tiny training loop that may be killed at any moment, and goes on where it was.

    python examples/train.py /ckpt/run --steps 200 --every 10

Every few steps it writes a checkpoint to a temporary file, syncs it and renames it into place, so that a file named
step-*.pt is always whole; it then removes all but the newest few. Started again, it loads the newest and continues with
the same data, dropout and optimizer state: the loss at the end is the one of a run that was never interrupted.

Nothing here knows what filesystem it writes to.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

BATCH_SIZE = 64
FEATURES = 32


def make_model(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, 1),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Made-up data; drawn from the global generator, whose state is part of each checkpoint."""
    inputs = torch.randn(BATCH_SIZE, FEATURES)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def save(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint that is there either whole or not at all."""
    path = directory / f"step-{step:06d}.pt"
    temporary = path.with_suffix(".pt.tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the new name, too
    finally:
        os.close(descriptor)
    return path


def checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(directory.glob("step-*.pt"))


def remove_old(directory: Path, keep: int) -> None:
    """Only after the newest is in place; and what a killed run had not finished writing."""
    for path in [*checkpoints(directory)[:-keep], *directory.glob("step-*.pt.tmp")]:
        path.unlink()


def train(directory: Path, steps: int, every: int, keep: int, width: int, pause_s: float) -> float:
    """Train up to `steps`, resuming if there is something to resume from; the last loss."""
    directory.mkdir(parents=True, exist_ok=True)
    model, optimizer = make_model(width)
    step, loss_value = 0, float("nan")
    if found := checkpoints(directory):
        saved = torch.load(found[-1], weights_only=True, mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"].clone())
        step, loss_value = saved["step"], saved["loss"]
        print(f"resumed from {found[-1].name}: step {step}, loss {loss_value:.6f}", flush=True)
    else:
        print(f"starting anew in {directory}", flush=True)

    while step < steps:
        inputs, wanted = batch()
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, loss_value = step + 1, loss.item()
        if step % every == 0 or step == steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
                "loss": loss_value,
            }
            begin = time.perf_counter()
            path = save(directory, step, state)
            took_s = time.perf_counter() - begin
            size_mb = path.stat().st_size / 1e6
            print(
                f"step {step}: loss {loss_value:.6f}, "
                f"saved {path.name} ({size_mb:.1f} MB in {took_s * 1000:.0f} ms)",
                flush=True,
            )
            remove_old(directory, keep)
        if pause_s:
            time.sleep(pause_s)
    return loss_value


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A tiny training loop that can be killed at any time."
    )
    parser.add_argument("directory", type=Path, help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints stay")
    parser.add_argument("--width", type=int, default=1024, help="size of the model")
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="seconds to sleep after each step"
    )
    options = parser.parse_args()
    if options.every < 1 or options.keep < 1:
        parser.error("--every and --keep must be at least 1")
    loss = train(
        options.directory,
        options.steps,
        options.every,
        options.keep,
        options.width,
        options.pause_s,
    )
    print(f"done: step {options.steps}, loss {loss!r}")


if __name__ == "__main__":
    main()
