import torch

from personafl.core.store import Store


def fresh(ids):
    """A client that never took part: its weights are its own id, its mask is all true."""
    return {"w": ids.double().unsqueeze(1).expand(-1, 2), "mask": torch.ones(len(ids), 3, dtype=torch.bool)}


def rows(ids, value):
    return {
        "w": torch.full((len(ids), 2), value, dtype=torch.float64) + torch.tensor(ids).unsqueeze(1),
        "mask": torch.zeros(len(ids), 3, dtype=torch.bool),
    }


def stored(*ids, value=1000.0):
    store = Store(fresh)
    store.scatter(torch.tensor(ids), rows(ids, value))
    return store


def test_rows_survive_in_the_order_asked_for():
    store = stored(4, 7, 2)
    out = store.gather(torch.tensor([2, 4]))
    assert out["w"].tolist() == [[1002, 1002], [1004, 1004]]
    assert not out["mask"].any()
    assert out["mask"].dtype == torch.bool


def test_unseen_clients_are_fresh():
    out = stored(4).gather(torch.tensor([8, 9]))
    assert out["w"].tolist() == [[8, 8], [9, 9]]
    assert out["mask"].all()


def test_gathering_a_fresh_client_does_not_store_it():
    store = stored(4)
    store.gather(torch.tensor([8, 4, 9]))
    assert store.ids == [4]


def test_seen_and_unseen_clients_mix_in_place():
    out = stored(4, 7).gather(torch.tensor([9, 7, 1, 4]))
    assert out["w"].tolist() == [[9, 9], [1007, 1007], [1, 1], [1004, 1004]]
    assert out["mask"].any(1).tolist() == [True, False, True, False]


def test_later_rows_replace_earlier_ones_and_leave_the_others():
    store = stored(4, 7)
    store.scatter(torch.tensor([7]), rows([7], 2000.0))
    assert store.gather(torch.tensor([4, 7]))["w"].tolist() == [[1004, 1004], [2007, 2007]]


def test_the_store_grows_with_its_clients():
    store = Store(fresh)
    for c in range(20):
        store.scatter(torch.tensor([c]), rows([c], 1000.0))
    store.scatter(torch.arange(15, 40), rows(list(range(15, 40)), 2000.0))  # five known, twenty new
    expected = [1000.0 + c for c in range(15)] + [2000.0 + c for c in range(15, 40)]
    assert store.gather(torch.arange(40))["w"][:, 0].tolist() == expected
    assert sorted(store.ids) == list(range(40))


def test_memory_depends_on_the_clients_seen_not_on_their_ids():
    store = stored(10**6, 3)
    store.scatter(torch.tensor([999_999]), rows([999_999], 1000.0))
    assert store.ids == [10**6, 3, 999_999]
    assert store.gather(torch.tensor([999_999, 10**6]))["w"].tolist() == [[1_000_999] * 2, [1_001_000] * 2]
    assert store._rows["w"].shape[0] <= 2 * 3


def test_what_was_gathered_is_a_copy():
    store = stored(4, 7)
    store.gather(torch.tensor([4, 7]))["w"].zero_()
    store.gather(torch.tensor([4, 9]))["w"].zero_()
    assert store.gather(torch.tensor([4, 7]))["w"].tolist() == [[1004, 1004], [1007, 1007]]


def test_what_was_scattered_is_a_copy_without_a_graph():
    kept = rows([4], 1000.0)
    kept["w"].requires_grad_()
    store = Store(fresh)
    store.scatter(torch.tensor([4]), kept)
    kept["w"].detach().zero_()
    out = store.gather(torch.tensor([4]))["w"]
    assert out.tolist() == [[1004, 1004]]
    assert not out.requires_grad


def test_a_method_that_keeps_nothing_stores_nothing():
    store = Store(lambda ids: {})
    store.scatter(torch.tensor([1, 2]), {})
    assert store.ids == []
    assert store.gather(torch.tensor([1, 2])) == {}
