"""FlashAttention V1 backward: Algorithm 4 of the paper (arXiv:2205.14135) as Triton kernels.

K/V blocks outside, Q blocks inside: dK and dV of a block stay in registers while the rows pass;
dQ of every row lives in HBM. S and P are computed again from q, k and the log-sum-exp.

The kernel computes the tiles transposed (S^T = K Q^T), so that P^T and dS^T are the left operands
of dV += P^T dO and dK += dS^T Q as they come out of the registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_attention import dropout, launch, segments, tiling
from flash_attention.delta import delta
from flash_attention.tiles import (
    LOG2_E,
    add_rows,
    both_dropped_transposed,
    load_rows,
    locate,
    probabilities,
    rows_seeing,
    store_rows,
    visible_transposed,
)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    segment_ptr, span_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    batch_kv_heads, kv_heads, group, nq, nk, splits, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, ATOMIC: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * Hkv + kv head, split): K/V blocks split, split + splits, ...; every row of
    every query head that shares the K/V head."""
    kv_head, split = locate(batch_kv_heads)
    b, hk = kv_head // kv_heads, kv_head % kv_heads
    k_ptr += b * stride_kb + hk * stride_kh
    v_ptr += b * stride_vb + hk * stride_vh
    dk_ptr += b * stride_dkb + hk * stride_dkh
    dv_ptr += b * stride_dvb + hk * stride_dvh
    segment_ptr += b * nq
    span_ptr += b * tl.cdiv(nk, BLOCK_KV) * 3
    seed = tl.load(seed_ptr) if DROPOUT else 0

    for j in range(split, tl.cdiv(nk, BLOCK_KV), splits):  # line 7
        c0 = j * BLOCK_KV
        kj = load_rows(k_ptr, stride_kn, stride_kd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)  # line 8
        vj = load_rows(v_ptr, stride_vn, stride_vd, c0, nk, BLOCK_KV, HEAD_DIM, BLOCK_D)
        dk = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)  # line 9
        dv = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)
        first, full, full_stop, stop = rows_seeing(
            c0, nq, nk, span_ptr + j * 3, BLOCK_Q, BLOCK_KV, CAUSAL, SEGMENTS
        )
        for g in range(0, group):
            h = hk * group + g  # query head within the batch entry
            head = b * kv_heads * group + h  # batch * H + head
            for part in tl.static_range(0, 3 if SEGMENTS else 2):
                begin = first if part == 0 else full if part == 1 else full_stop
                end = full if part == 0 else full_stop if part == 1 else stop
                for i in range(begin, end):  # line 10
                    dk, dv = _add_gradients(
                        i * BLOCK_Q, c0, kj, vj, dk, dv,
                        q_ptr + b * stride_qb + h * stride_qh,
                        do_ptr + b * stride_gb + h * stride_gh,
                        dq_ptr + b * stride_dqb + h * stride_dqh,
                        lse_ptr + head * nq, delta_ptr + head * nq, segment_ptr,
                        stride_qn, stride_qd, stride_gn, stride_gd, stride_dqn, stride_dqd,
                        head, nq, nk, scale, seed, keep_scale, threshold,
                        part != 1, CAUSAL, SEGMENTS, DROPOUT, ATOMIC,
                        HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_KV, ACC, PRECISION,
                    )  # fmt: skip
        dk = dk * scale
        store_rows(dk_ptr, stride_dkn, stride_dkd, c0, nk, dk, BLOCK_KV, HEAD_DIM, BLOCK_D)
        store_rows(dv_ptr, stride_dvn, stride_dvd, c0, nk, dv, BLOCK_KV, HEAD_DIM, BLOCK_D)
        if not ATOMIC:
            # The next K/V block reads the dQ just written (see the forward kernel).
            tl.debug_barrier()


@triton.jit
def _add_gradients(
    r0, c0, kj, vj, dk, dv, q_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, segment_ptr,
    stride_qn, stride_qd, stride_gn, stride_gd, stride_dqn, stride_dqd,
    head, nq, nk, scale, seed, keep_scale, threshold,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    ATOMIC: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inner loop's body: what rows r0, ... add to dK and dV of keys c0, ..., and these to dQ.

    Tiles are [Bc, Br]. dQ and dK still lack the factor ``scale``: it is applied once, at the end.
    """
    rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
    inside = rows < nq
    qi = load_rows(q_ptr, stride_qn, stride_qd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    doi = load_rows(do_ptr, stride_gn, stride_gd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # P = 0 there
    row_delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)

    st = tl.dot(kj, tl.trans(qi), input_precision=PRECISION, out_dtype=ACC)  # line 11, unscaled
    seen = True
    if MASKED:
        seen = visible_transposed(rows, cols, nq, nk, segment_ptr, CAUSAL, SEGMENTS)
    pt = probabilities(st, lse[None, :], seen, scale * LOG2_E, MASKED)  # line 13
    dpt = tl.dot(vj, tl.trans(doi), input_precision=PRECISION, out_dtype=ACC)  # line 17
    pt_dropped, dpt = both_dropped_transposed(  # lines 14, 15, 18
        pt, dpt, seed, threshold, keep_scale, head, r0, c0, DROPOUT, BLOCK_Q, BLOCK_KV
    )
    dv += tl.dot(pt_dropped.to(doi.dtype), doi, input_precision=PRECISION, out_dtype=ACC)  # line 16
    dst = (pt * (dpt - row_delta[None, :])).to(qi.dtype)  # line 20
    dk += tl.dot(dst, qi, input_precision=PRECISION, out_dtype=ACC)  # line 22
    dq = tl.dot(tl.trans(dst), kj, input_precision=PRECISION, out_dtype=ACC)  # line 21
    if ATOMIC:
        add_rows(dq_ptr, stride_dqn, stride_dqd, r0, nq, dq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    else:
        dq += load_rows(dq_ptr, stride_dqn, stride_dqd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
        store_rows(dq_ptr, stride_dqn, stride_dqd, r0, nq, dq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    return dk, dv


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    splits: int | None,
    blocks: tiling.Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels on the device of q. Shapes as in the forward; any strides, dO's too.

    splits: programs that share the K/V blocks of one head. 1 adds to dQ in a fixed order, so that
    the result repeats bit for bit; more add atomically; None: one program per K/V block.

    Returns dq, dk, dv like q, k, v. Scratch: dq in float32, and what ``delta.py`` makes of every
    row; with segment_ids, three numbers per K/V block.
    """
    batch, heads, nq, _ = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    acc = m.dtype
    dq = launch.seq_major(q, acc, fill=0.0)
    dk, dv = launch.seq_major(k, k.dtype), launch.seq_major(v, v.dtype)
    scaled_do, lse, row_delta = delta(o, do, m, l)
    col_blocks = triton.cdiv(nk, blocks.block_kv)
    splits = col_blocks if splits is None else min(splits, col_blocks)
    with launch.on_device(q):
        spans = None if segment_ids is None else segments.spans(segment_ids, blocks.block_kv)
        _backward_kernel[(batch * kv_heads * splits,)](
            q, k, v, scaled_do, dq, dk, dv, lse, row_delta,
            launch.or_dummy(segment_ids, q), launch.or_dummy(spans, q), launch.or_dummy(seed, q),
            *q.stride(), *k.stride(), *v.stride(), *scaled_do.stride(),
            *dq.stride(), *dk.stride(), *dv.stride(),
            batch * kv_heads, kv_heads, heads // kv_heads, nq, nk, splits,
            scale, dropout.keep_scale(dropout_p), dropout.threshold(dropout_p),
            ATOMIC=splits > 1, **launch.constants(q, blocks, causal, dropout_p, segment_ids),
        )  # fmt: skip
    return launch.rounded(dq, q, scale), dk, dv
