"""Clients' tables: columns by name, labels, categories and missing values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl.core.errors import UserError
from personafl.data import custom, tables
from personafl.data.columns import Column
from personafl.data.dataset import Source


def write(home: Path, **files: str) -> Path:
    """Each client's .csv file."""
    for name, text in files.items():
        (home / f"{name}.csv").write_text(text)
    return home


def refusal(home: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        custom.folder(home, **settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Columns by name


def test_columns_go_by_name_in_the_order_of_the_first_file(tmp_path: Path) -> None:
    made = custom.folder(write(tmp_path, a="p,label,q\n1,0,2\n", b="label,q,p\n1,4,3\n"))
    assert made.x.tolist() == [[1, 2], [3, 4]]
    assert made.y.tolist() == [0, 1]
    assert made.feature_names == ("p", "q")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("p,label\n1,0\n", "b.csv: no column 'q', which {0}/a.csv has; it has p, label"),
        ("p,q,r,label\n1,2,3,0\n", "b.csv: column 'r' is not in {0}/a.csv; it has p, q, label"),
        ("p,Q,label\n1,2,0\n", "b.csv: no column 'q', which {0}/a.csv has; it has p, Q, label"),
        ("p,q,q,label\n1,2,3,0\n", "b.csv: two columns are called 'q'"),
        (",p,q,label\n0,1,2,0\n", "b.csv: column 1 has no name (pandas writes its index so; to_csv(index=False)"),
    ],
)
def test_a_column_too_few_or_too_many_is_named_with_its_file(tmp_path: Path, second: str, message: str) -> None:
    write(tmp_path, a="p,q,label\n1,2,0\n", b=second)
    assert message.format(tmp_path) in refusal(tmp_path)


class CountedName(str):
    """The name of a column that counts how often it is compared with another."""

    __slots__ = ()
    __hash__ = str.__hash__
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def test_work_on_names_grows_with_the_number_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Genomic tables have 100,000 columns. Comparing all pairs of 1,000 names would take 500,000 comparisons."""
    names = [CountedName(f"gene{i}") for i in range(1000)]
    monkeypatch.setattr(CountedName, "comparisons", 0)
    tables._check_names(Path("a.csv"), names, "to_csv(index=False)")
    columns: dict[str, Any] = {n: np.zeros(2) for n in names}
    table = tables.Table(Path("a.csv"), columns, np.arange(2))
    (part,), columns_of_features = tables.encode([("a", table)], label=names[500:])
    assert part.x.shape == part.y.shape == (2, 500)
    assert columns_of_features == tuple(Column(n) for n in names[:500])
    assert CountedName.comparisons <= 10 * len(names)


def test_a_name_that_stands_twice_among_very_many_is_refused() -> None:
    names = [f"gene{i}" for i in range(100_000)]
    tables._check_names(Path("a.csv"), names, "")
    with pytest.raises(UserError, match=r"two columns are called 'gene7'"):
        tables._check_names(Path("a.csv"), [*names, "gene7"], "")


def test_a_message_names_some_of_very_many_columns(tmp_path: Path) -> None:
    names = [f"gene{i}" for i in range(1000)]
    header, row = ",".join([*names, "label"]), ",".join(["1"] * 1001)
    write(tmp_path, a=f"{header}\n{row}\n", b=f"{header.replace('gene7,', 'gene_seven,')}\n{row}\n")
    message = refusal(tmp_path)
    assert "no column 'gene7', which" in message
    assert message.endswith("gene49 and 951 more")


def test_the_label_is_found_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, a="kind,p,label\n1,2,0\n0,2,0\n")
    made = custom.folder(tmp_path, label=["kind"])
    assert (made.y.tolist(), made.feature_names) == ([1, 0], ("p", "label"))
    assert "a.csv: no column 'sort', which data.label names; it has kind, p, label" in refusal(tmp_path, label=["sort"])
    assert "no column is left beside the label's" in refusal(tmp_path, label=["kind", "p", "label"])


def test_the_last_column_is_the_label_only_where_all_files_end_with_it(tmp_path: Path) -> None:
    write(tmp_path, a="p,kind\n1,0\n", b="kind,p\n1,2\n")
    assert f"b.csv: no column is called label, y, target, and its last is 'p' while that of {tmp_path}/a.csv is " in (
        refusal(tmp_path)
    )
    assert custom.folder(tmp_path, label=["kind"]).y.tolist() == [0, 1]


# Labels


def test_labels_of_text_are_numbered_over_all_clients(tmp_path: Path) -> None:
    made = custom.folder(write(tmp_path, a="p,y\n1,walk\n2,run\n", b="p,y\n3,sit\n4,walk\n"))
    assert made.class_names == ("run", "sit", "walk")
    assert made.y.tolist() == [2, 0, 1, 2]
    assert (made.y.dtype, made.classes) == (torch.int64, 3)


def test_labels_that_are_not_whole_stay_as_they_are_for_the_source_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "__post_init__", lambda self: None)
    write(tmp_path, a="p,q,y\n1,9,0.5\n2,9,1\n", b="p,q,y\n3,9,-2\n4,9,3\n")
    one = custom.folder(tmp_path)
    assert (one.y.dtype, one.y.tolist(), one.class_names) == (torch.float32, [0.5, 1, -2, 3], None)
    two = custom.folder(tmp_path, label=["y", "p"])
    assert (two.y.dtype, two.y.tolist()) == (torch.float32, [[0.5, 1], [1, 2], [-2, 3], [3, 4]])


def test_fractions_and_several_columns_are_numbers_to_predict(tmp_path: Path) -> None:
    write(tmp_path, a="p,q,y\n1,2,0\n", b="p,q,y\n1,2,1\n1,2,0.5\n")
    made = custom.folder(tmp_path)
    assert (made.task, made.y.tolist()) == ("regression", [0, 1, 0.5])
    both = custom.folder(tmp_path, label=["y", "q"])
    assert (both.task, both.classes, both.y.tolist()) == ("regression", 2, [[0, 2], [1, 2], [0.5, 2]])
    write(tmp_path, b="p,q,y\n1,2,1\n1,2,-3\n")
    assert "label -3 of example 1 of client b is not in 0..1" in refusal(tmp_path)


def test_label_columns_of_text_or_without_a_value_are_refused(tmp_path: Path) -> None:
    write(tmp_path, a="p,q,y\n1,2,walk\n1,2,\n", b="p,q,y\n1,2,\n")
    where = f"{tmp_path}/a.csv, line 3, column y: the label is missing, one of 2 that are; take such rows out"
    assert where in refusal(tmp_path, missing="mean")
    write(tmp_path, a="p,q,y\n1,2,walk\n", b="p,q,y\n1,2,run\n")
    assert "column y holds text; several label columns must all hold numbers" in refusal(tmp_path, label=["q", "y"])
    write(tmp_path, b="p,q,y\n1,2,3\n")
    assert f"a.csv: column y holds text, but numbers in {tmp_path}/b.csv" in refusal(tmp_path)


# Categories


def test_columns_of_text_are_one_hot_over_the_categories_of_all_clients(tmp_path: Path) -> None:
    write(tmp_path, a="p,ward,y\n1,west,0\n2,east,1\n", b="ward,p,y\nnorth,3,0\n")
    made = custom.folder(tmp_path)
    assert made.feature_names == ("p", "ward=east", "ward=north", "ward=west")
    assert made.x.tolist() == [[1, 0, 0, 1], [2, 1, 0, 0], [3, 0, 1, 0]]


def test_a_column_of_numbers_and_text_is_no_column_of_categories(tmp_path: Path) -> None:
    write(tmp_path, a="p,y\n1,0\n \n1.2x,1\n3,0\n")
    assert f"{tmp_path}/a.csv, line 4, column p: '1.2x' is no number, but line 2 has 1; a column" in refusal(tmp_path)
    write(tmp_path, a="p,y\n1,0\n2,1\n", b="p,y\none,0\n")
    assert f"{tmp_path}/b.csv: column p holds text, but numbers in {tmp_path}/a.csv" in refusal(tmp_path)


def test_numbers_with_underscores_are_text(tmp_path: Path) -> None:
    made = custom.folder(write(tmp_path, a="p,y\n1_0,0\n2_0,1\n"))
    assert made.feature_names == ("p=1_0", "p=2_0")


def test_a_column_of_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_CATEGORIES", 2)
    write(tmp_path, a="who,y\nann,0\nbo,1\n", b="who,y\ncy,0\n")
    assert "column who holds text, 3 different values such as 'ann'; categories are 2 at most" in refusal(tmp_path)


def test_kinds_hold_over_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BLOCK", 2)
    write(tmp_path, a='p,ward,y\n1,,0\n,,1\n3,"a\nb",0\n4,c,1\n5,,0\n')
    found = tables.read_csv(tmp_path / "a.csv")
    assert found.columns["p"].tolist()[2:] == [3, 4, 5]
    assert found.columns["ward"].tolist() == [None, None, "a\nb", "c", None]
    assert found.lines.tolist() == [2, 3, 5, 6, 7]  # a row's last line
    write(tmp_path, a="p,y\n1,0\n2,1\n3,0\nx,1\n")
    assert "line 5, column p: 'x' is no number, but line 2 has 1" in refusal(tmp_path)


# Missing values

HOLES = {"a": "p,q,y\n1,,0\n2,6,1\n", "b": "p,q,y\n4,NaN,0\n,na,1\n6,9,1\n"}


def test_missing_values_are_refused_with_place_and_number(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, **HOLES))
    assert f"{tmp_path}/a.csv, line 2, column q: the value is missing, one of 4 that are; " in message
    assert "data.missing=mean or data.missing=zero fills them" in message
    only = refusal(write(tmp_path, a="p,q,y\n1,3,0\n", b="p,q,y\n4,5,0\nnan,2,1\n"))
    assert f"{tmp_path}/b.csv, line 3, column p: the value is missing, the only missing one" in only


def test_missing_values_are_filled_with_the_mean_of_all_clients_or_zero(tmp_path: Path) -> None:
    write(tmp_path, **HOLES)
    mean = custom.folder(tmp_path, missing="mean")
    p, q = (1 + 2 + 4 + 6) / 4, (6 + 9) / 2
    assert mean.x.tolist() == [[1, q], [2, 6], [4, q], [p, q], [6, 9]]
    zero = custom.folder(tmp_path, missing="zero")
    assert zero.x.tolist() == [[1, 0], [2, 6], [4, 0], [0, 0], [6, 9]]


def test_a_missing_category_is_none_of_them_or_each_by_its_share(tmp_path: Path) -> None:
    write(tmp_path, a="ward,y\nwest,0\neast,1\n", b="ward,y\n,0\neast,1\n", c="ward,y\n,1\n")
    unknown = [2, 4]
    assert custom.folder(tmp_path, missing="zero").x[unknown].tolist() == [[0, 0]] * 2
    shares = torch.tensor([2 / 3, 1 / 3])  # of east and west among three known
    assert torch.equal(custom.folder(tmp_path, missing="mean").x[unknown], shares.expand(2, 2))


def test_a_column_without_any_value_has_no_mean(tmp_path: Path) -> None:
    write(tmp_path, a="p,q,y\n1,,0\n", b="p,q,y\n1,,0\n")
    assert "feature q has no value in any example" in refusal(tmp_path, missing="mean")
    assert custom.folder(tmp_path, missing="zero").x.tolist() == [[1, 0]] * 2


def test_infinity_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, a="p,y\n1,0\n-inf,1\n")
    assert f"{tmp_path}/a.csv, line 3, column p: the value is infinite" in refusal(tmp_path, missing="mean")


# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2\n3,4\n", "a.csv: the first line must name the columns, two or more, separated by commas; it is '1,2'"),
        ("5.1,1e-3,iris\n", "the first line must name the columns"),
        ("a;b\n1;2\n", "separated by commas; it is 'a;b'"),
        ("", "separated by commas; it is empty"),
        ("x,y\n", "client a: no examples"),
        ("x,y\n1,2\n\n1,2,3\n", "a.csv, line 4: 3 cells, but there are 2 column names"),
        ("x,y\n1,2,3\n", "a.csv, line 2: 3 cells, but there are 2 column names"),
        ("x,y\n1\n", "a.csv, line 2: 1 cells, but there are 2 column names"),
        (b"\xff\xfe\x00", "a.csv: not a readable .csv file: it is not UTF-8 text"),
        ("x,y\n" + "a" * 140_000 + ",1\n", "a.csv: not a readable .csv file: field larger than field limit"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    assert message in refusal(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **settings: object) -> None:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, a="x,y\n1,2\n")
    monkeypatch.setattr(Path, "open", denied)
    assert f"{tmp_path}/a.csv: cannot be read: Permission denied" in refusal(tmp_path)


def test_files_of_a_client_may_be_empty_where_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "anna").mkdir()
    write(tmp_path / "anna", monday="p,y\n", tuesday="p,y\n1,walk\n", wednesday="y,p\nrun,2\n")
    made = custom.folder(tmp_path)
    assert (made.names, made.x.tolist(), made.class_names) == (("anna",), [[1], [2]], ("run", "walk"))


# Parquet


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert 'a.parquet: reading .parquet needs pyarrow: pip install "personafl[parquet]"' in refusal(tmp_path)


def parquet(path: Path, **columns: Any) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    from pyarrow import parquet as pq

    pq.write_table(pa.table(columns), path)


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    wards = pa.array(["west", None, "east"]).dictionary_encode()
    parquet(tmp_path / "a.parquet", p=[1, None, 3], ward=wards, ok=[True, False, True], y=["run", "walk", "run"])
    (tmp_path / "b.csv").write_text("y,ok,ward,p\nsit,1,north,2.5\n")
    made = custom.folder(tmp_path, missing="zero")
    assert made.feature_names == ("p", "ward=east", "ward=north", "ward=west", "ok")
    assert made.x.tolist() == [[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [3, 1, 0, 0, 1], [2.5, 0, 1, 0, 1]]
    assert (made.class_names, made.y.tolist()) == (("run", "sit", "walk"), [0, 2, 0, 1])
    assert f"{tmp_path}/a.parquet, row 2, column p: the value is missing, one of 2 that are" in refusal(tmp_path)


def test_a_parquet_file_that_is_no_table_of_numbers_and_text_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", p=[[1], [2]], y=[0, 1])
    assert "a.parquet: column p holds list<" in refusal(tmp_path)
    parquet(tmp_path / "a.parquet", y=[0, 1])
    assert "a.parquet: two columns or more are needed; it has y" in refusal(tmp_path)
    parquet(tmp_path / "a.parquet", p=[1], y=[0], __index_level_0__=[0])
    assert "column 3 has no name (pandas writes its index so; to_parquet(index=False) leaves it out)" in (
        refusal(tmp_path)
    )
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "a.parquet: not a readable .parquet file" in refusal(tmp_path)
