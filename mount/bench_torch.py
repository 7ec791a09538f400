"""torch.save and torch.load by target, alternating; run as a script by whichever Python has torch.

What it keeps true: no other file of this package is needed, and the last line of its output is
the result, seconds by target, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


def state_of(size_bytes: int) -> dict[str, Any]:
    """A state dict of about that size: matrices and biases, as a model's layers have them."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    layer_bytes = 4 * (1024 * 4096 + 4096)
    layers = max(1, size_bytes // layer_bytes)
    width = max(1, size_bytes // layers // 4 // 1025)
    state = {}
    for number in range(layers):
        state[f"layers.{number}.weight"] = torch.randn(1024, width)
        state[f"layers.{number}.bias"] = torch.randn(width)
    return state


def main() -> None:
    """The order arrives as one JSON argument."""
    import torch

    order = json.loads(sys.argv[1])
    chance = random.Random(order["seed"])
    state = state_of(order["size_bytes"])
    labels = list(order["directories"])
    seconds: dict[str, dict[str, list[float]]] = {
        "save": {label: [] for label in labels},
        "load": {label: [] for label in labels},
    }
    for number in range(order["rounds"] + 1):
        for label in chance.sample(labels, len(labels)):
            path = os.path.join(order["directories"][label], "model.pt")
            start_s = time.perf_counter()
            torch.save(state, path)
            saved_s = time.perf_counter()
            loaded = torch.load(path)
            loaded_s = time.perf_counter()
            if len(loaded) != len(state):
                sys.exit(f"{path}: loaded {len(loaded)} of {len(state)} tensors")
            del loaded
            os.unlink(path)
            if number:  # the first round warms up
                seconds["save"][label].append(saved_s - start_s)
                seconds["load"][label].append(loaded_s - saved_s)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
