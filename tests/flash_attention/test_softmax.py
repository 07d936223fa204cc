"""The softmax recurrences against exact rational arithmetic: any block split, any order.

Scores are integers and the exponential is 2^s, so that every weight is a rational number that
Python's fractions hold exactly; sums within float64's 53 bits must then be equal to the last bit.
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attention import softmax

NONE = float("-inf")  # the score of a key that the row may not see
scores = st.lists(st.integers(-20, 20) | st.just(NONE), min_size=1, max_size=24)
few = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def exact(row: list, values: list[int]) -> tuple[float, Fraction, Fraction]:
    """m, l and o of one row in rational arithmetic."""
    seen = [(s, v) for s, v in zip(row, values, strict=True) if s != NONE]
    if not seen:
        return NONE, Fraction(0), Fraction(0)
    m = max(s for s, _ in seen)
    weights = [Fraction(2) ** (s - m) for s, _ in seen]
    l = sum(weights)
    return m, l, sum(w * v for w, (_, v) in zip(weights, seen, strict=True)) / l


def parts(row: list, values: list[int], cuts: set[int]) -> list[tuple[Tensor, Tensor]]:
    """Scores ``[1, C]`` and values ``[C, 1]`` of each block between the cuts."""
    edges = [0, *sorted(c for c in cuts if 0 < c < len(row)), len(row)]
    s = torch.tensor([row], dtype=torch.float64)
    v = torch.tensor(values, dtype=torch.float64)[:, None]
    return [(s[:, a:b], v[a:b]) for a, b in itertools.pairwise(edges)]


def nothing(s: Tensor) -> softmax.State:
    return softmax.empty((1,), 1, s)


def assert_exact(state: softmax.State, row: list, values: list[int]) -> None:
    m, l, o = exact(row, values)
    assert state.m.item() == m
    assert state.l.item() == l
    error = abs(Fraction(state.o.item()) - o)
    assert error <= Fraction(64, 2**52) * max(map(abs, values))


@st.composite
def split_rows(draw):
    row = draw(scores)
    values = draw(st.lists(st.integers(-9, 9), min_size=len(row), max_size=len(row)))
    cuts = draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row)))
    return row, [*values[:-1], values[-1] or 1], {i for i, cut in enumerate(cuts) if cut}


@few
@given(case=split_rows(), shuffle=st.randoms())
def test_updates_in_any_blocks_and_any_order_are_exact(case, shuffle):
    row, values, cuts = case
    blocks = parts(row, values, cuts)
    shuffle.shuffle(blocks)
    state = nothing(blocks[0][0])
    for s, v in blocks:
        state = softmax.update(state, s, v, exp=torch.exp2)
    assert_exact(state, row, values)


@few
@given(case=split_rows(), shuffle=st.randoms())
def test_merging_partial_results_as_any_tree_is_exact(case, shuffle):
    row, values, cuts = case
    states = [softmax.update(nothing(s), s, v, exp=torch.exp2) for s, v in parts(row, values, cuts)]
    states += [nothing(states[0].m)] * shuffle.randrange(3)
    while len(states) > 1:
        a, b = (states.pop(shuffle.randrange(len(states))) for _ in range(2))
        states.append(softmax.merge(a, b, exp=torch.exp2))
    assert_exact(states[0], row, values)


@few
@given(row=scores, block=st.integers(1, 30))
def test_two_passes_and_three_give_the_exact_weights(row, block):
    _, l, _ = exact(row, [0] * len(row))
    m = max(row)
    want = [0 if s == NONE else float(Fraction(2) ** (s - m) / l) for s in row]
    s = torch.tensor(row, dtype=torch.float64)
    for got in (
        softmax.safe_softmax(s, exp=torch.exp2),
        softmax.online_softmax(s, block, exp=torch.exp2),
    ):
        assert got.tolist() == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([3e38, 3e38], [0.5, 0.5]),  # e^s overflows
        ([-3e38, -3e38, -3e38, -3e38], [0.25] * 4),  # all e^s are 0
        ([-3e38, 3e38], [0.0, 1.0]),
        ([3e38, -3e38, NONE], [1.0, 0.0, 0.0]),
        ([NONE, NONE], [0.0, 0.0]),
        ([NONE, 5.0], [0.0, 1.0]),
        ([0.0, math.log(3.0)], [0.25, 0.75]),
    ],
)
def test_extreme_scores(row, want, dtype):
    s = torch.tensor(row, dtype=dtype)
    v = torch.eye(len(row), dtype=dtype)  # o is then p
    state = softmax.empty((1,), len(row), s)
    merged = state
    for i in range(len(row)):
        piece = s[None, i : i + 1], v[i : i + 1]
        state = softmax.update(state, *piece)
        merged = softmax.merge(softmax.update(softmax.empty((1,), len(row), s), *piece), merged)
    for got in (
        softmax.safe_softmax(s),
        softmax.online_softmax(s),
        softmax.online_softmax(s, block=2),
        state.o[0],
        merged.o[0],
    ):
        assert got.tolist() == pytest.approx(want, rel=1e-6, abs=0)


def test_dropped_weights_leave_the_sum_and_count_in_the_output():
    s, v = (
        torch.zeros(1, 4, dtype=torch.float64),
        torch.tensor([[1.0], [2.0], [4.0], [8.0]]).double(),
    )
    keep = torch.tensor([[4.0, 0.0, 0.0, 4.0]]).double()  # of probability 3/4
    state = nothing(s)
    for i in (0, 2):
        block = slice(i, i + 2)
        state = softmax.update(state, s[:, block], v[block], keep[:, block])
    assert state.l.item() == 4
    assert state.o.item() == (4 * 1 + 4 * 8) / 4
