"""The smallest full run: your arrays, your module, a personalised model for every client.

python examples/quickstart.py
"""

import numpy as np
import torch
from torch import nn

import personafl

# Twelve sensors with three classes; every second sensor counts them differently, so no single model fits all.
rng = np.random.default_rng(0)
sensor = np.repeat(np.arange(12), 120)
y = rng.integers(0, 3, len(sensor))
x = rng.normal(size=(len(sensor), 8)) + 3 * np.eye(3, 8)[(y + sensor % 2) % 3]

source = personafl.arrays(x.astype(np.float32), y, clients=sensor)
federation = personafl.Federation.build(source, [np.flatnonzero(sensor == c) for c in range(12)], seed=0)
torch.manual_seed(0)
model = personafl.StackedModel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), source.x[:2])
training = personafl.Training(num_rounds=40, join_ratio=0.5, local_epochs=2, batch_size=20, lr=0.1)

for algorithm in (personafl.FedAvg(), personafl.Ditto(proximal_weight=0.1), personafl.DMPFL(allocation="erk")):
    simulation = personafl.Simulation(federation, model, algorithm, training)
    simulation.run()
    _, shift = simulation.clients_table()
    assert shift is not None  # there is none with Evaluation(shift="none")
    own, full = (100 * shift["degrees"][d]["mean"] for d in ("0.0", "1.0"))
    mib = (simulation.totals.up_bytes + simulation.totals.down_bytes) / 12 / 2**20
    print(
        f"{type(algorithm).__name__:8} own data {own:5.1f} %, another sensor's {full:5.1f} %, {mib:.3f} MiB per client"
    )
