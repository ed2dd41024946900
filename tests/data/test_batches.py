import dataclasses

import pytest
import torch

from personafl.core import rng
from personafl.core.normalization import Normalization, as_inputs
from personafl.core.types import Batch, Examples
from personafl.data import batches

COUNTS = (7, 4, 2)
IDS = (11, 5, 8)


def examples(counts=COUNTS, ids=IDS, first=0):
    """Client c holds rows 1 + 10 c, 2 + 10 c, ...; row 0, which padding points at, is nobody's and not a number."""
    rows = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for c, n in enumerate(counts):
        rows[c, :n] = 1 + 10 * (c + first) + torch.arange(n)
    x = torch.arange(10.0 * (first + len(counts)) + 1).unsqueeze(1)
    x[0] = torch.nan
    return Examples(x, torch.arange(len(x)), rows, torch.tensor(counts), torch.tensor(ids))


def keys(ids=IDS):
    return rng.key(0, "batches", 3, torch.tensor(ids))


def own_rows(data, c):
    return data.rows[c, : data.count[c]].tolist()


def seen(plan, c, step):
    """The rows of one client's minibatch, without padding."""
    return plan.rows[c, step, : plan.real[c, step]].tolist()


def test_every_epoch_visits_every_example_once():
    data = examples()
    plan = batches.plan(data, 3, keys(), epochs=3)
    for c, per_epoch in enumerate((3, 2, 1)):  # 7, 4, 2 examples in batches of 3
        for epoch in range(3):
            steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
            assert sorted(row for s in steps for row in seen(plan, c, s)) == own_rows(data, c)


def test_the_shape_of_a_plan_in_numbers():
    plan = batches.plan(examples(), 3, keys(), epochs=2)
    assert plan.rows.shape == (3, 6, 3)
    assert plan.steps.tolist() == [6, 4, 2]
    assert plan.active == [3, 3, 2, 2, 1, 1]
    assert plan.real[0].tolist() == [3, 3, 1, 3, 3, 1]  # the last batch of an epoch is short
    assert plan.real[1, :4].tolist() == [3, 1, 3, 1]
    assert plan.real[2, :2].tolist() == [2, 2]
    assert plan.full == [False, False, False, False, True, False]  # step 4: client 0 alone, 3 of 3
    assert plan.examples.tolist() == [14, 8, 4]
    assert plan.examples.dtype == torch.float64


@pytest.mark.parametrize("counts", [COUNTS, (5, 5), (1,)])
@pytest.mark.parametrize("length", [{"epochs": 2.5}, {"steps": 4}, {"epochs": 0.0}, {"epochs": 0.2, "least": 3}])
def test_few_numbers_are_ordered_as_many_are(monkeypatch, counts, length):
    """The host orders few, the device of the rows many, and layouts are kept or found anew: the same minibatches."""
    data, streams = examples(counts, IDS[: len(counts)]), keys(IDS[: len(counts)])
    first, passed = (torch.tensor([n] * len(counts)) for n in (2, 7))
    how = length | {"first": first, "noise": streams, "passed": passed}
    few, again = (batches.plan(data, 3, streams, **how) for _ in range(2))
    assert again.active is few.active  # the layout is the same one
    monkeypatch.setattr(batches, "FEW", -1)
    monkeypatch.setattr(batches, "KEPT", -1)
    many = batches.plan(data, 3, streams, **how)
    assert many.active is not few.active
    for one in (again, many):
        for field in dataclasses.fields(batches.Plan):
            mine, other = getattr(few, field.name), getattr(one, field.name)
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
    assert few.noise.shape == few.real.shape


def test_what_a_minibatch_hands_out_is_not_the_kept_layout():
    """A loss that writes to what it is given spoils its own step, not the next round's or another method's."""
    data = examples((5,), IDS[:1])
    before = batches.plan(data, 3, keys(IDS[:1]), steps=1, noise=keys(IDS[:1]))
    real, noise = before.real.clone(), before.noise.clone()
    batch = batches.minibatch(data, before, 0, before.noise[:, 0], torch.float64)
    for t in (batch.count, batch.keys, before.real, before.noise, before.rows):
        t.add_(1)
    after = batches.plan(data, 3, keys(IDS[:1]), steps=1, noise=keys(IDS[:1]))
    assert torch.equal(after.real, real) and torch.equal(after.noise, noise)
    assert after.sizes.tolist() == [[3]]


def test_each_client_of_a_plan_has_its_own_rows_and_noise():
    plan = batches.plan(examples(), 3, keys(), epochs=1, noise=keys())
    for c, steps in enumerate(plan.steps.tolist()):
        alone = plan.client(c)
        for name in ("rows", "there", "real", "noise"):
            assert torch.equal(getattr(alone, name), getattr(plan, name)[c : c + 1, :steps])


def test_noise_goes_on_where_it_was():
    """Each step's stream is that of its number: what a second turn has is what one long turn would have had."""
    long = batches.plan(examples(), 3, keys(), steps=5, noise=keys()).noise
    assert torch.equal(long, rng.extend(keys().unsqueeze(1), torch.arange(5)))
    later = batches.plan(examples(), 3, keys(), steps=3, noise=keys(), passed=torch.tensor([2, 2, 2])).noise
    assert torch.equal(later, long[:, 2:])
    assert batches.plan(examples(), 3, keys(), steps=5).noise.shape == (3, 0)


def test_batches_are_no_wider_than_the_largest_client():
    plan = batches.plan(examples(), 64, keys(), epochs=1)
    assert plan.rows.shape == (3, 1, 7)
    assert plan.real[:, 0].tolist() == [7, 4, 2]


@pytest.mark.parametrize("length", [{"epochs": 3.0}, {"epochs": 0.5}, {"steps": 5}])
def test_a_client_alone_gets_the_minibatches_it_gets_in_a_stack(length):
    stacked = batches.plan(examples(), 3, keys(), **length)
    for c in range(3):
        alone = batches.plan(examples(COUNTS[c : c + 1], IDS[c : c + 1], first=c), 3, keys(IDS[c : c + 1]), **length)
        assert alone.steps[0] == stacked.steps[c]
        assert alone.examples[0] == stacked.examples[c]
        for s in range(int(alone.steps[0])):
            assert seen(alone, 0, s) == seen(stacked, c, s)


def test_a_plan_cut_down_to_a_client_is_the_plan_of_that_client():
    """But for the width of a minibatch, which goes by the stack: where the client's own are narrower, none is full."""
    stacked = batches.plan(examples(), 3, keys(), epochs=2)
    assert stacked.sizes.tolist() == stacked.real.tolist()
    for c, full in enumerate(([True, True, False] * 2, [True, False] * 2, [False] * 2)):
        alone = batches.plan(examples(COUNTS[c : c + 1], IDS[c : c + 1], first=c), 3, keys(IDS[c : c + 1]), epochs=2)
        cut = stacked.client(c)
        assert cut.full == full and cut.active == alone.active
        for field in ("real", "sizes", "steps", "examples"):
            assert torch.equal(getattr(cut, field), getattr(alone, field)), field
        assert cut.rows.shape == cut.there.shape == (1, len(full), 3)
        assert [seen(cut, 0, s) for s in range(len(full))] == [seen(alone, 0, s) for s in range(len(full))]


def test_epochs_are_shuffled_anew():
    plan = batches.plan(examples(), 7, keys(), epochs=4)
    orders = {tuple(seen(plan, 0, s)) for s in range(4)}
    assert len(orders) == 4


def test_clients_of_equal_data_are_shuffled_differently():
    plan = batches.plan(examples((7, 7)), 7, keys((1, 2)), epochs=1)
    first, second = (torch.tensor(seen(plan, c, 0)) - 10 * c for c in range(2))
    assert not torch.equal(first, second)


def test_a_later_turn_goes_on_with_the_next_epoch():
    data = examples()
    both = batches.plan(data, 3, keys(), epochs=2)
    second = batches.plan(data, 3, keys(), epochs=1, first=1)
    for c, per_epoch in enumerate((3, 2, 1)):
        for s in range(per_epoch):
            assert seen(second, c, s) == seen(both, c, per_epoch + s)


def test_a_fraction_of_an_epoch_is_rounded_to_whole_steps():
    plan = batches.plan(examples(), 3, keys(), epochs=0.5)
    assert plan.steps.tolist() == [2, 1, 1]  # of 3, 2, 1: 1.5 and 0.5 are rounded up
    assert plan.active == [3, 1]
    assert plan.examples.tolist() == [6, 3, 2]
    whole = batches.plan(examples(), 3, keys(), epochs=1)
    assert seen(plan, 0, 1) == seen(whole, 0, 1)
    assert batches.plan(examples(), 3, keys(), epochs=1.5).steps.tolist() == [5, 3, 2]  # 4.5, 3, 1.5


@pytest.mark.parametrize("epochs", [0.0, 0.1])
def test_less_than_half_a_step_is_no_step(epochs):
    plan = batches.plan(examples(), 3, keys(), epochs=epochs)
    assert plan.steps.tolist() == [0, 0, 0]
    assert plan.active == []
    assert plan.full == []
    assert plan.rows.shape == (3, 0, 3)
    assert plan.examples.tolist() == [0, 0, 0]


def test_steps_are_the_same_number_for_everybody():
    data = examples()
    plan = batches.plan(data, 3, keys(), steps=5)
    assert plan.steps.tolist() == [5, 5, 5]
    assert plan.active == [3] * 5
    assert plan.real.tolist() == [[3, 3, 1, 3, 3], [3, 1, 3, 1, 3], [2] * 5]
    assert plan.examples.tolist() == [13, 11, 10]
    for s in range(5):  # the smallest client's epoch is one batch
        assert sorted(seen(plan, 2, s)) == own_rows(data, 2)
    assert sorted(seen(plan, 1, 2) + seen(plan, 1, 3)) == own_rows(data, 1)  # its second epoch


def test_the_number_of_active_clients_never_rises():
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts = torch.randint(1, 30, (6,), generator=g).sort(descending=True).values.tolist()
        plan = batches.plan(examples(counts, range(6)), 4, keys(range(6)), epochs=1.3)
        assert plan.active == sorted(plan.active, reverse=True)
        assert plan.steps.tolist() == sorted(plan.steps.tolist(), reverse=True)
        assert len(plan.active) == plan.steps.max()
        assert sum(plan.active) == plan.steps.sum()


def test_a_minibatch_says_where_it_is_padded():
    data = examples()
    plan = batches.plan(data, 3, keys(), epochs=1)
    batch = batches.gather(data, plan.rows[:, 0], plan.real[:, 0], plan.full[0], keys(), torch.float64)
    assert batch.valid.tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    assert batch.count.tolist() == [3, 3, 2]
    assert batch.x.dtype == torch.float64
    assert torch.equal(batch.x[0, :, 0], plan.rows[0, 0].double())  # an example's value is its row number
    assert torch.equal(batch.y, plan.rows[:, 0])
    assert torch.equal(batch.keys, keys())


def test_a_full_minibatch_has_no_mask():
    data = examples()
    plan = batches.plan(data, 2, keys(), epochs=1)
    assert plan.full[0]
    batch = batches.gather(data, plan.rows[:, 0], plan.real[:, 0], plan.full[0], keys(), torch.float32)
    assert batch.valid is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(torch.uint8, torch.float64), (torch.float32, torch.float64), (torch.int64, torch.int64)],
)
def test_bytes_are_scaled_and_whole_numbers_stay(kind, expected):
    x = torch.tensor([[0], [51], [255]], dtype=kind)
    rows = torch.tensor([[0, 1, 2]])
    data = Examples(x, torch.arange(3), rows, torch.tensor([3]), torch.tensor([0]))
    out = batches.gather(data, rows, data.count, True, keys((0,)), torch.float64).x
    assert out.dtype == expected
    assert out.flatten().tolist() == ([0, 51 / 255, 1] if kind == torch.uint8 else [0, 51, 255])


def test_the_mean_of_a_batch_is_over_real_examples():
    valid = torch.tensor([[True, True], [True, False]])
    batch = Batch(torch.zeros(2, 2), torch.zeros(2, 2), valid, torch.tensor([2, 1]), torch.zeros(2))
    values = torch.tensor([[1.0, 3.0], [5.0, torch.nan]])
    assert batch.mean(values).tolist() == [2, 5]


def test_in_order_walks_each_clients_rows_once():
    data = examples()
    walked: dict[int, list[int]] = {c: [] for c in range(3)}
    firsts, widths, full = [], [], []
    for batch, first in batches.in_order(data, 3, torch.float32):
        firsts.append(first)
        widths.append(batch.x.shape[:2])
        full.append(batch.valid is None)
        for c in range(batch.x.shape[0]):
            walked[c] += batch.y[c, : batch.count[c]].tolist()
            real = torch.ones(batch.x.shape[1]).bool() if batch.valid is None else batch.valid[c]
            assert real.sum() == batch.count[c]
    assert walked == {c: own_rows(data, c) for c in range(3)}
    assert firsts == [0, 3, 6]
    assert widths == [(3, 3), (2, 3), (1, 1)]  # only clients that have rows left, no wider than the data
    assert full == [False, False, True]  # 3, 3 and 2 rows, then 3 and 1, then 1


def test_sums_ignore_padding():
    def measure(batch):
        values = batch.x[..., 0]  # padding would be nan
        return {"total": batch.mean(values) * batch.count, "count": batch.count}

    data = examples()
    for batch_size in (1, 3, 64):
        total = batches.sums(data, batch_size, torch.float32, measure)
        assert total["count"].tolist() == [7, 4, 2]
        # 1 + ... + 7 = 28; 11 + 12 + 13 + 14 = 50; 21 + 22 = 43
        assert total["total"].tolist() == pytest.approx([28, 50, 43])
        assert total["total"].dtype == torch.float64


def test_sums_may_have_any_shape():
    def measure(batch):
        hot = torch.nn.functional.one_hot(batch.y % 2, 2)  # even and odd row numbers
        if batch.valid is not None:
            hot = hot * batch.valid.unsqueeze(-1)
        return {"parity": hot.sum(1)}

    parity = batches.sums(examples(), 3, torch.float32, measure)["parity"]
    assert parity.tolist() == [[3, 4], [2, 2], [1, 1]]  # 1..7, 11..14, 21..22


def test_one_pass_reaches_every_example_of_clients_in_any_order():
    """Counts 2, 5, 1, 4 in batches of 2: a later client may have more than an earlier one."""
    counts = (2, 5, 1, 4)
    data = examples(counts, ids=(0, 1, 2, 3))
    seen: dict[int, list[int]] = {c: [] for c in range(4)}
    for batch, _ in batches.in_order(data, 2, torch.float64):
        for c in range(batch.x.shape[0]):
            real = int(batch.count[c])
            seen[c] += batch.x[c, :real].flatten().tolist()
    assert [len(v) for v in seen.values()] == list(counts)
    total = batches.sums(
        data, 2, torch.float64, lambda b: {"n": b.count, "x": b.mean(b.x.view(*b.x.shape[:2], -1)[..., 0]) * b.count}
    )
    assert total["n"].tolist() == list(counts)
    assert total["x"].tolist() == pytest.approx([sum(v) for v in seen.values()])


@pytest.mark.parametrize("block", [0, 80, 2**20])  # one by one; two steps of 3 x 3 x 4 bytes; all at once
@pytest.mark.parametrize("augment", [False, True])
def test_minibatches_fetched_many_at_a_time_are_the_same(block, augment, monkeypatch):
    monkeypatch.setattr(batches, "BLOCK", block * (4 * 4 if augment else 1))
    data = examples()
    if augment:
        x = torch.rand(len(data.x), 1, 4, 4, generator=torch.Generator().manual_seed(0))
        data = dataclasses.replace(data, x=x, augment=True)
    plan = batches.plan(data, 3, keys(), epochs=2, noise=keys())
    noise = plan.noise
    found = list(batches.minibatches(data, plan, torch.float64))
    assert len(found) == 6
    for s, (k, batch) in enumerate(zip(plan.active, found, strict=True)):
        alone = batches.minibatch(data, plan, s, noise[:k, s], torch.float64)
        for name in ("x", "y", "count", "keys"):
            torch.testing.assert_close(getattr(batch, name), getattr(alone, name), rtol=0, atol=0, equal_nan=True)
        assert (batch.valid is None) == (alone.valid is None) == plan.full[s]
        assert batch.valid is None or torch.equal(batch.valid, alone.valid)


# Data on the host


def test_rows_fetched_from_the_host_are_the_same(monkeypatch):
    data = examples()
    plan = batches.plan(data, 3, keys(), epochs=1)
    there = [batches.minibatch(data, plan, s, keys()[:k], torch.float64) for s, k in enumerate(plan.active)]
    there += [b for b, _ in batches.in_order(data, 3, torch.float64)]
    monkeypatch.setattr(batches, "_lies_on", lambda x, device: False)
    fetched = [batches.minibatch(data, plan, s, keys()[:k], torch.float64) for s, k in enumerate(plan.active)]
    fetched += [b for b, _ in batches.in_order(data, 3, torch.float64)]
    for a, b in zip(there, fetched, strict=True):
        torch.testing.assert_close(a.x, b.x, rtol=0, atol=0, equal_nan=True)  # padding points at no number
        assert torch.equal(a.y, b.y) and torch.equal(a.count, b.count)


# Augmentation


def pictures(stack=3, size=5, channels=2, height=6, width=7):
    x = torch.rand(stack, size, channels, height, width, generator=torch.Generator().manual_seed(0))
    return Batch(x, torch.zeros(stack, size), None, torch.full((stack,), size), keys()[:stack])


def test_augmented_images_are_cut_and_turned_one_by_one():
    batch = pictures()
    found = batches.augmented(batch)
    moved = flipped = 0
    for c, key in enumerate(batch.keys):
        words = rng.uniform(rng.extend(key, "augment"), 15).tolist()
        for i, image in enumerate(batch.x[c]):
            down, right = (int(9 * words[3 * i + j]) for j in (0, 1))  # nine places in a padding of four
            padded = torch.zeros(2, 14, 15)
            padded[:, 4:10, 4:11] = image
            expected = padded[:, down : down + 6, right : right + 7]
            if words[3 * i + 2] < 0.5:
                expected = expected.flip(2)
                flipped += 1
            moved += (down, right) != (4, 4)
            assert torch.equal(found.x[c, i], expected)
    assert moved > 10 and 3 < flipped < 12
    assert found.y is batch.y and found.keys is batch.keys


def test_augmentation_does_not_depend_on_the_stack_or_the_width_of_a_batch():
    whole = pictures()
    for c in range(3):
        part = Batch(
            whole.x[c : c + 1, :3], whole.y[c : c + 1, :3], None, whole.count[c : c + 1], whole.keys[c : c + 1]
        )
        assert torch.equal(batches.augmented(part).x[0], batches.augmented(whole).x[c, :3])


# Normalisation

SCALED = Normalization((0.2, 0.6), (0.5, 0.25), axes=3)


def photographs(augment):
    data = examples()
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 256, (len(data.x), 2, 6, 7), dtype=torch.uint8, generator=draw)  # none is black
    return dataclasses.replace(data, x=x, augment=augment)


def by_every_way(data, monkeypatch):
    """The minibatches of an epoch one by one, many at a time and from the host, and a pass in order."""
    plan = batches.plan(data, 3, keys(), epochs=1, noise=keys())
    noise = plan.noise

    def epoch():
        return [batches.minibatch(data, plan, s, noise[:k, s], torch.float64) for s, k in enumerate(plan.active)]

    blocks = list(batches.minibatches(data, plan, torch.float64))
    alone, passed = epoch(), [b for b, _ in batches.in_order(data, 3, torch.float64)]
    with monkeypatch.context() as patch:
        patch.setattr(batches, "_lies_on", lambda x, device: False)
        return {"alone": alone, "blocks": blocks, "host": epoch(), "in order": passed}


@pytest.mark.parametrize("augment", [False, True])
def test_minibatches_are_normalised_whichever_way_they_come(augment, monkeypatch):
    """Black pixels that augmentation pads with are (0 - mean) / std, as torchvision has it."""
    data = photographs(augment)
    plain = by_every_way(data, monkeypatch)
    found = by_every_way(dataclasses.replace(data, normalization=SCALED), monkeypatch)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(2, 1, 1) for v in (SCALED.mean, SCALED.std))
    black = 0
    for way, batch_list in found.items():
        assert len(batch_list) == len(plain[way]) == 3
        for batch, raw in zip(batch_list, plain[way], strict=True):
            # a product and a sum of float64 below 4
            torch.testing.assert_close(batch.x, (raw.x - mean) / std, rtol=0, atol=2e-15)
            black += int((raw.x == 0).sum()) if way == "alone" else 0
    assert (black > 100) == augment  # twelve images of 84 pixels, moved by up to four


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_normalisation_pixels_are_what_they_were(dtype, monkeypatch):
    data = photographs(augment=False)
    for batch, _ in batches.in_order(data, 3, dtype):
        rows = batch.y  # an example's label is its row
        assert torch.equal(batch.x, data.x[rows].to(dtype) / 255)


def test_tokens_are_not_normalised():
    x = torch.tensor([[3, 1]])
    assert as_inputs(x, torch.float32, Normalization((0.5,), (0.5,))).equal(x)
