"""FlashAttention-2 backward (Algorithm 2 of arXiv:2307.08691) as two Triton kernels.

dK and dV: one program per K/V block walks over the rows. dQ: one program per Q block walks over the
keys. What a program computes stays in its registers until it is stored, once, in the result's own
dtype. S and P are computed again from q, k and the log-sum-exp, by each of the two.

The paper has one kernel, whose programs add to a dQ that they share. Its five matrix products are
seven in two kernels; an H200 nonetheless ran these faster at D = 128, and about as fast at D = 64
(results/flash_v2_tuning.md). There is no dQ in float32, and the gradients repeat bit for bit.

The first kernel computes the tiles transposed (S^T = K Q^T), so that P^T and dS^T are the left
operands of dV += P^T dO and dK += dS^T Q as they come out of the registers; the second one does
not, and so has dS as the left operand of dQ += dS K.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_attention import dropout, launch, segments, tiling
from flash_attention.tiles import (
    LOG2_E,
    both_dropped_transposed,
    dropped,
    keys_seen,
    load_rows,
    load_segments,
    place,
    probabilities,
    read_rows,
    rows_seeing,
    store_rows,
    visible,
    visible_transposed,
)


@triton.jit
def _dk_dv_kernel(
    q_src, k_ptr, v_ptr, do_src, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    segment_ptr, span_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    batch_kv_heads, kv_heads, group, nq, nk, at_a_time, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * Hkv + kv head, K/V block): every row of every query head that shares the
    K/V head. The first keys, which most rows see, start first.

    q_src, do_src: pointers, or with DESCRIPTORS tensor maps.
    """
    kv_head, j = place(batch_kv_heads, tl.cdiv(nk, BLOCK_KV), at_a_time)
    b, hk = kv_head // kv_heads, kv_head % kv_heads
    c0 = j * BLOCK_KV
    segment_ptr += b * nq
    span_ptr += (b * tl.cdiv(nk, BLOCK_KV) + j) * 3
    seed = tl.load(seed_ptr) if DROPOUT else 0

    k_ptr += b * stride_kb + hk * stride_kh
    v_ptr += b * stride_vb + hk * stride_vh
    kj = load_rows(k_ptr, stride_kn, stride_kd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)
    vj = load_rows(v_ptr, stride_vn, stride_vd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)
    dk = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)
    first, full, full_stop, stop = rows_seeing(
        c0, nq, nk, span_ptr, BLOCK_Q, BLOCK_KV, CAUSAL, SEGMENTS
    )
    for g in range(0, group):
        h = hk * group + g  # query head within the batch entry
        head = b * kv_heads * group + h  # batch * H + head
        for part in tl.static_range(0, 3 if SEGMENTS else 2):
            begin = first if part == 0 else full if part == 1 else full_stop
            end = full if part == 0 else full_stop if part == 1 else stop
            for i in range(begin, end):
                dk, dv = _add_to_dk_dv(
                    i * BLOCK_Q, c0, kj, vj, dk, dv, q_src, do_src,
                    lse_ptr + head * nq, delta_ptr + head * nq, segment_ptr,
                    b, h, stride_qb, stride_qh, stride_qn, stride_qd,
                    stride_gb, stride_gh, stride_gn, stride_gd,
                    head, nq, nk, scale, seed, keep_scale, threshold,
                    part != 1, CAUSAL, SEGMENTS, DROPOUT, DESCRIPTORS,
                    HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_KV, ACC, PRECISION,
                )  # fmt: skip
    dk_ptr += b * stride_dkb + hk * stride_dkh
    dv_ptr += b * stride_dvb + hk * stride_dvh
    store_rows(dk_ptr, stride_dkn, stride_dkd, c0, nk, dk * scale, BLOCK_KV, HEAD_DIM, BLOCK_D)
    store_rows(dv_ptr, stride_dvn, stride_dvd, c0, nk, dv, BLOCK_KV, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_to_dk_dv(
    r0, c0, kj, vj, dk, dv, q_src, do_src, lse_ptr, delta_ptr, segment_ptr,
    b, h, stride_qb, stride_qh, stride_qn, stride_qd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    head, nq, nk, scale, seed, keep_scale, threshold,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inner loop's body: what the rows r0, ... add to dK and dV of keys c0, ....

    Tiles are [Bc, Br]. dK still lacks the factor ``scale``: it is applied once, at the end.
    """
    rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
    inside = rows < nq
    qi = read_rows(
        q_src, b, h, r0, nq, stride_qb, stride_qh, stride_qn, stride_qd,
        BLOCK_Q, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # P = 0 there
    st = tl.dot(kj, tl.trans(qi), input_precision=PRECISION, out_dtype=ACC)  # unscaled
    seen = True
    if MASKED:
        seen = visible_transposed(rows, cols, nq, nk, segment_ptr, CAUSAL, SEGMENTS)
    pt = probabilities(st, lse[None, :], seen, scale * LOG2_E, MASKED)
    doi = read_rows(
        do_src, b, h, r0, nq, stride_gb, stride_gh, stride_gn, stride_gd,
        BLOCK_Q, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    dpt = tl.dot(vj, tl.trans(doi), input_precision=PRECISION, out_dtype=ACC)
    pt_dropped, dpt = both_dropped_transposed(
        pt, dpt, seed, threshold, keep_scale, head, r0, c0, DROPOUT, BLOCK_Q, BLOCK_KV
    )
    dv = tl.dot(pt_dropped.to(doi.dtype), doi, dv, input_precision=PRECISION, out_dtype=ACC)
    row_delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
    dst = (pt * (dpt - row_delta[None, :])).to(qi.dtype)
    dk = tl.dot(dst, qi, dk, input_precision=PRECISION, out_dtype=ACC)
    return dk, dv


@triton.jit
def _dq_kernel(
    q_ptr, k_src, v_src, do_ptr, dq_ptr, lse_ptr, delta_ptr,
    segment_ptr, span_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    batch_heads, heads, group, nq, nk, at_a_time, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * H + head, Q block), as in forward: dQ of these rows over all keys."""
    row_blocks = tl.cdiv(nq, BLOCK_Q)
    head, i = place(batch_heads, row_blocks, at_a_time)
    i = row_blocks - 1 - i
    b, h = head // heads, head % heads
    r0 = i * BLOCK_Q
    rows = r0 + tl.arange(0, BLOCK_Q)
    segment_ptr += b * nq
    span_ptr += (b * row_blocks + i) * 3
    seed = tl.load(seed_ptr) if DROPOUT else 0

    q_ptr += b * stride_qb + h * stride_qh
    do_ptr += b * stride_gb + h * stride_gh
    qi = load_rows(q_ptr, stride_qn, stride_qd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    doi = load_rows(do_ptr, stride_gn, stride_gd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    lse = tl.load(lse_ptr + head * nq + rows, mask=rows < nq, other=float("inf"))
    row_delta = tl.load(delta_ptr + head * nq + rows, mask=rows < nq, other=0.0)
    row_segments = load_segments(segment_ptr, rows, nq, SEGMENTS)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), dtype=ACC)
    first, full, full_stop, stop = keys_seen(
        r0, nq, nk, span_ptr, BLOCK_Q, BLOCK_KV, CAUSAL, SEGMENTS
    )
    for part in tl.static_range(0 if SEGMENTS else 1, 3):
        begin = first if part == 0 else full if part == 1 else full_stop
        end = full if part == 0 else full_stop if part == 1 else stop
        for j in range(begin, end):
            dq = _add_to_dq(
                r0, j * BLOCK_KV, qi, doi, dq, lse, row_delta, row_segments,
                k_src, v_src, segment_ptr, b, h // group,
                stride_kb, stride_kh, stride_kn, stride_kd,
                stride_vb, stride_vh, stride_vn, stride_vd,
                head, nq, nk, scale, seed, keep_scale, threshold,
                part != 1, CAUSAL, SEGMENTS, DROPOUT, DESCRIPTORS,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_KV, ACC, PRECISION,
            )  # fmt: skip
    dq_ptr += b * stride_dqb + h * stride_dqh
    store_rows(dq_ptr, stride_dqn, stride_dqd, r0, nq, dq * scale, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_to_dq(
    r0, c0, qi, doi, dq, lse, row_delta, row_segments, k_src, v_src, segment_ptr, b, hk,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    head, nq, nk, scale, seed, keep_scale, threshold,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inner loop's body: what the keys c0, ... add to dQ of rows r0, ...; without ``scale``."""
    kj = read_rows(
        k_src, b, hk, c0, nk, stride_kb, stride_kh, stride_kn, stride_kd,
        BLOCK_KV, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    vj = read_rows(
        v_src, b, hk, c0, nk, stride_vb, stride_vh, stride_vn, stride_vd,
        BLOCK_KV, HEAD_DIM, BLOCK_D, DESCRIPTORS,
    )  # fmt: skip
    s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION, out_dtype=ACC)  # unscaled
    seen = True
    if MASKED:
        rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
        seen = visible(
            rows[:, None], cols[None, :], nq, nk, row_segments[:, None],
            load_segments(segment_ptr, cols, nk, SEGMENTS)[None, :], CAUSAL, SEGMENTS,
        )  # fmt: skip
    p = probabilities(s, lse[:, None], seen, scale * LOG2_E, MASKED)
    dp = tl.dot(doi, tl.trans(vj), input_precision=PRECISION, out_dtype=ACC)
    dp = dropped(dp, seed, threshold, keep_scale, head, r0, c0, DROPOUT, BLOCK_Q, BLOCK_KV)
    ds = (p * (dp - row_delta[:, None])).to(kj.dtype)
    return tl.dot(ds, kj, dq, input_precision=PRECISION, out_dtype=ACC)


def dk_dv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    row_delta: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    blocks: tiling.Blocks,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of dK and dV on the device of q.

    Shapes as in the forward; any strides; do ``[B, H, Nq, D]``, lse and row_delta ``[B, H, Nq]`` as
    ``delta.py`` returns them.

    Returns dk, dv like k, v. Scratch: with segment_ids, three numbers per K/V block.
    """
    batch, heads, nq, _ = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    dk, dv = launch.seq_major(k, k.dtype), launch.seq_major(v, v.dtype)
    use_descriptors = blocks.descriptors and launch.descriptors_fit(q, do)
    q_src, do_src = launch.sources(use_descriptors, blocks.block_q, q, do)
    with launch.on_device(q):
        spans = None if segment_ids is None else segments.spans(segment_ids, blocks.block_kv)
        _dk_dv_kernel[(batch * kv_heads * triton.cdiv(nk, blocks.block_kv),)](
            q_src, k, v, do_src, dk, dv, lse, row_delta,
            launch.or_dummy(segment_ids, q), launch.or_dummy(spans, q), launch.or_dummy(seed, q),
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dk.stride(), *dv.stride(),
            batch * kv_heads, kv_heads, heads // kv_heads, nq, nk,
            blocks.heads_at_a_time or batch * kv_heads,
            scale, dropout.keep_scale(dropout_p), dropout.threshold(dropout_p),
            DESCRIPTORS=use_descriptors,
            **launch.constants(q, blocks, causal, dropout_p, segment_ids),
        )  # fmt: skip
    return dk, dv


def dq(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    row_delta: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    blocks: tiling.Blocks,
) -> Tensor:
    """Launch the kernel of dQ; arguments as in :func:`dk_dv`.

    Returns dq like q. Scratch: with segment_ids, three numbers per Q block.
    """
    batch, heads, nq, _ = q.shape
    result = launch.seq_major(q, q.dtype)
    use_descriptors = blocks.descriptors and launch.descriptors_fit(k, v)
    k_src, v_src = launch.sources(use_descriptors, blocks.block_kv, k, v)
    with launch.on_device(q):
        spans = None if segment_ids is None else segments.spans(segment_ids, blocks.block_q)
        _dq_kernel[(batch * heads * triton.cdiv(nq, blocks.block_q),)](
            q, k_src, v_src, do, result, lse, row_delta,
            launch.or_dummy(segment_ids, q), launch.or_dummy(spans, q), launch.or_dummy(seed, q),
            *q.stride(), *k.stride(), *v.stride(), *do.stride(), *result.stride(),
            batch * heads, heads, heads // k.shape[1], nq, k.shape[2],
            blocks.heads_at_a_time or batch * heads,
            scale, dropout.keep_scale(dropout_p), dropout.threshold(dropout_p),
            DESCRIPTORS=use_descriptors,
            **launch.constants(q, blocks, causal, dropout_p, segment_ids),
        )  # fmt: skip
    return result
