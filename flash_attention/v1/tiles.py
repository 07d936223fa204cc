"""What the forward and backward kernels share: loading and storing tiles, masks, dropout.

Positions are int64 wherever they are multiplied by a stride: 2^31 elements are reached by tensors
that fit on one GPU.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(heads):
    """The (head, share) of this program: a grid of one dimension, as the others end at 65,535.
    Heads come first, so that in a causal backward the long K/V blocks of all heads start first."""
    program = tl.program_id(0)
    return (program % heads).to(tl.int64), program // heads


@triton.jit
def _pointers(base, stride_n, stride_d, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, dims = start + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    return base + rows[:, None].to(tl.int64) * stride_n + dims[None, :].to(tl.int64) * stride_d


@triton.jit
def _inside(start, n, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    inside = (start + tl.arange(0, ROWS) < n)[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    return inside


@triton.jit
def load_rows(
    base, stride_n, stride_d, start, n,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows start, start + 1, ... of a [N, D] matrix as a tile [ROWS, BLOCK_D]; 0 beyond N and D."""
    return tl.load(
        _pointers(base, stride_n, stride_d, start, ROWS, BLOCK_D),
        mask=_inside(start, n, ROWS, HEAD_DIM, BLOCK_D),
        other=0.0,
    )


@triton.jit
def store_rows(
    base, stride_n, stride_d, start, n, tile,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tile [ROWS, BLOCK_D] into rows of a [N, D] matrix, nothing beyond N and D."""
    tl.store(
        _pointers(base, stride_n, stride_d, start, ROWS, BLOCK_D),
        tile.to(base.dtype.element_ty),
        mask=_inside(start, n, ROWS, HEAD_DIM, BLOCK_D),
    )


@triton.jit
def add_rows(
    base, stride_n, stride_d, start, n, tile,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """As store_rows, adding atomically: for rows that several programs share."""
    tl.atomic_add(
        _pointers(base, stride_n, stride_d, start, ROWS, BLOCK_D),
        tile.to(base.dtype.element_ty),
        mask=_inside(start, n, ROWS, HEAD_DIM, BLOCK_D),
        sem="relaxed",
    )


@triton.jit
def visible(
    rows, cols, nq, nk, row_segments, col_segments, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr
):
    """Which pairs may attend, for rows and cols (and their segments) that broadcast to the tile."""
    seen = (rows < nq) & (cols < nk)
    if CAUSAL:  # bottom-right: the last query sees the last key
        seen = seen & (cols <= rows + (nk - nq))
    if SEGMENTS:
        seen = seen & (row_segments == col_segments)
    return seen


@triton.jit
def load_segments(segments, positions, n, SEGMENTS: tl.constexpr):
    return tl.load(segments + positions, mask=positions < n, other=0) if SEGMENTS else positions


@triton.jit
def row_blocks(
    c0, nq, nk, span_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The blocks of rows that meet the keys c0, ...: (first, full, full_stop, stop).

    No row outside [first, stop) sees one of the keys; every row of [full, full_stop) sees them all
    and needs no mask. span_ptr: the keys' span, see segments.py.
    """
    first, full, stop = 0, 0, tl.cdiv(nq, BLOCK_Q)
    full_stop = stop
    if CAUSAL:
        first = tl.maximum(0, c0 - (nk - nq)) // BLOCK_Q
        full = tl.cdiv(tl.maximum(0, c0 + BLOCK_KV - 1 - (nk - nq)), BLOCK_Q)
    if SEGMENTS:
        first_row, stop_row = tl.load(span_ptr), tl.load(span_ptr + 1)
        one_segment = tl.load(span_ptr + 2) == 1
        first = tl.maximum(first, first_row // BLOCK_Q)
        stop = tl.cdiv(stop_row, BLOCK_Q)
        full = tl.where(one_segment, tl.maximum(full, tl.cdiv(first_row, BLOCK_Q)), stop)
        full_stop = stop_row // BLOCK_Q
    full = tl.minimum(tl.where(c0 + BLOCK_KV > nk, stop, full), stop)
    return first, full, tl.maximum(full, full_stop), stop


@triton.jit
def keep(seed, threshold, head, r0, c0, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    """True where dropout keeps an entry of the tile [BLOCK_Q, BLOCK_KV] of P at (r0, c0):
    flash_attention/dropout.py in Triton."""
    rows, groups = r0 + tl.arange(0, BLOCK_Q), c0 // 8 + tl.arange(0, BLOCK_KV // 8)
    zeros = rows[:, None] * 0 + groups[None, :] * 0
    w0, w1, w2, w3 = tl.philox(
        seed, zeros + rows[:, None], zeros + groups[None, :], zeros + head.to(tl.int32), zeros
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).to(tl.uint32, bitcast=True)
    words = tl.reshape(words, (BLOCK_Q, BLOCK_KV // 2))  # in the order 0, 1, 2, 3
    kept = tl.join((words & 0xFFFF) >= threshold, (words >> 16) >= threshold)
    return tl.reshape(kept, (BLOCK_Q, BLOCK_KV))
