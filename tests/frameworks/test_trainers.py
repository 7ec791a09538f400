"""Training frameworks that manage checkpoints themselves: they save, delete old ones, and resume exactly.

"Exactly": a run that was cut in two ends with the same weights, bit for bit, as one that was not and that never touched
the mount.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import lib

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.parametrize("lane", ["passthrough"], indirect=True),
]


def test_transformers_trainer(torch: Any, ckpt: Path, tmpfs_dir: Path) -> None:
    lib.need("transformers")
    uninterrupted, first = lib.jobs("trainer", [tmpfs_dir / "run", "10"], [ckpt / "run", "6"])
    assert sorted(path.name for path in (ckpt / "run").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    (resumed,) = lib.jobs("trainer", [ckpt / "run", "10", "resume"])
    assert (first["started_at"], first["ended_at"]) == (0, 6)
    assert (resumed["started_at"], resumed["ended_at"]) == (6, 10)
    assert resumed["weights"] == uninterrupted["weights"] != first["weights"]

    names = sorted(path.name for path in (ckpt / "run").iterdir())
    assert names == ["checkpoint-10", "checkpoint-8"]
    state = json.loads((ckpt / "run" / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["global_step"] == 10
    # What was saved is what the run ended with.
    load_file = lib.need("safetensors.torch").load_file
    here = load_file(ckpt / "run" / "checkpoint-10" / "model.safetensors")
    there = load_file(tmpfs_dir / "run" / "checkpoint-10" / "model.safetensors")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) for key in here)


def test_lightning_model_checkpoint(torch: Any, ckpt: Path, tmpfs_dir: Path) -> None:
    lib.need("lightning")
    uninterrupted, first = lib.jobs("lightning_fit", [tmpfs_dir, "30"], [ckpt, "15"])
    saved = ckpt / "checkpoints"
    assert len(list(saved.glob("step=*.ckpt"))) == 2
    assert torch.load(saved / "last.ckpt", weights_only=False)["global_step"] == 15
    (resumed,) = lib.jobs("lightning_fit", [ckpt, "30", "resume"])
    assert (first["started_at"], resumed["started_at"]) == (0, 15)
    assert resumed["weights"] == uninterrupted["weights"] != first["weights"]

    assert len(list(saved.glob("step=*.ckpt"))) == 2
    for kind in ("best", "last"):
        here = torch.load(resumed[kind], weights_only=False)
        there = torch.load(uninterrupted[kind], weights_only=False)
        assert here["global_step"] == there["global_step"]
        for name, value in there["state_dict"].items():
            assert torch.equal(here["state_dict"][name], value), (kind, name)


def test_accelerate_state(torch: Any, ckpt: Path, tmpfs_dir: Path) -> None:
    lib.need("accelerate")
    uninterrupted, first = lib.jobs("accelerate_state", [tmpfs_dir, "7"], [ckpt, "4"])
    assert first["checkpoints"] == ["checkpoint_2", "checkpoint_3"]
    (resumed,) = lib.jobs("accelerate_state", [ckpt, "7", "resume"])
    assert resumed["weights"] == uninterrupted["weights"] != first["weights"]
    assert (
        resumed["checkpoints"] == uninterrupted["checkpoints"] == ["checkpoint_5", "checkpoint_6"]
    )
