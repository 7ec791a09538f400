"""A small transformers Trainer run: trainer.py OUTPUT_DIR MAX_STEPS [resume].

Prints, as JSON, a digest of the final weights and the step it started from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset):
    """64 sequences that follow from their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


class FirstStep(TrainerCallback):
    """Remembers where training began."""

    step = -1

    def on_train_begin(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
        self.step = state.global_step


def main() -> None:
    output, max_steps, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["resume"]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_positions=32, n_embd=48, n_layer=2, n_head=2)
    )
    first_step = FirstStep()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=max_steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            # Not the default schedule: it depends on max_steps, and a shorter run is to be a prefix of a longer.
            lr_scheduler_type="constant",
            save_steps=2,
            save_total_limit=2,
            logging_steps=1,
            report_to=[],
            seed=5,
            use_cpu=True,
            disable_tqdm=True,
            dataloader_num_workers=0,
        ),
        train_dataset=Tokens(),
        callbacks=[first_step],
    )
    last = get_last_checkpoint(str(output)) if resume else None
    if resume and last is None:
        raise SystemExit(f"{output} has no checkpoint to resume from")
    trainer.train(resume_from_checkpoint=last)

    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    print(
        json.dumps(
            {
                "weights": digest.hexdigest(),
                "started_at": first_step.step,
                "ended_at": trainer.state.global_step,
            }
        )
    )


main()
