import math

import numpy as np
import pytest
import torch
from PIL import Image

from personafl.core import rng
from personafl.data import corruptions, filters
from personafl.data.corruptions import CORRUPTIONS, PARAMETERS, SEVERITIES, STANDARD, corrupt, rotate
from tests.data.small_images import constant, impulse, keys, ramp

EVERY = [(kind, severity) for kind in CORRUPTIONS for severity in SEVERITIES]


# All of them


def test_there_are_the_fifteen_and_two_more_with_five_severities_each():
    assert list(CORRUPTIONS) == list(PARAMETERS)
    assert set(CORRUPTIONS) - set(STANDARD) == {"gaussian_blur", "speckle_noise"}
    assert len(STANDARD) == 15 and "all" not in CORRUPTIONS
    assert {len(p) for p in PARAMETERS.values()} == {5}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_the_same_in_every_batch(photos, kind):
    some, k = [3, 17, 29], keys(30)
    for images in (photos, photos.float() / 255):
        for severity in (1, 3, 5):
            together = corrupt(images, kind, severity, k)
            assert together.shape == images.shape and together.dtype == images.dtype
            assert torch.equal(together[some], corrupt(images[some], kind, severity, k[some]))
            assert torch.equal(together[7:8], corrupt(images[7:8], kind, severity, k[7:8]))


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_bytes_are_the_floats_cut_off(photos, kind):
    k = keys(30)
    floats = corrupt(photos.float() / 255, kind, 3, k)
    assert floats.min() >= 0 and floats.max() <= 1
    cut = (floats * 255 + 2**-12).floor().to(torch.uint8)
    assert torch.equal(corrupt(photos, kind, 3, k), cut)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_the_key_decides_what_is_drawn(photos, kind):
    a, b = (corrupt(photos, kind, 3, keys(30, seed)) for seed in (0, 1))
    fixed = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
    assert torch.equal(a, b) == (kind in fixed)


# Change falls from one severity to the next in three published lists alone. The elastic transform skews less and less
# while it stretches more; glass blur smooths away what it has shuffled, and its deviations go up, down and up; frost
# darkens the image by as much as the ice brightens it, from the third severity on.
UNORDERED = {"elastic_transform": (1, 2, 3, 4), "glass_blur": (2, 4), "frost": (3, 4)}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_change_grows_with_severity(photos, kind):
    change = [(corrupt(photos, kind, s, keys(30)).float() - photos.float()).abs().mean() for s in SEVERITIES]
    for severity in SEVERITIES[:-1]:
        if severity not in UNORDERED.get(kind, ()):
            assert change[severity] >= change[severity - 1], severity
    assert change[0] > 0


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (2, 3, 2, 3), (1, 1, 5, 9), (1, 3, 48, 30)])
def test_any_size_will_do(shape):
    images = rng.uniform(keys(1), math.prod(shape)).view(shape)
    for kind, severity in EVERY:
        out = corrupt(images, kind, severity, keys(len(images)))
        assert out.shape == images.shape
        assert torch.isfinite(out).all(), (kind, severity)


BLURS = (
    "gaussian_blur",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "elastic_transform",
    "pixelate",
    "contrast",
)


@pytest.mark.parametrize("kind", [*BLURS, "jpeg_compression"])
def test_what_only_moves_light_leaves_a_constant_image_alone(kind):
    for severity in SEVERITIES:
        for byte in (0, 128, 255):  # for JPEG: 8 * (byte - 128) is a multiple of the first step, or clamped to one
            out = corrupt(constant(byte), kind, severity, keys(2))
            assert (out.int() - byte).abs().max() <= (3 if kind == "jpeg_compression" else 0), (severity, byte)


# Noise


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_has_the_published_deviation(severity):
    c = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    noise = corrupt(torch.full((20, 3, 32, 32), 0.5), "gaussian_noise", severity, keys(20)) - 0.5
    # 61,440 values: the mean's deviation is c / 248, the deviation's c / 351
    assert abs(noise.mean()) < 5 * c / 248
    assert abs(noise.std() - c) < 5 * c / 351


@pytest.mark.parametrize("severity", SEVERITIES)
def test_speckle_noise_deviates_in_proportion_to_the_value(severity):
    c = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    for value in (0.0, 0.25, 0.5):  # five deviations of 0.2 leave [0, 1] alone
        x = torch.full((20, 3, 32, 32), value)
        noise = corrupt(x, "speckle_noise", severity, keys(20)).double() - value
        # 61,440 values: the mean's deviation is c / 248, the deviation's c / 351, of the value
        assert abs(noise.mean()) <= 5 * c * value / 248
        assert abs(noise.std() - c * value) <= 5 * c * value / 351


@pytest.mark.parametrize("byte", [1, 50, 128])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_shot_noise_counts_events_whose_variance_is_their_mean(severity, byte):
    c = (500, 250, 100, 75, 50)[severity - 1]
    counts = corrupt(torch.full((20, 3, 32, 32), byte / 255), "shot_noise", severity, keys(20)).double() * c
    rate = byte / 255 * c
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    assert abs(counts.mean() - rate) < 5 * math.sqrt(rate / 61440)
    assert abs(counts.var() - rate) < 5 * math.sqrt((2 * rate**2 + rate) / 61440)


def test_shot_noise_of_floats_between_bytes_has_their_rate():
    counts = corrupt(torch.full((20, 3, 32, 32), 50.6 / 255), "shot_noise", 1, keys(20)).double() * 500
    rate = 50.6 / 255 * 500
    assert abs(counts.mean() - rate) < 5 * math.sqrt(rate / 61440)  # half a byte would be 14 deviations more
    assert abs(counts.var() - rate) < 5 * math.sqrt((2 * rate**2 + rate) / 61440)


def test_shot_noise_leaves_black_black():
    assert not corrupt(constant(0), "shot_noise", 5, keys(2)).any()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_blackens_and_whitens_a_share_of_the_values(severity):
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    out = corrupt(constant(100, count=20), "impulse_noise", severity, keys(20))
    assert set(out.unique().tolist()) == {0, 100, 255}
    for byte in (0, 255):
        assert abs((out == byte).double().mean() - share / 2) < 5 * math.sqrt(share / 2 / 61440)


# Blur


def test_defocus_of_an_impulse_is_the_disc():
    # Severity 5: radius 1.5 is nine pixels, smoothed by nothing, exp(-1 / (2 * 0.1^2)) = e^-50.
    out = corrupt(impulse(), "defocus_blur", 5, keys(1))[0, 0]
    torch.testing.assert_close(out[15:18, 15:18], torch.full((3, 3), 1 / 9))
    assert out.sum() == pytest.approx(1)
    # Severity 4: radius 1 is a cross of five.
    out = corrupt(impulse(), "defocus_blur", 4, keys(1))[0, 0]
    torch.testing.assert_close(out[16, 14:19], torch.tensor([0, 0.2, 0.2, 0.2, 0]), atol=1e-5, rtol=0)
    # Severity 1: radius 0.3 is one pixel, smoothed by weights 1 and w = exp(-1 / (2 * 0.4^2)) over 1 + 2 w.
    w = math.exp(-3.125)
    out = corrupt(impulse(), "defocus_blur", 1, keys(1))[0, 0]
    row = torch.tensor([w, 1, w]) / (1 + 2 * w)
    torch.testing.assert_close(out[15:18, 15:18], row.outer(row))


@pytest.mark.parametrize(("angle", "step"), [(0, (0, -1)), (90, (-1, 0)), (45, (-1, -1)), (-90, (1, 0))])
def test_motion_smears_an_impulse_by_half_a_gaussian(angle, step):
    # Pixel p is the mean of those i steps ahead, so light at 16 is found i steps behind.
    out = filters.motion(impulse(), torch.tensor([float(angle)]), radius=2, sigma=1.5)[0, 0]
    taps = np.exp(-0.5 * (np.arange(5) / 1.5) ** 2)
    if angle == 45:  # steps of ceil(i / sqrt(2) - 0.5) = 0, 1, 1, 2, 3
        taps = np.array([taps[0], taps[1] + taps[2], taps[3], taps[4], 0]) / taps.sum()
    else:
        taps = taps / taps.sum()
    found = [float(out[16 + step[0] * i, 16 + step[1] * i]) for i in range(5)]
    assert found == pytest.approx(taps.tolist(), abs=0.5 / 255 + 1e-6)
    assert (out > 0).sum() == (taps > 0).sum()


def test_zoom_enlarges_the_middle():
    # Eight pixels, twice: the middle four, 2 to 5, are stretched over eight, at steps of 3 / 7.
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    expected = 2 + torch.arange(8) * 3 / 7
    torch.testing.assert_close(filters.zoom(ramp, 2)[0, 0], expected.expand(8, 8))


def test_zoom_blur_is_the_mean_over_the_published_factors():
    # Four pixels: by 1 to 1.06 the crop is all four and round(4 * factor) = 4, so nothing moves.
    # At 1.13 and beyond the four become five, of which the first four are seen, at steps of 3 / 4.
    ramp = torch.arange(4.0).expand(1, 1, 4, 4) / 4
    torch.testing.assert_close(corrupt(ramp, "zoom_blur", 1, keys(1)), ramp)
    factors = [round(1 + i / 100, 2) for i in range(27)]  # arange(1, 1.26, 0.01), with 1.26 by rounding or without
    factors = factors[: len(np.arange(1, 1.26, 0.01))]
    still = 1 + sum(f < 1.125 for f in factors)
    column = torch.arange(4) / 4
    expected = (column * still + column * 3 / 4 * (len(factors) + 1 - still)) / (len(factors) + 1)
    torch.testing.assert_close(corrupt(ramp, "zoom_blur", 5, keys(1))[0, 0], expected.expand(4, 4))


def test_glass_blur_takes_pixels_from_above_and_from_the_left():
    # Severity 1 does not blur: a Gaussian of deviation 0.05 has no second tap.
    x = torch.arange(1024).view(1, 1, 32, 32) / 4  # every fourth pixel its own byte
    x = x.floor().to(torch.uint8)
    out = corrupt(x, "glass_blur", 1, keys(1))
    assert torch.equal(out[..., :2, :], x[..., :2, :])
    assert torch.equal(out[..., :2], x[..., :2])
    taken = torch.stack([out[..., 2:, 2:] == x[..., 2 - i : 32 - i, 2 - j : 32 - j] for i in (0, 1) for j in (0, 1)])
    assert taken.any(0).all()
    assert 0.4 < (out[..., 2:, 2:] // 8 == x[..., 2:, 2:] // 8).double().mean() < 0.6  # rows stay with probability 1/2


# Weather and light


def test_snow_falls_on_an_image_made_paler():
    c = PARAMETERS["snow"][4]
    out = corrupt(torch.full((4, 3, 32, 32), 0.2), "snow", 5, keys(4))
    paler = c[6] * 0.2 + (1 - c[6]) * (0.2 * 1.5 + 0.5)
    assert out.min() >= paler - 1e-6
    torch.testing.assert_close(out, out.flip((2, 3)))  # flakes, and flakes turned by half
    assert out.std() > 0.01


def test_frost_adds_ice_between_0_3_and_1():
    keep, share = PARAMETERS["frost"][4]
    out = corrupt(torch.full((8, 1, 32, 32), 0.2), "frost", 5, keys(8)) - keep * 0.2
    assert share * 0.3 - 1e-6 <= out.min() < share * 0.35
    assert share * 0.95 < out.max() <= share + 1e-6
    blue = corrupt(torch.zeros(1, 3, 32, 32), "frost", 5, keys(1))[0]
    torch.testing.assert_close(blue[0] / blue[2], torch.full((32, 32), 0.85))


def test_fog_adds_a_height_map_and_scales_back():
    # Of white: (1 + c h) / (1 + c), with h from 0 to 1.
    for severity, (c, _) in zip(SEVERITIES, PARAMETERS["fog"], strict=True):
        out = corrupt(torch.ones(2, 3, 32, 32), "fog", severity, keys(2))
        assert out.amin((1, 2, 3)).tolist() == pytest.approx([1 / (1 + c)] * 2)
        assert out.amax((1, 2, 3)).tolist() == pytest.approx([1.0] * 2)
    assert not corrupt(constant(0), "fog", 5, keys(2)).any()  # the brightest value stays the brightest


def test_a_height_map_is_the_mean_of_its_neighbours_and_a_wobble():
    # Cell by cell on a torus: middles of squares from their corners, then the others from left, right, above and below.
    side, k = 8, keys(1)
    draw = (rng.uniform(k, side * side, torch.float32)[0].double() * 2 - 1).view(side, side).numpy()
    h = np.zeros((side, side))
    for step, wobble in ((8, 100**2), (4, 50**2), (2, 25**2)):  # a decay of 2
        half = step // 2
        diagonal = [(i, j) for i in (-half, half) for j in (-half, half)]
        straight = [(half, 0), (-half, 0), (0, half), (0, -half)]
        for shift, near in (((half, half), diagonal), ((0, half), straight), ((half, 0), straight)):
            for y in range(shift[0], side, step):
                for x in range(shift[1], side, step):
                    around = [h[(y + i) % side, (x + j) % side] for i, j in near]
                    h[y, x] = sum(around) / 4 + wobble * draw[y, x]
    h = (h - h.min()) / (h.max() - h.min())
    torch.testing.assert_close(corruptions._plasma(k, 7, 2)[0].double(), torch.from_numpy(h), atol=1e-5, rtol=0)


def test_brightness_raises_the_value_and_keeps_hue_and_saturation():
    x = torch.tensor([[100, 50, 0], [0, 0, 0], [240, 120, 60]], dtype=torch.uint8).T.reshape(1, 3, 1, 3)
    out = corrupt(x, "brightness", 4, keys(1))  # by 0.2: 51 bytes
    # 100 to 151, 50 to 75.5; black has no hue; 240 to 255 at most, 120 to 127.5, 60 to 63.75
    assert out[0, :, 0].T.tolist() == [[151, 75, 0], [51, 51, 51], [255, 127, 63]]


def test_contrast_moves_towards_the_mean_of_each_channel():
    x = torch.cat([ramp(31)[:, :1], ramp(31)[:, :1] * 2, ramp(31)[:, :1] * 0], 1)  # means 15, 30, 0
    out = corrupt(x, "contrast", 2, keys(1))  # half the distance
    assert out[0, 0, 0].tolist() == [int(15 + (v - 15) / 2) for v in range(31)]
    assert out[0, 1, 0].tolist() == [15 + v for v in range(31)]
    assert not out[0, 2].any()


# Geometry


def test_the_elastic_transform_of_severity_1_is_affine():
    column = torch.arange(64.0) / 64
    x = torch.stack([column.expand(64, 64), column.unsqueeze(1).expand(64, 64), torch.zeros(64, 64)]).unsqueeze(0)
    out = corrupt(x, "elastic_transform", 1, keys(1))[0, :, 20:44, 20:44]  # away from the borders
    for dim in (1, 2):
        assert out.diff(n=2, dim=dim).abs().max() < 1e-5
    slope = out[0].diff(dim=1).mean() * 64
    assert slope != 1 and abs(slope - 1) < 0.5  # corners of a square of 42 move by at most 5.1


def test_the_elastic_transform_sends_the_shifted_points_back():
    k = keys(1)
    shift = (rng.uniform(rng.extend(k, "skew"), 6, torch.float32).view(3, 2) * 2 - 1) * 0.08 * 64
    points = torch.tensor([[53.0, 53.0], [53.0, 11.0], [11.0, 11.0]])  # 32 +- 64 // 3, as (x, y)
    place = torch.arange(64.0).expand(64, 64) / 64
    x = torch.stack([place, place.T]).unsqueeze(0)  # tells the column and the row it was read at
    out = corruptions.elastic_transform(x, k, 0, 0, 0.08)
    to = points + shift
    to = to.double().unsqueeze(0)
    read = filters.sample(out, to[..., 1], to[..., 0], "clamp")[0]
    torch.testing.assert_close(read * 64, points.T, atol=1e-3, rtol=0)


def test_pixelate_takes_means_of_whole_pixels_and_repeats_them():
    x = torch.tensor([10, 20, 30, 41], dtype=torch.uint8).expand(1, 1, 4, 4)
    # Half the size: 15 and 35.5, which rounds up.
    out = corruptions.pixelate(x.float() / 255, keys(1), 0.5) * 255
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([15.0, 15, 36, 36]))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_is_scipys(photos, severity):
    """The published code calls scikit-image, which calls SciPy with the nearest pixel beyond the border."""
    from scipy.ndimage import gaussian_filter

    sigma = (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    for x in (impulse(), photos.float() / 255):
        expected = gaussian_filter(x.double().numpy(), (0, 0, sigma, sigma), mode="nearest", truncate=4)
        out = corrupt(x, "gaussian_blur", severity, keys(len(x)))
        # up to 9 + 9 products and sums in float32, each off by at most 2^-24 of numbers below 1
        torch.testing.assert_close(out.double(), torch.tensor(expected), atol=36 * 2**-24, rtol=0)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_is_pillows(photos, severity):
    size = (30, 28, 27, 24, 20)[severity - 1]
    out = corrupt(photos, "pixelate", severity, keys(30)).permute(0, 2, 3, 1).numpy()
    for mine, clean in zip(out, photos.permute(0, 2, 3, 1).numpy(), strict=True):
        small = Image.fromarray(clean).resize((size, size), Image.Resampling.BOX)
        assert np.array_equal(mine, small.resize((32, 32), Image.Resampling.BOX))


# JPEG


# Rotation


def test_quarter_turns_only_move_pixels(photos):
    for quarters in range(-1, 5):
        assert torch.equal(rotate(photos, 90.0 * quarters), photos.rot90(quarters, (2, 3)))


def test_each_image_has_its_own_angle(photos):
    out = rotate(photos[:3], torch.tensor([0.0, 90.0, 30.0]))
    assert torch.equal(out[0], photos[0])
    assert torch.equal(out[1], photos[1].rot90(1, (1, 2)))
    assert torch.equal(out[2], rotate(photos[2:3], 30)[0])


def test_rotation_brings_in_black():
    out = rotate(constant(200, 1, channels=1), 45)[0, 0]
    assert out[0, 0] == out[-1, -1] == 0
    assert (out[10:22, 10:22] == 200).all()
    # 22.5 of 31 columns wide at the tips: an octagon's area, 2 (sqrt(2) - 1) of the square
    assert (out > 100).double().mean() == pytest.approx(2 * (math.sqrt(2) - 1), abs=0.02)


# What goes wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "rain"}, "corruption 'rain': possible are gaussian_noise, shot_noise"),
        ({"severity": 6}, "fog: severity 6 is not one of 1 to 5"),
        ({"images": torch.zeros(3, 32, 32)}, r"images must be \[N, C, H, W\], their shape is \(3, 32, 32\)"),
        ({"images": torch.zeros(2, 4, 8, 8)}, "4 channels; possible are 1"),
        ({"images": torch.zeros(2, 3, 8, 8, dtype=torch.int64)}, "torch.int64; possible are uint8 and floats"),
        ({"images": torch.full((2, 3, 8, 8), -1.5)}, "range from -1.5 to -1.5; give images that are not normalised"),
        ({"images": torch.full((2, 3, 8, 8), math.nan)}, "must lie in"),
        ({"keys": keys(3)}, "2 images want as many int64 keys"),
        ({"keys": torch.zeros(2)}, "int64 keys .* torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    right = {"images": torch.zeros(2, 3, 8, 8), "kind": "fog", "severity": 1, "keys": keys(2)}
    with pytest.raises(ValueError, match=message):
        corrupt(**(right | change))


def test_no_images_are_no_images():
    assert corrupt(torch.zeros(0, 3, 8, 8), "fog", 1, keys(0)).shape == (0, 3, 8, 8)


def test_images_are_left_as_they_were(photos):
    before = photos.clone()
    for kind in CORRUPTIONS:
        corrupt(photos, kind, 5, keys(30))
    assert torch.equal(photos, before)


# Speed and devices


def test_threads_do_not_matter(photos):
    alone = [corrupt(photos, kind, 4, keys(30)) for kind in CORRUPTIONS]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = [corrupt(photos, kind, 4, keys(30)) for kind in CORRUPTIONS]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_rounding_decides_a_byte_of_a_thousand_at_most(photos):
    """A division by 255 rounds otherwise on a GPU than on a CPU, and here in float64.

    Contrast adds one number to all of a channel, so where that comes to the edge of a byte, many of its bytes move, and
    a channel is one of 90 here.
    """
    for kind, severity in EVERY:
        exact = corrupt(photos.double() / 255, kind, severity, keys(30))
        gap = (corrupt(photos, kind, severity, keys(30)).double() - (exact * 255 + 2**-12).floor()).abs()
        assert int(gap.max()) <= 1 and float(gap.mean()) < 1e-3, (kind, severity)


@pytest.mark.gpu
def test_a_gpu_differs_by_one_in_a_byte_of_a_thousand_at_most(photos):
    for kind, severity in EVERY:
        cpu = corrupt(photos, kind, severity, keys(30))
        gap = (corrupt(photos.cuda(), kind, severity, keys(30).cuda()).cpu().int() - cpu.int()).abs()
        assert int(gap.max()) <= 1, (kind, severity)
        assert float(gap.double().mean()) < 1e-3, (kind, severity)
