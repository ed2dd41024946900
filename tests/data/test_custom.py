"""One's own data: PyTorch data sets, Hugging Face partitions, a file per client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.utils.data import Dataset, TensorDataset

from personafl import experiment
from personafl.config import components
from personafl.core.errors import UserError
from personafl.data import custom
from tests.data.written import Bomb, recipe_of


def numbers(n: int, start: int = 0, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples (i, -i) and labels i mod classes, for i from start on: one tells where every row came from."""
    i = torch.arange(start, start + n)
    return torch.stack([i, -i], 1).float(), i % classes


# PyTorch data sets


def test_a_data_set_per_client_in_the_given_order() -> None:
    made = custom.datasets([TensorDataset(*numbers(5)), TensorDataset(*numbers(3, 100))], ["zoe", "adam"])
    assert made.clients is not None and made.clients.tolist() == [0] * 5 + [1] * 3
    assert made.names == ("zoe", "adam")
    assert made.x[:, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102]
    assert made.y.tolist() == [0, 1, 2, 0, 1, 100 % 3, 101 % 3, 102 % 3]
    assert (made.test, made.classes, made.x.dtype) == (None, 3, torch.float32)


def test_pairs_mark_the_test_rows() -> None:
    pairs = [(TensorDataset(*numbers(4)), TensorDataset(*numbers(2, 4))), (TensorDataset(*numbers(3, 6)),) * 2]
    made = custom.datasets(pairs)
    assert made.test is not None and made.test.tolist() == [False] * 4 + [True] * 2 + [False] * 3 + [True] * 3
    assert made.names == ("0", "1")


class Counted(Dataset[Any]):
    """Items as (array, int), and how often each was read."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, [0] * len(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        self.reads[i] += 1
        return self.items[i]


def test_labels_may_be_text() -> None:
    made = custom.datasets([Counted([(np.zeros(2), "walk"), (np.zeros(2), "sit")]), Counted([(np.zeros(2), "run")])])
    assert (made.class_names, made.y.tolist()) == (("run", "sit", "walk"), [2, 1, 0])


def test_a_test_part_may_be_empty_and_a_client_may_not() -> None:
    full, empty = TensorDataset(*numbers(2)), TensorDataset(*numbers(0))
    made = custom.datasets([(full, empty), (full, full)])
    assert made.clients.tolist() == [0, 0, 1, 1, 1, 1]
    assert made.test.tolist() == [False] * 4 + [True] * 2
    with pytest.raises(ValueError, match="client 1, training part: no examples"):
        custom.datasets([(full, full), (empty, empty)])


def test_every_item_is_read_once() -> None:
    data = Counted([(np.full((2, 2), i), i) for i in range(4)])
    assert custom.datasets([data]).x.shape == (4, 2, 2)
    assert data.reads == [1] * 4


def test_pictures_become_bytes_with_channels_first() -> None:
    colour = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    pictures = [Image.fromarray(colour), Image.fromarray(colour).convert("RGBA")]
    made = custom.datasets([Counted([(p, 0) for p in pictures])])
    assert made.x.dtype == torch.uint8
    for x in made.x:
        assert torch.equal(x, torch.from_numpy(colour).permute(2, 0, 1))
    grey = custom.datasets([Counted([(Image.fromarray(colour[:, :, 0]), 0)])])
    assert grey.x.shape == (1, 1, 2, 3)


GOOD = (np.zeros(2, np.float32), 0)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([GOOD, (np.zeros(3, np.float32), 0)], r"client b, item 1: its shape is \(3,\), that of item 0 \(2,\)"),
        (
            [GOOD, (np.zeros(2, np.float32), [0, 1])],
            r"client b, item 1: its label has shape \(2,\), that of item 0 \(\)",
        ),
        ([GOOD, np.zeros(3)], "client b, item 1: must be an example and its label"),
        ([("text", 0)], "client b, item 0: must be numbers, it is str"),
        ([GOOD, (np.full(2, np.nan), 0)], "client b: example 1 contains NaN"),
        ([GOOD, (np.full(2, np.inf), 0)], "client b: example 1 contains infinity"),
        ([GOOD, (np.zeros(2), -1)], "label -1 of example 1 of client b is not in 0..0"),
        ([GOOD, (np.zeros(2), np.nan)], "client b: example 1 has no label: it is NaN or infinity"),
        ([GOOD, (np.zeros(2), "dog")], "client b, item 1: its label is 'dog', that of item 0 0"),
        ([(np.zeros(2), "dog")], "client b: labels are text, those of client a numbers"),
        ([(np.zeros(2), [0, 1])], r"client b: labels of shape \(2,\), those of client a have \(\)"),
        ([], "client b: no examples"),
        ([(np.zeros(4, np.float32), 0)], r"client b: examples of shape \(4,\), those of client a have \(2,\)"),
        ([(np.zeros(2, np.uint8), 0)], "client b: examples are uint8, those of client a float32"),
    ],
)
def test_errors_name_the_client_and_the_item(items: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        custom.datasets([Counted([GOOD]), Counted(items)], ["a", "b"])


def test_what_is_no_list_of_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="datasets: client 0: generator has no length"):
        custom.datasets([(i for i in range(3))])
    with pytest.raises(ValueError, match=r"2 names \(1 different\) for 2 clients"):
        custom.datasets([Counted([GOOD])] * 2, ["a", "a"])
    with pytest.raises(ValueError, match="datasets: no clients"):
        custom.datasets([])
    with pytest.raises(ValueError, match="client 1, training part: either all clients or none"):
        custom.datasets([Counted([GOOD]), (Counted([GOOD]), Counted([GOOD]))])


# Hugging Face


class Label:
    num_classes = 7
    names = tuple("abcdefg")


class Table:
    """What this package asks of a `datasets.Dataset`."""

    def __init__(self, features: dict[str, Any] | None = None, /, **columns: Any) -> None:
        self.columns, self.column_names, self.features = columns, list(columns), features

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        assert isinstance(rows, slice)
        return {n: c[rows] for n, c in self.columns.items()}


class Federated:
    """What it asks of a Flower `FederatedDataset`."""

    def __init__(self, **splits: list[Table]) -> None:
        self.splits = splits
        self.partitioners = {s: type("Partitioner", (), {"num_partitions": len(p)}) for s, p in splits.items()}

    def load_partition(self, partition_id: int, split: str) -> Table:
        return self.splits[split][partition_id]


def test_partitions_with_columns_of_usual_or_given_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_AT_ONCE", 2)  # several reads
    first = Table({"fine_label": Label()}, features=[[1.0, 2.0]] * 5, fine_label=[0, 1, 2, 3, 4])
    second = Table({"fine_label": Label()}, features=[[3.0, 4.0]], fine_label=[5])
    made = custom.hugging_face([first, second])
    assert made.classes == 7  # the features say so, though label 6 does not occur
    assert made.class_names == tuple("abcdefg")
    assert made.clients is not None and made.clients.tolist() == [0] * 5 + [1]
    assert made.y.tolist() == [0, 1, 2, 3, 4, 5]
    renamed = custom.hugging_face([Table(a=[[1.0]], b=[1], c=[0])], image="a", label="c")
    assert renamed.y.tolist() == [0]
    text = custom.hugging_face([Table(x=[[1.0]] * 2, label=["walk", "run"]), Table(x=[[1.0]], label=["sit"])])
    assert (text.class_names, text.y.tolist()) == (("run", "sit", "walk"), [2, 0, 1])


def test_a_federated_data_set_gives_train_and_test_where_both_are_divided() -> None:
    def table(n: int) -> Table:
        return Table(x=np.full((n, 3), n, np.float32), y=np.zeros(n, np.int64))

    both = custom.hugging_face(Federated(train=[table(4), table(3)], test=[table(2), table(1)]))
    assert both.test is not None and both.test.tolist() == [False] * 4 + [True] * 2 + [False] * 3 + [True]
    one = custom.hugging_face(Federated(train=[table(4), table(3)], test=[table(2)]))  # one test set for all: not dealt
    assert one.test is None and len(one.y) == 7


def test_columns_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match="client 0: no column 'picture'; it has img, label"):
        custom.hugging_face([Table(img=[[1.0]], label=[0])], image="picture")
    with pytest.raises(ValueError, match=r"client 0: no column called label, .*; give label=, one of img, kind"):
        custom.hugging_face([Table(img=[[1.0]], kind=[0])])
    with pytest.raises(ValueError, match=r"client 0, row 1, column img: its shape is \(2,\), that of row 0 \(1,\)"):
        custom.hugging_face([Table(img=[[1.0], [1.0, 2.0]], label=[0, 0])])
    with pytest.raises(ValueError, match="must be train and test, they are train, valid"):
        custom.hugging_face([{"train": Table(x=[[1.0]], y=[0]), "valid": Table(x=[[1.0]], y=[0])}])


def test_the_real_package_gives_the_same() -> None:
    real = pytest.importorskip("datasets", reason="Hugging Face's package is not installed")
    colour = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
    kinds = real.Features({"img": real.Image(), "label": real.ClassLabel(num_classes=7)})
    whole = real.Dataset.from_dict({"img": [Image.fromarray(c) for c in colour], "label": [0, 1, 2, 3]}, features=kinds)
    for form in (None, "numpy", "torch"):
        made = custom.hugging_face([whole.shard(2, 0).with_format(form), whole.shard(2, 1).with_format(form)])
        assert torch.equal(made.x, torch.from_numpy(colour).permute(0, 3, 1, 2))
        assert (made.y.tolist(), made.classes) == ([0, 1, 2, 3], 7)
        assert made.clients is not None and made.clients.tolist() == [0, 0, 1, 1]


# A file per client


def test_a_folder_of_files_of_every_kind_in_natural_order(tmp_path: Path) -> None:
    x, y = (t.numpy() for t in numbers(2))
    np.savez(tmp_path / "client-10.npz", x=x, y=y)
    torch.save(dict(zip("xy", numbers(2, 10), strict=True)), tmp_path / "client-2.pt")
    save_file(dict(zip("xy", numbers(2, 20), strict=True)), tmp_path / "client-1.safetensors")
    (tmp_path / "client-3.csv").write_text('a,label,"b"\n30,0,-30\n31,1,-31\n')
    (tmp_path / "client-4").mkdir()
    np.savez(tmp_path / "client-4" / "b.npz", x=x + np.array([[50, -50]], np.float32), y=y)
    (tmp_path / "client-4" / "a.csv").write_text("b,label,a\n-40,2,40\n")
    (tmp_path / "README.md").write_text("notes are left alone")
    made = custom.folder(tmp_path)
    assert made.names == ("client-1", "client-2", "client-3", "client-4", "client-10")
    assert made.x[:, 0].tolist() == [20, 21, 10, 11, 30, 31, 40, 50, 51, 0, 1]
    assert torch.equal(made.x[:, 1], -made.x[:, 0])
    assert made.y.tolist() == [20 % 3, 21 % 3, 10 % 3, 11 % 3, 0, 1, 2, 0, 1, 0, 1]
    assert made.name == tmp_path.name
    assert made.feature_names is None  # arrays have none


@pytest.mark.parametrize(
    ("header", "label"), [("label,a,b", 0), ("A,Y,B", 1), ("a,target,b", 1), ("y,label,b", 1), ("a,b,kind", 2)]
)
def test_the_label_of_a_csv_is_its_label_column_or_its_last(tmp_path: Path, header: str, label: int) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3\n4,5,6\n")
    made = custom.folder(tmp_path)
    assert made.y.tolist() == [label + 1, label + 4]
    assert made.x[0].tolist() == [n for n in (1.0, 2.0, 3.0) if n != label + 1]


def test_a_csv_with_a_fraction_among_all_clients_labels_is_regression(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n2,3\n")
    assert custom.folder(tmp_path).task == "classification"
    (tmp_path / "b.csv").write_text("x,y\n1,0.5\n")
    made = custom.folder(tmp_path)
    assert (made.task, made.y.tolist()) == ("regression", [2.0, 3.0, 0.5])


def test_items_may_have_several_numbers_as_targets() -> None:
    data = [(np.zeros(2, np.float32), np.array([0.5, i])) for i in range(3)]
    made = custom.datasets([Counted(data[:2]), Counted(data[2:])])
    assert (made.task, made.y.tolist(), made.classes) == ("regression", [[0.5, 0.0], [0.5, 1.0], [0.5, 2.0]], 2)


def wrong_files(home: Path) -> dict[str, tuple[str, Any, str]]:
    """What is written under which name, and what is said of it."""
    return {
        "no header": ("a.csv", "1,2\n3,4\n", "the first line must name the columns"),
        "no archive": ("a.npz", b"PK", "not a readable .npz file"),
        "no tensors": ("a.safetensors", b"1234567890", "not a readable .safetensors file"),
        "no torch file": ("a.pt", b"1234567890", "not a readable file of tensors"),
        "other file": ("a.txt", "x", "no client's file in it; possible are .npz, .pt, .safetensors, .csv"),
    }


@pytest.mark.parametrize("case", sorted(wrong_files(Path())))
def test_a_wrong_file_is_named(tmp_path: Path, case: str) -> None:
    name, content, message = wrong_files(tmp_path)[case]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as refused:
        custom.folder(tmp_path)
    assert "\n" not in str(refused.value)


def test_files_without_x_and_y_and_clients_with_two_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", z=np.zeros(2))
    with pytest.raises(ValueError, match="must hold arrays x and y, or PFLlib's data; it has z"):
        custom.folder(tmp_path)
    torch.save({"x": torch.zeros(2, 1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.npz and a\.pt name the same client"):
        custom.folder(tmp_path)
    (tmp_path / "a.npz").unlink()
    with pytest.raises(ValueError, match="must hold tensors x and y; it has x"):
        custom.folder(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        custom.folder(tmp_path / "absent")


def test_settings_without_anything_to_act_on_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 1)), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"data\.label goes with \.csv and \.parquet files, and there are none"):
        custom.folder(tmp_path, label=["y"])
    with pytest.raises(ValueError, match=r"data\.image_size goes with folders of pictures, and these are none"):
        custom.folder(tmp_path, image_size=8)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
    with pytest.raises(ValueError, match=r"data\.image_size does not go with PFLlib's train/ and test/"):
        custom.open_folder(tmp_path, image_size=8)


def test_no_file_runs_code(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    torch.save({"x": Bomb(sign), "y": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="not a readable file of tensors"):
        custom.folder(tmp_path)
    (tmp_path / "a.pt").unlink()
    np.savez(tmp_path / "a.npz", x=np.array([Bomb(sign)], object), y=np.zeros(1))
    with pytest.raises(ValueError, match="it holds Python objects"):
        custom.folder(tmp_path)
    assert not sign.exists()


WRONG_TENSORS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "x: it is sparse, not an ordinary tensor"),
    "compressed rows": (lambda: torch.eye(3).to_sparse_csr(), "x: it is sparse, not an ordinary tensor"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.quint8),
        "x: it is quint8, not an ordinary tensor",
    ),
    "meta": (lambda: torch.zeros(3, 3, device="meta"), "x: it is float32, meta, not an ordinary tensor"),
    "complex": (lambda: torch.eye(3) * 1j, "x: it is complex64, not an ordinary tensor"),
    "repeated": (lambda: torch.zeros(1).expand(2**40), r"x: its shape \(1099511627776,\) repeats the few numbers"),
}


@pytest.mark.parametrize(("make", "told"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, on kinds of tensors it gives up
def test_a_tensor_that_is_no_row_of_numbers_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[], torch.Tensor], told: str
) -> None:
    torch.save({"x": make(), "y": torch.arange(3)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=told) as refused:
        custom.folder(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["npz", "pt", "safetensors", "csv"])
@pytest.mark.parametrize("label", [10**9, 10**6, 2**62])
def test_a_label_that_is_no_class_is_refused_before_there_are_so_many(tmp_path: Path, kind: str, label: int) -> None:
    x, y = np.ones((3, 2), np.float32), np.array([0, 1, label])
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, x=x, y=y)
    elif kind == "pt":
        torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    elif kind == "safetensors":
        save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, path)
    else:
        path.write_text("a,b,y\n" + "".join(f"1,1,{k}\n" for k in y))
    with pytest.raises(UserError, match=rf"{label} is no class: they are numbered from 0, and there may be 1,000,000"):
        custom.folder(tmp_path)


# In a recipe


def two_tensor_data_sets() -> list[TensorDataset]:
    return [TensorDataset(*numbers(20)), TensorDataset(*numbers(12, 100))]


def two_pairs() -> list[tuple[TensorDataset, TensorDataset]]:
    return [(TensorDataset(*numbers(20)), TensorDataset(*numbers(4, 50)))] * 2


def two_partitions() -> list[dict[str, Table]]:
    table = Table(x=[[1.0, 2.0]] * 8, y=[0, 1] * 4)
    return [{"train": table, "test": table}] * 2


def two_arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((8, 2), np.float32), np.arange(8) % 2


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("function", "rows", "test"),
    [("two_tensor_data_sets", 32, 0), ("two_pairs", 48, 8), ("two_partitions", 32, 16), ("two_arrays", 8, 0)],
)
def test_a_function_may_give_data_sets_partitions_or_arrays(function: str, rows: int, test: int) -> None:
    made = components.source(recipe_of(f"tests.data.test_custom:{function}"))
    assert len(made.y) == rows
    assert (0 if made.test is None else int(made.test.sum())) == test


def test_a_function_that_gives_something_else_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.dataset='tests\.data\.test_custom:nothing': gave NoneType"):
        components.source(recipe_of("tests.data.test_custom:nothing"))


def test_a_folder_runs_and_its_results_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "homes").mkdir()
    for name, (x, y) in {"anna": numbers(30), "ben": numbers(20, 7)}.items():
        torch.save({"x": x / 30, "y": y}, tmp_path / "homes" / f"{name}.pt")
    recipe = recipe_of("homes")
    assert recipe.data.dataset == "./homes"  # seen to be a folder, also from elsewhere
    result = experiment.run(recipe, out="out")
    assert [r["client"] for r in result["local"].clients] == [0, 1]
    back = experiment.Result.load("out")
    x = numbers(4)[0]
    assert torch.equal(back.client(1).predict(x), result.client(1).predict(x))
    (tmp_path / "homes" / "anna.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"data\.dataset='\./homes': homes.anna\.pt: not a readable"):
        components.source(recipe)


def test_a_recipe_says_how_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("p,kind,q\n1,walk,\n2,run,4\n")
    made = components.source(recipe_of(str(tmp_path), label="kind", missing="zero"))
    assert (made.x.tolist(), made.class_names) == ([[1, 0], [2, 4]], ("run", "walk"))
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a" / "cat").mkdir(parents=True)
    Image.new("L", (4, 4)).save(tmp_path / "a" / "cat" / "1.png")
    assert components.source(recipe_of(str(tmp_path), image_size=2)).x.shape == (1, 1, 2, 2)


def test_a_name_that_is_no_folder_is_refused_with_what_is_possible() -> None:
    with pytest.raises(UserError, match=r"no such data set; .* or a folder with a file per client"):
        recipe_of("nowhere")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        components.source(recipe_of("./nowhere"))


# A single client


def arrays_in(path: Path, n: int, start: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = numbers(n, start)
    np.savez(path, x=x.numpy(), y=y.numpy())


def test_files_of_one_client_stand_behind_one_another(tmp_path: Path) -> None:
    arrays_in(tmp_path / "ward" / "b.npz", 2, 10)
    arrays_in(tmp_path / "ward" / "a.npz", 3)
    made = custom.one_client(tmp_path / "ward")
    assert made.x[:, 0].tolist() == [0, 1, 2, 10, 11] and made.y.tolist() == [0, 1, 2, 1, 2]
    assert made.test is None and made.name == "ward"
    assert made.names == ("ward",) and made.clients is not None and set(made.clients.tolist()) == {0}


@pytest.mark.parametrize("nested", [False, True])
def test_train_and_test_of_one_client_are_its_two_parts(tmp_path: Path, nested: bool) -> None:
    for half, (n, start) in {"test": (2, 10), "train": (3, 0)}.items():
        arrays_in(tmp_path / half / "some.npz" if nested else tmp_path / f"{half}.npz", n, start)
    made = custom.one_client(tmp_path)
    assert made.test is not None
    assert made.x[~made.test, 0].tolist() == [0, 1, 2] and made.x[made.test, 0].tolist() == [10, 11]


def test_a_table_of_one_client_has_its_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("age,kind,ill\n30,a,yes\n40,b,no\n50,a,no\n")
    made = custom.one_client(tmp_path, label=("ill",))
    assert made.feature_names is not None and made.feature_names[0] == "age"
    assert made.class_names == ("no", "yes") and made.y.tolist() == [1, 0, 0]


def test_pictures_of_one_client_lie_in_a_folder_for_each_class(tmp_path: Path) -> None:
    for kind, value in (("cat", 10), ("dog", 200)):
        (tmp_path / kind).mkdir()
        Image.new("L", (4, 4), value).save(tmp_path / kind / "0.png")
    made = custom.one_client(tmp_path, image_size=2)
    assert made.class_names == ("cat", "dog") and made.x.shape == (2, 1, 2, 2)
    assert made.x.flatten(1)[:, 0].tolist() == [10, 200] and made.y.tolist() == [0, 1]


def test_half_of_a_division_of_one_client_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: no such folder"):
        custom.one_client(tmp_path / "gone")
    arrays_in(tmp_path / "train.npz", 3)
    with pytest.raises(UserError, match="has train alone; give train and test, or neither"):
        custom.one_client(tmp_path)
    arrays_in(tmp_path / "test.npz", 3)
    arrays_in(tmp_path / "more.npz", 3)
    with pytest.raises(UserError, match=r"more\.npz: beside train and test; put it into one of them"):
        custom.one_client(tmp_path)
