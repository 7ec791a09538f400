"""Accelerate's save_state and load_state: accelerate_state.py PROJECT_DIR STEPS [resume].

Takes a step, saves, takes the next; prints a digest of the final weights and the list of checkpoints as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Counter:
    """An object of the user's, saved with the rest."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    root, steps, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["resume"]
    torch.set_num_threads(1)
    torch.manual_seed(2)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(root), automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if resume:
        newest = max(
            (root / "checkpoints").iterdir(), key=lambda path: int(path.name.split("_")[1])
        )
        accelerator.load_state(str(newest))
        accelerator.project_configuration.iteration = counter.steps
    while counter.steps < steps:
        # Both the data and the dropout come from the generator, whose state is part of the checkpoint.
        loss = model(torch.randn(16, 32)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.steps += 1
        accelerator.save_state()
    digest = hashlib.sha256()
    for name, value in sorted(accelerator.unwrap_model(model).state_dict().items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    names = sorted(path.name for path in (root / "checkpoints").iterdir())
    print(json.dumps({"weights": digest.hexdigest(), "checkpoints": names}))


main()
