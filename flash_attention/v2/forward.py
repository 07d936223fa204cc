"""FlashAttention-2 forward (Algorithm 1 of arXiv:2307.08691) as a Triton kernel.

The loop order is V1's turned round: Q blocks outside, one program each, K/V blocks inside. O, m and
l of a row stay in registers until its last key, and O is divided by l once, at the end.

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
    keys_seen,
    load_rows,
    load_segments,
    place,
    read_rows,
    store_rows,
    visible,
)


@triton.jit
def _forward_kernel(
    q_ptr, k_src, v_src, o_ptr, m_ptr, l_ptr, segment_ptr, span_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on, stride_od,
    batch_heads, heads, group, nq, nk, at_a_time, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * H + head, Q block): the last rows, which see most keys, start first.

    k_src, v_src: pointers, or with DESCRIPTORS tensor maps.
    """
    row_blocks = tl.cdiv(nq, BLOCK_Q)
    head, i = place(batch_heads, row_blocks, at_a_time)  # batch * H + head
    i = row_blocks - 1 - i
    b, h = head // heads, head % heads
    r0 = i * BLOCK_Q
    rows = r0 + tl.arange(0, BLOCK_Q)
    segment_ptr += b * nq
    span_ptr += (b * row_blocks + i) * 3
    seed = tl.load(seed_ptr) if DROPOUT else 0

    q_ptr += b * stride_qb + h * stride_qh
    qi = load_rows(q_ptr, stride_qn, stride_qd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    row_segments = load_segments(segment_ptr, rows, nq, SEGMENTS)
    o = tl.zeros((BLOCK_Q, BLOCK_D), dtype=ACC)
    m = tl.full((BLOCK_Q,), float("-inf"), dtype=ACC)
    l = tl.zeros((BLOCK_Q,), dtype=ACC)
    first, full, full_stop, stop = keys_seen(
        r0, nq, nk, span_ptr, BLOCK_Q, BLOCK_KV, CAUSAL, SEGMENTS
    )
    # Two loops, so that the longer one carries no mask; with segments a third one before them.
    for part in tl.static_range(0 if SEGMENTS else 1, 3):
        begin = first if part == 0 else full if part == 1 else full_stop
        end = full if part == 0 else full_stop if part == 1 else stop
        for j in range(begin, end):
            o, m, l = _take_in(
                r0, j * BLOCK_KV, qi, o, m, l, k_src, v_src, row_segments, segment_ptr,
                b, h // group, stride_kb, stride_kh, stride_kn, stride_kd,
                stride_vb, stride_vh, stride_vn, stride_vd,
                head, nq, nk, scale, seed, keep_scale, threshold,
                part != 1, CAUSAL, SEGMENTS, DROPOUT, DESCRIPTORS,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_KV, ACC, PRECISION,
            )  # fmt: skip
    inv = 1.0 / tl.where(l == 0.0, float("inf"), l)  # 0 for a row without keys
    o_ptr += b * stride_ob + h * stride_oh
    store_rows(o_ptr, stride_on, stride_od, r0, nq, o * inv[:, None], BLOCK_Q, HEAD_DIM, BLOCK_D)
    tl.store(m_ptr + head * nq + rows, m, mask=rows < nq)
    tl.store(l_ptr + head * nq + rows, l, mask=rows < nq)


@triton.jit
def _take_in(
    r0, c0, qi, o, m, l, k_src, v_src, row_segments, segment_ptr,
    b, hk, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    head, nq, nk, scale, seed, keep_scale, threshold,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inner loop's body: rows r0, ... take in the keys and values c0, ...; o is not yet
    divided by l."""
    kj = read_rows(
        k_src, b, hk, c0, nk, stride_kb, stride_kh, stride_kn, stride_kd,
        BLOCK_KV, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    scale2 = scale * LOG2_E
    s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION, out_dtype=ACC)  # unscaled
    seen = True
    if MASKED:
        rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
        seen = visible(
            rows[:, None], cols[None, :], nq, nk, row_segments[:, None],
            load_segments(segment_ptr, cols, nk, SEGMENTS)[None, :], CAUSAL, SEGMENTS,
        )  # fmt: skip
    m, l, p, carried = advance(m, l, s, seen, scale2, MASKED)
    p = dropped(p, seed, threshold, keep_scale, head, r0, c0, DROPOUT, BLOCK_Q, BLOCK_KV)
    vj = read_rows(
        v_src, b, hk, c0, nk, stride_vb, stride_vh, stride_vn, stride_vd,
        BLOCK_KV, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    o = tl.dot(
        p.to(vj.dtype), vj, acc=o * carried[:, None], input_precision=PRECISION, out_dtype=ACC
    )
    return o, m, l


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
    blocks: tiling.Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel on the device of q.

    q ``[B, H, Nq, D]``; k, v ``[B, Hkv, Nk, D]``; any strides; scale not negative.

    Returns o like q, and m (base 2) and l ``[B, H, Nq]``. Scratch: with segment_ids, three numbers
    per Q block.
    """
    batch, heads, nq, _ = q.shape
    acc = torch.promote_types(q.dtype, torch.float32)
    o = launch.seq_major(q, q.dtype)
    l = q.new_empty((batch, heads, nq), dtype=acc)
    m = torch.empty_like(l)
    use_descriptors = blocks.descriptors and launch.descriptors_fit(k, v)
    k_src, v_src = launch.sources(use_descriptors, blocks.block_kv, k, v)
    with launch.on_device(q):
        spans = None if segment_ids is None else segments.spans(segment_ids, blocks.block_q)
        _forward_kernel[(batch * heads * triton.cdiv(nq, blocks.block_q),)](
            q, k_src, v_src, o, m, l, launch.or_dummy(segment_ids, q), launch.or_dummy(spans, q),
            launch.or_dummy(seed, q), *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            batch * heads, heads, heads // k.shape[1], nq, k.shape[2],
            blocks.heads_at_a_time or batch * heads,
            scale, dropout.keep_scale(dropout_p), dropout.threshold(dropout_p),
            DESCRIPTORS=use_descriptors,
            **launch.constants(q, blocks, causal, dropout_p, segment_ids),
        )  # fmt: skip
    return o, m, l
