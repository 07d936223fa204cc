"""What the Triton kernels share: loading and storing tiles, masks, which blocks meet, dropout.

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
def place(heads, blocks, at_a_time):
    """The (head, block) of this program of heads * blocks: first all blocks of the first at_a_time
    heads, block by block; then of the next. Few heads at a time keep their K and V in the L2 cache.
    """
    program = tl.program_id(0)
    first = program // (at_a_time * blocks) * at_a_time
    width = tl.minimum(at_a_time, heads - first)
    rest = program - first * blocks
    return (first + rest % width).to(tl.int64), rest // width


@triton.jit
def read_rows(
    source, b, h, start, n, stride_b, stride_h, stride_n, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """As load_rows, from head h of batch entry b of a [B, H, N, D] tensor: a pointer, or a
    descriptor (launch.descriptor) whose tiles a Hopper GPU copies without the threads' help."""
    if DESCRIPTORS:
        tile = source.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape(ROWS, BLOCK_D)
    else:
        base = source + b * stride_b + h * stride_h
        tile = load_rows(base, stride_n, stride_d, start, n, ROWS, HEAD_DIM, BLOCK_D)
    return tile


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
def visible_transposed(
    rows, cols, nq, nk, segment_ptr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr
):
    """:func:`visible` of a tile [Bc, Br], for rows [Br] and cols [Bc]."""
    return visible(
        rows[None, :], cols[:, None], nq, nk,
        load_segments(segment_ptr, rows, nq, SEGMENTS)[None, :],
        load_segments(segment_ptr, cols, nk, SEGMENTS)[:, None],
        CAUSAL, SEGMENTS,
    )  # fmt: skip


@triton.jit
def advance(m, l, s, seen, scale2, MASKED: tl.constexpr):
    """Take the unscaled scores s of a tile into the statistics m (base 2) and l of its rows:
    softmax.advance in Triton. -inf where a pair is not seen.

    Returns the new m and l, P, and the factor by which what was summed before is to be multiplied.
    """
    if MASKED:
        s = tl.where(seen, s * scale2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        shift = finite(m_new)
        p = tl.exp2(s - shift[:, None])
    else:
        # The scale is not negative, so it may wait until after the maximum: s * scale2 - m is one
        # fused multiply-add. What m was rounded by stays in P and l, and goes with their division;
        # beside an m above 2^28 (2^31), P may be more than float16 (float32) holds.
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale2)
        shift = finite(m_new)
        p = tl.exp2(s * scale2 - shift[:, None])
    factor = tl.exp2(m - shift)
    return m_new, l * factor + tl.sum(p, axis=1), p, factor


@triton.jit
def finite(m):
    """m with 0 for rows that have seen no key yet, or only scores of -inf (products may overflow):
    -inf - -inf would be NaN. softmax.finite in Triton."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def probabilities(s, lse, seen, scale2, MASKED: tl.constexpr):
    """P of a tile in backward, from the unscaled scores and the rows' log-sum-exp (base 2, infinite
    for a row that sees no key), which broadcasts to the tile; 0 where a pair is not seen.

    Scores that are computed again, in another order, differ in their last bit: P by a factor of up
    to about 2^(|s| 2^-23). Scores of a million leave P right to a tenth, scores of 1e8 do not."""
    if MASKED:
        p = tl.exp2(tl.where(seen, s * scale2, float("-inf")) - lse)
    else:
        p = tl.exp2(s * scale2 - lse)
    return p


@triton.jit
def load_segments(segments, positions, n, SEGMENTS: tl.constexpr):
    return tl.load(segments + positions, mask=positions < n, other=0) if SEGMENTS else positions


@triton.jit
def rows_seeing(
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
def keys_seen(
    r0, nq, nk, span_ptr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The blocks of keys that the rows r0, ... meet: (first, full, full_stop, stop), as
    rows_seeing.

    span_ptr: the rows' span (segments.py); rows and keys are the same tokens there.
    """
    first, full, full_stop = 0, 0, nk // BLOCK_KV
    stop = tl.cdiv(nk, BLOCK_KV)
    if CAUSAL:  # row r sees the keys up to r + nk - nq
        seen_by_first = tl.maximum(r0 + 1 + (nk - nq), 0)
        seen_by_last = tl.maximum(tl.minimum(r0 + BLOCK_Q, nq) + (nk - nq), 0)
        full_stop = tl.minimum(full_stop, seen_by_first // BLOCK_KV)
        stop = tl.minimum(stop, tl.cdiv(seen_by_last, BLOCK_KV))
    if SEGMENTS:
        first_key, stop_key = tl.load(span_ptr), tl.load(span_ptr + 1)
        one_segment = tl.load(span_ptr + 2) == 1
        first = first_key // BLOCK_KV
        stop = tl.minimum(stop, tl.cdiv(stop_key, BLOCK_KV))
        full = tl.where(one_segment, tl.cdiv(first_key, BLOCK_KV), stop)
        full_stop = tl.minimum(full_stop, stop_key // BLOCK_KV)
        full = tl.minimum(full, stop)
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


@triton.jit
def dropped(
    p, seed, threshold, keep_scale, head, r0, c0,
    DROPOUT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The tile [BLOCK_Q, BLOCK_KV] of P, or of its gradient, at (r0, c0) after dropout."""
    if DROPOUT:
        p = tl.where(keep(seed, threshold, head, r0, c0, BLOCK_Q, BLOCK_KV), p * keep_scale, 0.0)
    return p


@triton.jit
def both_dropped_transposed(
    pt, dpt, seed, threshold, keep_scale, head, r0, c0,
    DROPOUT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """As dropped, of P^T and of its gradient, which share the draw."""
    if DROPOUT:
        kept = tl.trans(keep(seed, threshold, head, r0, c0, BLOCK_Q, BLOCK_KV))
        pt = tl.where(kept, pt * keep_scale, 0.0)
        dpt = tl.where(kept, dpt * keep_scale, 0.0)
    return pt, dpt
