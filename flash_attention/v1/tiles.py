"""What the forward and backward kernels share: loading tiles, masking scores, dropout.

Offsets are int64 wherever a position is multiplied by a stride: 2^31 elements are reached by
tensors that fit on one GPU.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, stride_n, stride_d, rows, dims, n, HEAD_DIM: tl.constexpr):
    """Rows of a [N, D] matrix as a tile [R, BLOCK_D]; 0 beyond N and D."""
    pointers = base + rows[:, None].to(tl.int64) * stride_n + dims[None, :].to(tl.int64) * stride_d
    inside = (rows[:, None] < n) & (dims[None, :] < HEAD_DIM)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_rows(base, stride_n, stride_d, rows, dims, n, tile, HEAD_DIM: tl.constexpr):
    """The tile [R, BLOCK_D] into the rows of a [N, D] matrix, nothing beyond N and D."""
    pointers = base + rows[:, None].to(tl.int64) * stride_n + dims[None, :].to(tl.int64) * stride_d
    inside = (rows[:, None] < n) & (dims[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(base, stride_n, stride_d, rows, dims, n, tile, HEAD_DIM: tl.constexpr):
    """As store_rows, adding atomically: for rows that several programs share."""
    pointers = base + rows[:, None].to(tl.int64) * stride_n + dims[None, :].to(tl.int64) * stride_d
    inside = (rows[:, None] < n) & (dims[None, :] < HEAD_DIM)
    tl.atomic_add(pointers, tile.to(base.dtype.element_ty), mask=inside, sem="relaxed")


@triton.jit
def scores(
    qi,
    kj,
    rows,
    cols,
    nq,
    nk,
    segments,
    scale,
    CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S of one tile [Br, Bc] in ACC; -inf where the row may not see the key."""
    s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION, out_dtype=ACC) * scale
    seen = (rows[:, None] < nq) & (cols[None, :] < nk)
    if CAUSAL:  # bottom-right: the last query sees the last key
        seen = seen & (cols[None, :] <= rows[:, None] + (nk - nq))
    if SEGMENTS:
        row_segment = tl.load(segments + rows, mask=rows < nq, other=0)
        col_segment = tl.load(segments + cols, mask=cols < nk, other=0)
        seen = seen & (row_segment[:, None] == col_segment[None, :])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def keep(seed, threshold, head, rows, cols):
    """True where dropout keeps an entry of P: flash_attention/dropout.py in Triton."""
    c0 = tl.broadcast_to(rows[:, None], (rows.shape[0], cols.shape[0])).to(tl.int32)
    c1 = tl.broadcast_to(cols[None, :], (rows.shape[0], cols.shape[0])).to(tl.int32)
    c2 = tl.full(c0.shape, 0, tl.int32) + head.to(tl.int32)
    bits, _, _, _ = tl.philox(seed, c0, c1, c2, tl.full(c0.shape, 0, tl.int32))
    return bits.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold
