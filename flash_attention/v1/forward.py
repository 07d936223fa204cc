"""FlashAttention V1 forward: Algorithm 2 of the paper (arXiv:2205.14135) as a Triton kernel.

The loop order is V1's: K/V blocks outside, Q blocks inside; the running O, m and l of every row
live in HBM and are read and written once per K/V block.

Scores are in base 2 (times log2 e), because exp2 is the instruction a GPU has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attention import dropout, launch, segments, tiling
from flash_attention.tiles import (
    LOG2_E,
    advance,
    dropped,
    load_rows,
    load_segments,
    locate,
    rows_seeing,
    store_rows,
    visible,
)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, segment_ptr, span_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    batch_heads, heads, group, nq, nk, splits, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * H + head, split): every K/V block; Q blocks split, split + splits, ..."""
    head, split = locate(batch_heads)  # batch * H + head
    b, h = head // heads, head % heads
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + (h // group) * stride_kh
    v_ptr += b * stride_vb + (h // group) * stride_vh
    o_ptr += b * stride_ob + h * stride_oh
    m_ptr += head * nq
    l_ptr += head * nq
    segment_ptr += b * nq
    span_ptr += b * tl.cdiv(nk, BLOCK_KV) * 3
    seed = tl.load(seed_ptr) if DROPOUT else 0

    for c0 in range(0, nk, BLOCK_KV):  # line 5
        kj = load_rows(k_ptr, stride_kn, stride_kd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)  # line 6
        vj = load_rows(v_ptr, stride_vn, stride_vd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)
        first, full, full_stop, stop = rows_seeing(
            c0, nq, nk, span_ptr + c0 // BLOCK_KV * 3, BLOCK_Q, BLOCK_KV, CAUSAL, SEGMENTS
        )
        for part in tl.static_range(0, 3 if SEGMENTS else 2):
            begin = first if part == 0 else full if part == 1 else full_stop
            end = full if part == 0 else full_stop if part == 1 else stop
            begin += (split + splits - begin % splits) % splits  # this program's share
            for i in range(begin, end, splits):  # line 7
                _update_rows(
                    i * BLOCK_Q, c0, kj, vj, q_ptr, o_ptr, m_ptr, l_ptr, segment_ptr,
                    stride_qn, stride_qd, stride_on, stride_od,
                    head, nq, nk, scale, seed, keep_scale, threshold,
                    part != 1, CAUSAL, SEGMENTS, DROPOUT, HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_KV,
                    ACC, PRECISION,
                )  # fmt: skip
        # The next K/V block reads the O, m, l just written, perhaps by other threads of this
        # program: Triton orders a store before a later load only across a barrier.
        tl.debug_barrier()


@triton.jit
def _update_rows(
    r0, c0, kj, vj, q_ptr, o_ptr, m_ptr, l_ptr, segment_ptr,
    stride_qn, stride_qd, stride_on, stride_od,
    head, nq, nk, scale, seed, keep_scale, threshold,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inner loop's body: rows r0, ... take in the keys and values c0, ..."""
    rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
    inside = rows < nq
    qi = load_rows(q_ptr, stride_qn, stride_qd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)  # line 8
    oi = load_rows(o_ptr, stride_on, stride_od, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    m_old = tl.load(m_ptr + rows, mask=inside, other=float("-inf"))
    l_old = tl.load(l_ptr + rows, mask=inside, other=0.0)

    scale2 = scale * LOG2_E
    s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION, out_dtype=ACC)  # line 9, unscaled
    seen = True
    if MASKED:  # line 11
        seen = visible(
            rows[:, None], cols[None, :], nq, nk,
            load_segments(segment_ptr, rows, nq, SEGMENTS)[:, None],
            load_segments(segment_ptr, cols, nk, SEGMENTS)[None, :],
            CAUSAL, SEGMENTS,
        )  # fmt: skip
    m_new, l_new, p, factor = advance(m_old, l_old, s, seen, scale2, MASKED)  # lines 12, 13
    carried = factor * l_old  # what the old sum is worth now
    p = dropped(  # line 14
        p, seed, threshold, keep_scale, head, r0, c0, DROPOUT, BLOCK_Q, BLOCK_KV
    )
    inv = 1.0 / tl.where(l_new == 0.0, float("inf"), l_new)  # 0 for a row without keys
    pv = tl.dot(p.to(vj.dtype), vj, input_precision=PRECISION, out_dtype=ACC)
    oi = oi * (carried * inv)[:, None] + pv * inv[:, None]  # line 15
    store_rows(o_ptr, stride_on, stride_od, r0, nq, oi, BLOCK_Q, HEAD_DIM, BLOCK_D)
    tl.store(m_ptr + rows, m_new, mask=inside)  # line 16
    tl.store(l_ptr + rows, l_new, mask=inside)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    splits: int | None,
    blocks: tiling.Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel on the device of q.

    q ``[B, H, Nq, D]``; k, v ``[B, Hkv, Nk, D]``; any strides; scale not negative. splits: programs
    that share the Q blocks of one head (1 is the paper's grid; None: the wave-efficiency rule).

    Returns o like q, and m (base 2) and l ``[B, H, Nq]``. Scratch: o in float32;
    with segment_ids, three numbers per K/V block.
    """
    batch, heads, nq, _ = q.shape
    acc = torch.promote_types(q.dtype, torch.float32)
    # Line 2: O = 0, l = 0, m = -inf. O is kept in float32 however q is stored: it is rounded once
    # per K/V block, and half precision would lose what the online softmax gains.
    o = launch.seq_major(q, acc, fill=0.0)
    l = q.new_zeros((batch, heads, nq), dtype=acc)
    m = q.new_full((batch, heads, nq), float("-inf"), dtype=acc)

    row_blocks = triton.cdiv(nq, blocks.block_q)
    if splits is None:
        processors = launch.num_processors(q.device)
        splits = tiling.forward_splits(batch * heads, nq, blocks, processors)
    splits = min(splits, row_blocks)
    with launch.on_device(q):
        spans = None if segment_ids is None else segments.spans(segment_ids, blocks.block_kv)
        _forward_kernel[(batch * heads * splits,)](
            q, k, v, o, m, l, launch.or_dummy(segment_ids, q), launch.or_dummy(spans, q),
            launch.or_dummy(seed, q), *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            batch * heads, heads, heads // k.shape[1], nq, k.shape[2], splits,
            scale, dropout.keep_scale(dropout_p), dropout.threshold(dropout_p),
            **launch.constants(q, blocks, causal, dropout_p, segment_ids),
        )  # fmt: skip
    return launch.rounded(o, q), m, l
