"""Softmax, from three passes over a row to a state that takes in keys block by block.

The softmax of scores s_1 ... s_N is p_i = e^(s_i - m) / l with l = sum_i e^(s_i - m). Any m gives
the same p; with the maximum nothing overflows. Attention is o = sum_i p_i v_i.
The functions below go from that definition to the recurrence of FlashAttention (arXiv:2205.14135,
section 3.1; the online softmax is Milakov and Gimelshein's, arXiv:1805.02867). ``v1/tiled.py`` runs
:func:`update`, and V1's Triton kernel is the same lines. ``v2/tiled.py`` and V2's kernel take
:func:`advance`'s step, but divide o by l only once, after the last key.

``exp`` is torch.exp, or torch.exp2 for scores that were multiplied by log2 e: 2^(s log2 e) = e^s.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Exp = Callable[[Tensor], Tensor]


def safe_softmax(s: Tensor, exp: Exp = torch.exp) -> Tensor:
    """Softmax over the last dimension in three passes over s: maximum, sum, quotient.

    The second pass needs the maximum of the whole row, the third the whole sum: a row must be read
    three times, or be kept. A row of -inf, which sees no key, is 0.
    """
    m = finite(s.amax(dim=-1, keepdim=True))  # pass 1
    l = exp(s - m).sum(dim=-1, keepdim=True)  # pass 2
    return exp(s - m) * inverse(l)  # pass 3


def online_softmax(s: Tensor, block: int = 1, exp: Exp = torch.exp) -> Tensor:
    """The same in two passes: maximum and sum are found together, ``block`` scores at a time.

    Let l = sum e^(s_i - m) over the scores seen so far. When the maximum rises to m', every term
    is off by the same factor: e^(s_i - m') = e^(s_i - m) e^(m - m'). So l' = e^(m - m') l + the
    new terms, and no earlier score is needed again.
    """
    m, l = s.new_full(s.shape[:-1], float("-inf")), s.new_zeros(s.shape[:-1])
    for part in s.split(block, dim=-1):  # pass 1
        m, l, _, _ = advance(m, l, part, exp)
    return exp(s - finite(m)[..., None]) * inverse(l)[..., None]  # pass 2


class State(NamedTuple):
    """What is known of rows of attention after some of their keys.

    m ``[..., R]``: the largest score, -inf before the first key; l ``[..., R]``: the sum of
    e^(s - m); o ``[..., R, D]``: attention over these keys alone, 0 before the first.
    """

    m: Tensor
    l: Tensor
    o: Tensor


def empty(rows: tuple[int, ...], head_dim: int, like: Tensor) -> State:
    """The state of no keys: m = -inf, l = 0, o = 0. Dtype and device are those of ``like``."""
    m = like.new_full(rows, float("-inf"))
    return State(m, torch.zeros_like(m), like.new_zeros((*rows, head_dim)))


def advance(
    m: Tensor, l: Tensor, s: Tensor, exp: Exp = torch.exp
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take scores s ``[..., R, C]`` into the statistics m, l ``[..., R]``.

    Returns the new m and l, p = e^(s - m) ``[..., R, C]``, and the factor e^(m_old - m)
    ``[..., R]`` by which everything summed before is to be multiplied.
    """
    m_new = torch.maximum(m, s.amax(dim=-1))
    shift = finite(m_new)
    p = exp(s - shift[..., None])
    factor = exp(m - shift)  # 0 before the first key
    return m_new, factor * l + p.sum(dim=-1), p, factor


def update(
    state: State, s: Tensor, v: Tensor, keep: Tensor | None = None, exp: Exp = torch.exp
) -> State:
    """One block step, lines 10 to 16 of Algorithm 2: the rows of ``state`` take in more keys.

    Multiplied by l, o is a sum over keys like l itself: l o = sum e^(s_i - m) v_i. It obeys the
    recurrence of l, and dividing by the new l gives

        o' = (e^(m - m') l o + sum_new e^(s_i - m') v_i) / l'.

    s ``[..., R, C]``, -inf where a row may not see a key; v ``[..., C, D]``; keep: a factor on each
    entry of P after it is summed into l (dropout: 0, or 1 / (1 - p)).
    """
    m, l, p, factor = advance(state.m, state.l, s, exp)
    if keep is not None:
        p = p * keep
    inv = inverse(l)
    carried = factor * state.l  # what the old sum is worth now
    return State(m, l, state.o * (carried * inv)[..., None] + (p * inv[..., None]) @ v)


def merge(a: State, b: State, exp: Exp = torch.exp) -> State:
    """The state of the keys of a and of b, which share none.

    The recurrence once more, with b's keys as one block whose own sums are known:
    l' = e^(m_a - m') l_a + e^(m_b - m') l_b, and o' is the mean of o_a and o_b weighted by these
    terms. Sums of terms on one scale: so merge is associative and commutative, :func:`empty` is
    its neutral element, and partial results of any split of the keys, computed anywhere, may be
    joined in any order (split-K decoding, ring and tree attention).
    """
    m = torch.maximum(a.m, b.m)
    shift = finite(m)
    la, lb = exp(a.m - shift) * a.l, exp(b.m - shift) * b.l
    inv = inverse(la + lb)
    return State(m, la + lb, a.o * (la * inv)[..., None] + b.o * (lb * inv)[..., None])


def finite(m: Tensor) -> Tensor:
    """m with 0 for rows that have seen no key: -inf - -inf would be NaN."""
    return torch.where(m == float("-inf"), 0.0, m)


def inverse(l: Tensor) -> Tensor:
    """1/l, and 0 for rows that have seen no key."""
    return 1.0 / torch.where(l == 0.0, float("inf"), l)
