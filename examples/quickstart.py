"""The smallest full run: your arrays, your module, three methods, a table, a report, a model for every client.

python examples/quickstart.py
"""

import tempfile

import numpy as np
import torch
from torch import Tensor, nn

import personafl


class Net(nn.Module):
    """A residual network with BatchNorm over twelve sensors' traces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, 16, 3, padding=1), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        out: Tensor = self.head((x + self.block(x)).amax(-1))
        return out


# Three kinds of bumps; every second sensor has other names for them, so no single model fits all.
rng = np.random.default_rng(0)
sensor = np.repeat(np.arange(12), 80)
kind = rng.integers(0, 3, len(sensor))
shapes = np.stack([np.sin(np.linspace(0, (k + 1) * np.pi, 16)) for k in range(3)])
x = (shapes[kind] + 0.5 * rng.normal(size=(len(kind), 16))).astype(np.float32)[:, None]
y = (kind + sensor % 2) % 3

result = personafl.run(
    data=(x, y, sensor),
    model=Net,
    algorithms=["fedavg", personafl.Ditto(proximal_weight=0.1), personafl.FedRep()],
    training={"num_rounds": 10, "lr": 0.1},
)
print(result.table())
folder = tempfile.mkdtemp(prefix="sensors-")
result.save(folder)  # report.html, table.md, and all that Result.load reads
module = result["fedrep"].client(3).module
print("client 3:", module(torch.from_numpy(x[sensor == 3][:4])).argmax(1).tolist(), "is", y[sensor == 3][:4].tolist())
print("written to", folder)
