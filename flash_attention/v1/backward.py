"""FlashAttention V1 backward: Algorithm 4 of the paper (arXiv:2205.14135) as Triton kernels.

K/V blocks outside, Q blocks inside: dK and dV of a block stay in registers while the rows pass;
dQ of every row lives in HBM. S and P are computed again from q, k, m and l.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attention import dropout, launch, tiling
from flash_attention.v1.tiles import add_rows, keep, load_rows, scores, store_rows


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_on, stride_od,
    stride_gb, stride_gh, stride_gn, stride_gd,
    heads, nq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Line 19, D_i = rowsum(dO o O), once for all K/V blocks: it does not depend on j."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    o_ptr += b * stride_ob + h * stride_oh
    do_ptr += b * stride_gb + h * stride_gh
    rows = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    oi = load_rows(o_ptr, stride_on, stride_od, rows, dims, nq, HEAD_DIM).to(ACC)
    doi = load_rows(do_ptr, stride_gn, stride_gd, rows, dims, nq, HEAD_DIM).to(ACC)
    tl.store(delta_ptr + head * nq + rows, tl.sum(oi * doi, axis=1), mask=rows < nq)


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, m_ptr, l_ptr, delta_ptr,
    segment_ptr, seed_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    kv_heads, group, nq, nk, splits, scale, keep_scale, threshold,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, ATOMIC: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch * Hkv + kv head, split): K/V blocks split, split + splits, ...; every row of
    every query head that shares the K/V head."""
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, hk = kv_head // kv_heads, kv_head % kv_heads
    k_ptr += b * stride_kb + hk * stride_kh
    v_ptr += b * stride_vb + hk * stride_vh
    dk_ptr += b * stride_dkb + hk * stride_dkh
    dv_ptr += b * stride_dvb + hk * stride_dvh
    q_ptr += b * stride_qb
    do_ptr += b * stride_gb
    dq_ptr += b * stride_dqb
    segment_ptr += b * nq
    seed = tl.load(seed_ptr) if DROPOUT else 0

    dims = tl.arange(0, BLOCK_D)
    for j in range(split, tl.cdiv(nk, BLOCK_KV), splits):  # line 7
        c0 = j * BLOCK_KV
        cols = c0 + tl.arange(0, BLOCK_KV)
        kj = load_rows(k_ptr, stride_kn, stride_kd, cols, dims, nk, HEAD_DIM)  # line 8
        vj = load_rows(v_ptr, stride_vn, stride_vd, cols, dims, nk, HEAD_DIM)
        dk = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)  # line 9
        dv = tl.zeros((BLOCK_KV, BLOCK_D), dtype=ACC)

        first = tl.maximum(0, c0 - (nk - nq)) // BLOCK_Q if CAUSAL else 0
        for g in range(0, group):
            h = hk * group + g  # query head within the batch entry
            head = b * kv_heads * group + h  # batch * H + head
            for i in range(first, tl.cdiv(nq, BLOCK_Q)):  # line 10
                rows = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
                inside = rows < nq
                qi = load_rows(
                    q_ptr + h * stride_qh, stride_qn, stride_qd, rows, dims, nq, HEAD_DIM
                )
                doi = load_rows(
                    do_ptr + h * stride_gh, stride_gn, stride_gd, rows, dims, nq, HEAD_DIM
                )
                m = tl.load(m_ptr + head * nq + rows, mask=inside, other=float("-inf"))
                l = tl.load(l_ptr + head * nq + rows, mask=inside, other=0.0)
                delta = tl.load(delta_ptr + head * nq + rows, mask=inside, other=0.0)

                s = scores(
                    qi, kj, rows, cols, nq, nk, segment_ptr, scale,
                    CAUSAL, SEGMENTS, ACC, PRECISION,
                )  # fmt: skip  # line 11
                shift = tl.where(m == float("-inf"), 0.0, m)
                inv = 1.0 / tl.where(l > 0.0, l, float("inf"))  # 0 for a row without keys
                p = tl.exp(s - shift[:, None]) * inv[:, None]  # line 13
                dp = tl.dot(doi, tl.trans(vj), input_precision=PRECISION, out_dtype=ACC)  # line 17
                p_dropped = p
                if DROPOUT:  # lines 14, 15, 18
                    kept = keep(seed, threshold, head, rows, cols)
                    p_dropped = tl.where(kept, p * keep_scale, 0.0)
                    dp = tl.where(kept, dp * keep_scale, 0.0)
                dv += tl.dot(
                    tl.trans(p_dropped.to(doi.dtype)), doi, input_precision=PRECISION, out_dtype=ACC
                )  # line 16
                ds = (p * (dp - delta[:, None])).to(qi.dtype)  # line 20
                dk += tl.dot(tl.trans(ds), qi, input_precision=PRECISION, out_dtype=ACC)  # line 22
                dq = scale * tl.dot(ds, kj, input_precision=PRECISION, out_dtype=ACC)  # line 21
                dq_rows = dq_ptr + h * stride_dqh
                if ATOMIC:
                    add_rows(dq_rows, stride_dqn, stride_dqd, rows, dims, nq, dq, HEAD_DIM)
                else:
                    dq += load_rows(dq_rows, stride_dqn, stride_dqd, rows, dims, nq, HEAD_DIM)
                    store_rows(dq_rows, stride_dqn, stride_dqd, rows, dims, nq, dq, HEAD_DIM)
        store_rows(dk_ptr, stride_dkn, stride_dkd, cols, dims, nk, dk * scale, HEAD_DIM)  # line 24
        store_rows(dv_ptr, stride_dvn, stride_dvd, cols, dims, nk, dv, HEAD_DIM)
        if not ATOMIC:
            # The next K/V block reads the dQ just written (see the forward kernel).
            tl.debug_barrier()


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
    kv_splits: int | None,
    blocks: tiling.Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels on the device of q. Shapes as in the forward; any strides, dO's too.

    kv_splits: programs that share the K/V blocks of one head. 1 adds to dQ in a fixed order, so
    that the result repeats bit for bit; more add atomically; None: one program per K/V block.

    Returns dq float32 (float64 for float64 inputs) and dk, dv in the dtype of k and v.
    Scratch: dq in float32 and D_i ``[B, H, Nq]``.
    """
    batch, heads, nq, head_dim = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    acc = m.dtype
    dq = launch.seq_major(q, acc, fill=0.0)
    dk, dv = launch.seq_major(k, k.dtype), launch.seq_major(v, v.dtype)
    delta = torch.empty_like(m)
    shared = dict(HEAD_DIM=head_dim, BLOCK_D=tiling.padded_head_dim(head_dim))
    col_blocks = triton.cdiv(nk, blocks.block_kv)
    kv_splits = col_blocks if kv_splits is None else min(kv_splits, col_blocks)
    with launch.on_device(q):
        _delta_kernel[(batch * heads, triton.cdiv(nq, blocks.block_q))](
            o, do, delta, *o.stride(), *do.stride(), heads, nq,
            BLOCK_Q=blocks.block_q, ACC=launch.triton_dtype(acc), **shared,
        )  # fmt: skip
        _backward_kernel[(batch * kv_heads, kv_splits)](
            q, k, v, do, dq, dk, dv, m, l, delta,
            launch.or_dummy(segment_ids, q), launch.or_dummy(seed, q),
            *q.stride(), *k.stride(), *v.stride(), *do.stride(),
            *dq.stride(), *dk.stride(), *dv.stride(),
            kv_heads, heads // kv_heads, nq, nk, kv_splits,
            scale, 1.0 / (1.0 - dropout_p), dropout.threshold(dropout_p),
            CAUSAL=causal, SEGMENTS=segment_ids is not None, DROPOUT=dropout_p > 0.0,
            BLOCK_Q=blocks.block_q, BLOCK_KV=blocks.block_kv, ATOMIC=kv_splits > 1,
            ACC=launch.triton_dtype(acc), PRECISION=launch.dot_precision(q.dtype),
            num_warps=blocks.num_warps, num_stages=blocks.num_stages, **shared,
        )  # fmt: skip
    return dq, dk, dv
