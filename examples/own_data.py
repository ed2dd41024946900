"""Your own data: a PyTorch data set per client, a folder with a file per client, and a partition to hand on.

python examples/own_data.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

import personafl
from personafl.data import custom, partition_file


class Watch(Dataset[tuple[np.ndarray, int]]):
    """Ninety windows of one wearer: three activities, felt differently by each."""

    def __init__(self, wearer: int) -> None:
        rng = np.random.default_rng(wearer)
        self.y = np.arange(90) % 3
        centres = np.eye(3, 6) + rng.normal(0, 0.8, (3, 6))
        self.x = (centres[self.y] + rng.normal(0, 0.4, (90, 6))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.x[i], int(self.y[i])


wearers = ["anna", "ben", "cleo", "dov", "eva", "finn"]
watches = [Watch(i) for i in range(len(wearers))]

# 1. Data sets in memory: one client each.
source = custom.datasets(watches, wearers)
federation = personafl.Federation.build(source, [np.flatnonzero(source.clients == c) for c in range(6)], seed=0)
print(f"{federation.num_clients} clients, {len(source.y)} samples, hash {federation.digest()}")

with tempfile.TemporaryDirectory() as home:
    # 2. The same as files, named in a recipe.
    for name, watch in zip(wearers, watches, strict=True):
        torch.save({"x": torch.from_numpy(watch.x), "y": torch.from_numpy(watch.y)}, Path(home) / f"{name}.pt")
    data = {"dataset": home, "partition": "natural"}
    recipe = {
        "data": data,
        "training": {"num_rounds": 20, "lr": 0.1},
        "algorithms": [{"name": "local"}, {"name": "fedavg"}, {"name": "ditto"}],
    }
    print(personafl.run(recipe).table())

    # 3. Who holds what as a file: the same split for every seed, here and elsewhere.
    partition_file.save(federation, Path(home) / "split.json")
    data["partition"] = str(Path(home) / "split.json")
    result = personafl.run(recipe, seeds=[1, 2])
    print("used again:", {m.summary["hashes"]["split"] for m in result.methods.values()})
