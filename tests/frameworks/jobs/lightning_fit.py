"""A small Lightning run: lightning_fit.py DIRECTORY MAX_STEPS [resume].

Prints, as JSON, a digest of the final weights, the step it started from, and what ModelCheckpoint thinks best and last.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class FirstStep(Callback):
    step = -1

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.step = trainer.global_step


def main() -> None:
    root, max_steps, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["resume"]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    lightning.seed_everything(11)
    inputs = torch.randn(160, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    saver = ModelCheckpoint(
        dirpath=root / "checkpoints",
        filename="{step}",
        monitor="loss",
        mode="min",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=5,
    )
    first_step = FirstStep()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        default_root_dir=root,
        callbacks=[saver, first_step],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(
        module,
        # Five batches an epoch, as many as between checkpoints, and in one order: Lightning keeps no place in an epoch.
        torch.utils.data.DataLoader(data, batch_size=32),
        ckpt_path=str(root / "checkpoints" / "last.ckpt") if resume else None,
    )
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    report = {
        "weights": digest.hexdigest(),
        "started_at": first_step.step,
        "best": saver.best_model_path,
        "last": saver.last_model_path,
    }
    print(json.dumps(report))


main()
