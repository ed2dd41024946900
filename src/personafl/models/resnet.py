"""Residual networks with batch norm, named as torchvision's."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + short).relu()


class ResNet18(nn.Module):
    """Four stages of two blocks; He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.

    The `imagenet` stem (7x7 of stride 2, max-pooling) is the one FedSelect and CO-PFL put on 32x32 images; `cifar` is
    a 3x3 convolution without pooling.
    """

    def __init__(
        self, channels: int, classes: int, stem: Literal["imagenet", "cifar"] = "imagenet", width: int = 64
    ) -> None:
        super().__init__()
        self.stem = stem
        kernel, stride, padding = (7, 2, 3) if stem == "imagenet" else (3, 1, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        for i in range(1, 5):
            first = Block(sizes[i - 1], sizes[i], 1 if i == 1 else 2)
            setattr(self, f"layer{i}", nn.Sequential(first, Block(sizes[i], sizes[i], 1)))
        self.fc = nn.Linear(sizes[-1], classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        if self.stem == "imagenet":
            x = F.max_pool2d(x, 3, 2, 1)
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
        out: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out
