"""Meshes as text, seen from each rank, and how things are shared out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentscan.ir.errors import MeshError
from latentscan.ir.mesh import parse_mesh, shares


def test_a_mesh_is_read_and_written():
    mesh = parse_mesh("dp=2, tp=3")
    assert mesh.text() == "dp=2,tp=3"
    assert mesh.size == 6
    assert mesh.axis("cp").size == 1
    assert [(m.axis("dp").rank, m.axis("tp").rank) for m in mesh.everywhere()] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp", "cannot read 'tp'"),
        ("pp=2", "cannot read 'pp=2'"),
        ("tp=2,tp=2", "given twice"),
        ("tp=0", "size of tp is '0'"),
        ("tp=two", "size of tp is 'two'"),
        ("", "cannot read ''"),
    ],
)
def test_a_wrong_mesh_is_told(text, reason):
    with pytest.raises(MeshError, match=reason) as caught:
        parse_mesh(text)
    assert caught.value.remedy


def test_a_rank_that_is_not_there_is_told():
    with pytest.raises(MeshError, match="no rank 2 on tp"):
        parse_mesh("tp=2").at(tp=2)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4))
def test_shares_are_whole_and_differ_by_one_at_most(blocks, size, multiple):
    found = shares(blocks * multiple, size, multiple)
    assert sum(found) == blocks * multiple
    assert sorted(found, reverse=True) == found
    assert max(found) - min(found) in (0, multiple)


def test_what_is_no_multiple_is_not_shared():
    with pytest.raises(MeshError, match="7 is no multiple of 2"):
        shares(7, 2, 2)
