"""VGG without batch norm, and TFCNN, as FedPHP's code has them.

A plan lists the widths of 3x3 convolutions, with M where max-pooling follows. Without hidden layers the head is one
linear layer without bias (FedPHP's label scenes); with some it is what the code's Dirichlet script trains, where the
method's features are what leaves the convolutions: `model.head = "[!c]*"`.
"""

from __future__ import annotations

from torch import nn

from personafl.models.cnn import CNN

VGG8 = "64 M 128 M 256 M 512 M 512 M"
VGG11 = "64 M 128 M 256 256 M 512 512 M 512 512 M"
TFCNN = "32 M 64 M 64 M"


def planned(
    image: tuple[int, int, int],
    plan: str,
    classes: int,
    hidden: tuple[int, ...] = (),
    dropout: tuple[float, ...] = (),
) -> CNN:
    """The network of a plan, with FedPHP's initialisation."""
    words = plan.split()
    widths = [(int(w), after == "M") for w, after in zip(words, [*words[1:], ""], strict=True) if w != "M"]
    channels, pooled = zip(*widths, strict=True)
    net = CNN(image, channels, hidden, classes, 3, 1, pooled=pooled, dropout=dropout, head_bias=bool(hidden))
    for m in net.modules():
        if isinstance(m, nn.Conv2d):  # PyTorch's own would let the signal fade over eight layers without norms
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(m, nn.Linear) and m.bias is not None:  # the head without bias keeps PyTorch's
            nn.init.normal_(m.weight, 0.0, 0.01)
        if isinstance(m, nn.Conv2d | nn.Linear) and m.bias is not None:
            nn.init.zeros_(m.bias)
    return net
