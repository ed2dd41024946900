"""Columns of tables as features."""

from __future__ import annotations

from personafl.data.columns import Column, feature_places, name_features, unite_columns, unknown_category

AGE, WARD = Column("age"), Column("ward", ("a", "b"))


def test_features_have_their_place_among_those_of_all() -> None:
    mine = (Column("ward", ("b", "d")), Column("age"))
    agreed = unite_columns([(AGE, WARD), mine])
    assert agreed == (Column("age"), Column("ward", ("a", "b", "d")))
    assert tuple(name_features(agreed)) == ("age", "ward=a", "ward=b", "ward=d")
    assert feature_places(mine, agreed) == [2, 3, 0]


def test_a_category_that_others_do_not_have_is_found() -> None:
    assert unknown_category((Column("ward", ("b",)), AGE), (AGE, WARD)) is None
    assert unknown_category((AGE, Column("ward", ("b", "c"))), (AGE, WARD)) == ("ward", "c")
