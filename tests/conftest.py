"""One thread per test process: small tensors gain nothing from more, and processes run side by side."""

import os

import torch

torch.set_num_threads(1)
os.environ["PERSONAFL_OFFLINE"] = "1"
