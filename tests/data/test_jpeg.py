"""JPEG coding, by its numbers and beside Pillow's."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from personafl.data import jpeg
from personafl.data.corruptions import PARAMETERS, SEVERITIES, corrupt
from tests.data.small_images import constant, keys, ramp


def test_jpeg_keeps_whole_steps_of_the_first_coefficient():
    # Quality 50: the tables as they are. A constant block has 8 * (byte - 128), in steps of 16: 2 bytes; ties go away.
    for byte, expected in ((128, 128), (130, 130), (131, 132), (125, 124), (100, 100)):
        assert corrupt(constant(byte, 1, channels=1), "jpeg_compression", 4, keys(1)).unique().tolist() == [expected]


def test_jpeg_steps_follow_quality():
    first = [jpeg._quantisation(jpeg._LUMINANCE, q)[0, 0] for (q,) in PARAMETERS["jpeg_compression"]]
    # 16 in percent: 200 - 2 q at 80, 65, 58, 50; 5000 / 40 = 125; halves go up
    assert first == [6, 11, 13, 16, 20]


def test_jpeg_drops_what_is_below_half_a_step():
    # The ramp's slope is a coefficient of 18.2 = 1.66 steps of 11; all others of its row are below 2, and vanish.
    x = ramp(8)[:, :1] + 124
    k = math.pi / 16 * (2 * torch.arange(8.0) + 1)
    first = (x[0, 0, 0].float() - 128) @ k.cos() / 2 * math.sqrt(8)
    dc = (x[0, 0].float() - 128).mean() * 8
    assert (dc, round(float(first), 1)) == (-4, -18.2)
    wave = 128 - 2 * 11 * k.cos() / 2 / math.sqrt(8)  # 4 / 16 of a step is none of the constant
    out = corrupt(x, "jpeg_compression", 4, keys(1))
    torch.testing.assert_close(out.float()[0, 0, 0], (wave + 0.5).floor())


@pytest.mark.parametrize("size", [(32, 32), (28, 28), (19, 30)])
def test_jpeg_is_pillows_but_for_rounding(photos, size):
    clean = photos[..., : size[0], : size[1]].contiguous()
    for severity, quality in zip(SEVERITIES, (80, 65, 58, 50, 40), strict=True):
        for images in (clean, clean[:, 1:2].contiguous()):
            off = []
            out = corrupt(images, "jpeg_compression", severity, keys(30)).permute(0, 2, 3, 1).squeeze(-1).numpy()
            for mine, raw in zip(out, images.permute(0, 2, 3, 1).squeeze(-1).numpy(), strict=True):
                file = io.BytesIO()
                Image.fromarray(raw).save(file, "JPEG", quality=quality)
                off.append(np.abs(np.asarray(Image.open(file)).astype(int) - mine))
            assert np.mean(off) < 0.3
            assert (np.array(off) <= 1).mean() > 0.93
