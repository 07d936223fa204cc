"""Bytes that attention reads from and writes to HBM, counted load by load, and what follows.

The model is the paper's (arXiv:2205.14135, section 3.2): a memory off the chip, and on the chip
nothing that outlives a block step. A cache between the two, as every GPU has, is not in it; what
that changes is for the counters of a GPU to say (``scripts/io_complexity.py``).

:func:`naive_forward` and :func:`naive_backward` count the operations of ``naive.py``,
:func:`flash_forward` and :func:`flash_backward` the loads and stores of ``v1/forward.py`` and
``v1/backward.py``, :func:`flash_v2_forward` and :func:`flash_v2_backward` those of ``v2/``.
:func:`standard_elements` and :func:`flash_elements` are the theorem's orders. Without dropout,
segments and rows that see no key.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from flash_attention.gpus import Gpu

SUM = 4  # bytes of a sum, statistic or accumulator: float32


@dataclass(frozen=True)
class Shape:
    """One call of attention: q ``[batch, heads, nq, head_dim]``, k and v ``[batch, kv_heads, nk,
    head_dim]``, each element of ``element_size`` bytes."""

    batch: int
    heads: int
    nq: int
    nk: int
    head_dim: int
    kv_heads: int | None = None  # None: as many as heads
    element_size: int = 2
    causal: bool = False

    @property
    def kv(self) -> int:
        """K/V heads of the whole batch."""
        return self.batch * (self.kv_heads or self.heads)

    @property
    def rows(self) -> int:
        """Rows of Q, of all heads."""
        return self.batch * self.heads * self.nq

    @property
    def q(self) -> int:
        """Bytes of Q: also of O and dO, dQ as they are returned."""
        return self.rows * self.head_dim * self.element_size

    @property
    def k(self) -> int:
        """Bytes of K: also of V, dK and dV."""
        return self.kv * self.nk * self.head_dim * self.element_size

    @property
    def scores(self) -> int:
        """Entries of S."""
        return self.rows * self.nk


class Access(NamedTuple):
    """Bytes of one tensor that one kernel reads and writes."""

    kernel: str
    tensor: str
    read: int
    written: int


def traffic(accesses: list[Access], kernel: str | None = None) -> tuple[int, int]:
    """Bytes read and bytes written, of one kernel or of all."""
    those = [a for a in accesses if kernel in (None, a.kernel)]
    return sum(a.read for a in those), sum(a.written for a in those)


# Standard attention ------------------------------------------------------------------------------


def standard_forward(shape: Shape) -> list[Access]:
    """Algorithm 0 of the paper: S written, read, P written, read. 4 N d + 4 N^2 elements a head."""
    s = shape.scores * shape.element_size
    return [
        Access("S = Q K^T", "Q", shape.q, 0),
        Access("S = Q K^T", "K", shape.k, 0),
        Access("S = Q K^T", "S", 0, s),
        Access("P = softmax(S)", "S", s, 0),
        Access("P = softmax(S)", "P", 0, s),
        Access("O = P V", "P", s, 0),
        Access("O = P V", "V", shape.k, 0),
        Access("O = P V", "O", 0, shape.q),
    ]


def standard_backward(shape: Shape) -> list[Access]:
    """Algorithm 3 of the paper, with P kept by the forward: 8 N d + 7 N^2 elements a head."""
    s = shape.scores * shape.element_size
    return [
        Access("dV = P^T dO", "P", s, 0),
        Access("dV = P^T dO", "dO", shape.q, 0),
        Access("dV = P^T dO", "dV", 0, shape.k),
        Access("dP = dO V^T", "dO", shape.q, 0),
        Access("dP = dO V^T", "V", shape.k, 0),
        Access("dP = dO V^T", "dP", 0, s),
        Access("dS = P o (dP - D)", "P", s, 0),
        Access("dS = P o (dP - D)", "dP", s, 0),
        Access("dS = P o (dP - D)", "dS", 0, s),
        Access("dQ = dS K", "dS", s, 0),
        Access("dQ = dS K", "K", shape.k, 0),
        Access("dQ = dS K", "dQ", 0, shape.q),
        Access("dK = dS^T Q", "dS", s, 0),
        Access("dK = dS^T Q", "Q", shape.q, 0),
        Access("dK = dS^T Q", "dK", 0, shape.k),
    ]


def naive_forward(shape: Shape) -> list[Access]:
    """The operations of ``naive.py`` as PyTorch runs them: each reads its operands and writes its
    result once. Beside the paper's three there are the scale, the mask, and the softmax in float32,
    to and from which bfloat16 is converted by operations of their own.

    Raises:
        ValueError: query heads share K/V heads, which ``naive.py`` copies: the copies are not
            counted.
    """
    _check_no_copies(shape)
    s, wide = shape.scores * shape.element_size, shape.scores * SUM
    steps = [
        Access("S = Q K^T", "Q, K", shape.q + shape.k, 0),
        Access("S = Q K^T", "S", 0, s),
        Access("scale", "S", s, s),
    ]
    if shape.causal:  # a copy, then -inf where the mask says
        steps += [Access("copy", "S", s, s), _mask(shape), Access("mask", "S", s, s)]
    half = shape.element_size < SUM
    return [
        *steps,
        *([Access("widen", "S", s, wide)] if half else []),
        Access("P = softmax(S)", "S, P, float32", wide, wide),
        *([Access("round", "P", wide, s)] if half else []),
        Access("O = P V", "P, V", s + shape.k, 0),
        Access("O = P V", "O", 0, shape.q),
    ]


def naive_backward(shape: Shape) -> list[Access]:
    """What autograd runs for ``naive.py``, counted and refused like :func:`naive_forward`.

    On CUDA the gradient of the softmax, one operation here, first writes P o dP as a tensor of its
    own: two float32 reads and a write more than are counted (``results/README.md``).
    """
    _check_no_copies(shape)
    s, wide = shape.scores * shape.element_size, shape.scores * SUM
    steps = [
        Access("dV = P^T dO", "P, dO", s + shape.q, 0),
        Access("dV = P^T dO", "dV", 0, shape.k),
        Access("dP = dO V^T", "dO, V", shape.q + shape.k, 0),
        Access("dP = dO V^T", "dP", 0, s),
    ]
    if shape.element_size < SUM:
        steps.append(Access("widen", "dP", s, wide))
    steps.append(Access("dS = P o (dP - D)", "P, dP, dS, float32", 2 * wide, wide))
    if shape.element_size < SUM:
        steps.append(Access("round", "dS", wide, s))
    if shape.causal:
        steps += [Access("copy", "dS", s, s), _mask(shape), Access("mask", "dS", s, s)]
    return [
        *steps,
        Access("scale", "dS", s, s),
        Access("dQ = dS K", "dS, K", s + shape.k, 0),
        Access("dQ = dS K", "dQ", 0, shape.q),
        Access("dK = dS^T Q", "dS, Q", s + shape.q, 0),
        Access("dK = dS^T Q", "dK", 0, shape.k),
    ]


def _check_no_copies(shape: Shape) -> None:
    if shape.kv_heads not in (None, shape.heads):
        raise ValueError(
            f"kv_heads={shape.kv_heads} with heads={shape.heads} is not counted for naive "
            "attention; give as many as heads, or None"
        )


def _mask(shape: Shape) -> Access:
    """One N x N mask of bytes, for all heads."""
    return Access("mask", "mask", shape.nq * shape.nk, 0)


# FlashAttention V1 -------------------------------------------------------------------------------


def row_blocks(shape: Shape, block_q: int, block_kv: int) -> list[range]:
    """For each K/V block of the outer loop, the Q blocks that the inner loop walks. Causal: those
    from the first row that sees one of the keys."""
    stop = math.ceil(shape.nq / block_q)
    first = [
        max(0, c0 - (shape.nk - shape.nq)) // block_q if shape.causal else 0
        for c0 in range(0, shape.nk, block_kv)
    ]
    return [range(min(f, stop), stop) for f in first]


def row_visits(shape: Shape, block_q: int, block_kv: int) -> int:
    """How many times the inner loop loads a row, of all heads together."""
    visited = sum(
        max(0, shape.nq - blocks.start * block_q) for blocks in row_blocks(shape, block_q, block_kv)
    )
    return shape.batch * shape.heads * visited


def flash_forward(shape: Shape, block_q: int, block_kv: int, splits: int = 1) -> list[Access]:
    """Algorithm 2 as ``v1/forward.py`` runs it. ``splits`` programs share the rows of one head, and
    each loads every K/V block."""
    splits = min(splits, math.ceil(shape.nq / block_q))
    visits = row_visits(shape, block_q, block_kv)
    qi, oi = visits * shape.head_dim * shape.element_size, visits * shape.head_dim * SUM
    statistics = visits * 2 * SUM
    o = shape.rows * shape.head_dim * SUM
    # Each query head reads its K/V head by itself.
    kv = 2 * shape.batch * shape.heads * shape.nk * shape.head_dim * shape.element_size
    kernel = "_forward_kernel"
    return [
        Access("init", "O, m, l", 0, o + shape.rows * 2 * SUM),  # line 2
        Access(kernel, "K, V", splits * kv, 0),  # line 6
        Access(kernel, "Q", qi, 0),  # line 8
        Access(kernel, "O", oi, oi),  # lines 8 and 15
        Access(kernel, "m, l", statistics, statistics),  # lines 8 and 16
        *([Access("round", "O", o, shape.q)] if shape.element_size < SUM else []),
    ]


def flash_backward(shape: Shape, block_q: int, block_kv: int, splits: int = 2) -> list[Access]:
    """Algorithm 4 as ``v1/backward.py`` runs it. A dQ that is added atomically (splits > 1) is read
    and written too, by the memory's own adders; with one split, by the kernel."""
    splits = min(splits, math.ceil(shape.nk / block_kv))
    visits = row_visits(shape, block_q, block_kv)
    row = visits * shape.head_dim
    dq = shape.rows * shape.head_dim * SUM
    adds = "dQ, atomic" if splits > 1 else "dQ"
    kernel = "_backward_kernel"
    return [
        Access("init", "dQ", 0, dq),  # line 5
        Access("_delta_kernel", "O, dO", 2 * shape.q, shape.q),  # line 19
        Access("_delta_kernel", "m, l, L, D", 2 * shape.rows * SUM, 2 * shape.rows * SUM),
        Access(kernel, "K, V", 2 * shape.k, 0),  # line 8
        Access(kernel, "Q, dO", 2 * row * shape.element_size, 0),  # line 10 to 12
        Access(kernel, "L, D", visits * 2 * SUM, 0),
        Access(kernel, adds, row * SUM, row * SUM),  # line 21
        Access(kernel, "dK, dV", 0, 2 * shape.k),  # line 24
        Access("round", "dQ", dq, shape.q),  # and times the scale
    ]


# FlashAttention V2 -------------------------------------------------------------------------------


def key_visits(shape: Shape, block_q: int, block_kv: int) -> int:
    """How many times a key is loaded where each Q block walks the K/V blocks that its rows see (the
    tiles of :func:`row_blocks`), of all query heads together."""
    blocks = row_blocks(shape, block_q, block_kv)
    visited = sum(
        len(walked) * min(block_kv, shape.nk - j * block_kv) for j, walked in enumerate(blocks)
    )
    return shape.batch * shape.heads * visited


def flash_v2_forward(shape: Shape, block_q: int, block_kv: int) -> list[Access]:
    """Algorithm 1 of arXiv:2307.08691 as ``v2/forward.py`` runs it: Q blocks outside. O, m and l
    stay on the chip and are written once, O as it is returned."""
    kv = 2 * key_visits(shape, block_q, block_kv) * shape.head_dim * shape.element_size
    kernel = "_forward_kernel"
    return [
        Access(kernel, "Q", shape.q, 0),  # line 4
        Access(kernel, "K, V", kv, 0),  # line 7
        Access(kernel, "O", 0, shape.q),  # line 14
        Access(kernel, "m, l", 0, shape.rows * 2 * SUM),  # line 15, in place of log-sum-exp
    ]


def flash_v2_backward(
    shape: Shape, block_q: int, block_kv: int, dq_block_q: int, dq_block_kv: int
) -> list[Access]:
    """Algorithm 2 of arXiv:2307.08691 as ``v2/backward.py`` runs it: dK and dV with the K/V blocks
    outside, and in place of adding to dQ in memory a kernel for it, with blocks of its own and the
    Q blocks outside."""
    visits = row_visits(shape, block_q, block_kv)
    kv = 2 * key_visits(shape, dq_block_q, dq_block_kv) * shape.head_dim * shape.element_size
    kernel, dq_kernel = "_dk_dv_kernel", "_dq_kernel"
    return [
        Access("_delta_kernel", "O, dO", 2 * shape.q, shape.q),  # line 4
        Access("_delta_kernel", "m, l, L, D", 2 * shape.rows * SUM, 2 * shape.rows * SUM),
        Access(kernel, "K, V", 2 * shape.k, 0),  # line 6
        Access(kernel, "Q, dO", 2 * visits * shape.head_dim * shape.element_size, 0),  # line 9
        Access(kernel, "L, D", visits * 2 * SUM, 0),
        Access(kernel, "dK, dV", 0, 2 * shape.k),  # line 18
        Access(dq_kernel, "Q, dO", 2 * shape.q, 0),
        Access(dq_kernel, "L, D", shape.rows * 2 * SUM, 0),
        Access(dq_kernel, "K, V", kv, 0),
        Access(dq_kernel, "dQ", 0, shape.q),
    ]


# Orders, FLOPs and the roofline ------------------------------------------------------------------


def standard_elements(n: int, head_dim: int) -> float:
    """Theorem 2: standard attention moves Theta(N d + N^2) elements a head."""
    return n * head_dim + n**2


def flash_elements(n: int, head_dim: int, on_chip_elements: int) -> float:
    """Theorem 2: FlashAttention moves Theta(N^2 d^2 / M) elements a head, d <= M <= N d.

    Q and O pass once per K/V block, and there are N / Bc = 4 N d / M of these: 4 N d / M times
    N d elements. Larger M: fewer passes. Smaller d counts twice: a narrower row, and more keys in
    a block.
    """
    return n**2 * head_dim**2 / on_chip_elements


def naive_flops(shape: Shape, backward: bool = False) -> int:
    """Of the matrix products: 2 of 2 N^2 d FLOPs, backward 4. A mask saves nothing here."""
    return (4 if backward else 2) * 2 * shape.scores * shape.head_dim


def flash_flops(shape: Shape, block_q: int, block_kv: int, backward: bool = False) -> int:
    """Of the tiles' matrix products, whole tiles counted: 2 products, V1's backward 5, since S is
    computed again. A causal mask leaves out the tiles above the diagonal."""
    return (5 if backward else 2) * _product_flops(shape, block_q, block_kv)


def flash_v2_backward_flops(
    shape: Shape, block_q: int, block_kv: int, dq_block_q: int, dq_block_kv: int
) -> int:
    """As :func:`flash_flops`, which is V2's forward too: S, dP, dV and dK in the one kernel, S and
    dP again and dQ in the other."""
    dk_dv = 4 * _product_flops(shape, block_q, block_kv)
    return dk_dv + 3 * _product_flops(shape, dq_block_q, dq_block_kv)


def _product_flops(shape: Shape, block_q: int, block_kv: int) -> int:
    """Of one product of every tile."""
    tiles = sum(map(len, row_blocks(shape, block_q, block_kv)))
    return 2 * shape.batch * shape.heads * tiles * block_q * block_kv * shape.head_dim


class Roofline(NamedTuple):
    """Where a kernel stands. intensity and ridge in FLOP/byte; seconds: the least it can take."""

    intensity: float
    ridge: float  # the intensity at which memory and products take equally long
    bound: str  # "memory" or "compute"
    attainable: float  # FLOP/s
    seconds: float


def roofline(flops: float, moved_bytes: float, gpu: Gpu) -> Roofline:
    """The roofline model: products and memory at their peak rates, each hidden behind the other."""
    intensity, ridge = flops / moved_bytes, gpu.flops / gpu.bandwidth
    attainable = min(gpu.flops, intensity * gpu.bandwidth)
    bound = "memory" if intensity < ridge else "compute"
    return Roofline(intensity, ridge, bound, attainable, flops / attainable)
