"""FlashAttention V1 with one thing changed: whether P is kept for backward or computed again.

Both variants are the same source, so that nothing else differs between them: with KEEP the forward
writes every tile of P to HBM and the backward reads it back in place of the product Q K^T and the
exponential. A kept tile is e^(s - m) under the row maximum of its own time, which is kept too, one
number per row and K/V block; the backward makes it P by e^(m_then - m) / l.

For a measurement (``recompute_cost.py``), not for use: no dropout, segments or grouped heads, and
the blocks of the table, whose forward tiles are multiples of the backward ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attention import launch, tiling
from flash_attention.tiles import (
    LOG2_E,
    add_rows,
    advance,
    finite,
    load_rows,
    locate,
    store_rows,
    visible,
)
from flash_attention.v1 import tables


def kept_p_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention whose backward reads P: O(N^2) memory. q, k, v ``[B, H, N, D]`` of one length."""
    return _Attention.apply(q, k, v, causal, True)


def recomputed_p_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same kernels computing P again."""
    return _Attention.apply(q, k, v, causal, False)


@triton.jit
def _tile(base, rows, cols, n):
    """Where tile (rows, cols), which broadcast, of an N x N matrix lies."""
    return base + rows.to(tl.int64) * n + cols


@triton.jit
def _first_block(c0, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr):
    return c0 // BLOCK_Q if CAUSAL else 0


@triton.jit
def _kept_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, p_ptr, then_ptr, heads, n, splits, scale,
    KEEP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, as flash_attention/v1/forward.py has it, on contiguous tensors."""
    head, split = locate(heads)
    q_ptr += head * n * D
    k_ptr += head * n * D
    v_ptr += head * n * D
    o_ptr += head * n * D
    m_ptr += head * n
    l_ptr += head * n
    p_ptr += head * n * n
    then_ptr += head * n * tl.cdiv(n, BLOCK_KV)
    scale2 = scale * LOG2_E
    for c0 in range(0, n, BLOCK_KV):
        kj = load_rows(k_ptr, D, 1, c0, n, BLOCK_KV, D, BLOCK_D)
        vj = load_rows(v_ptr, D, 1, c0, n, BLOCK_KV, D, BLOCK_D)
        first = _first_block(c0, BLOCK_Q, CAUSAL)
        first += (split + splits - first % splits) % splits
        for i in range(first, tl.cdiv(n, BLOCK_Q), splits):
            r0 = i * BLOCK_Q
            rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
            inside = rows < n
            qi = load_rows(q_ptr, D, 1, r0, n, BLOCK_Q, D, BLOCK_D)
            oi = load_rows(o_ptr, D, 1, r0, n, BLOCK_Q, D, BLOCK_D)
            m_old = tl.load(m_ptr + rows, mask=inside, other=float("-inf"))
            l_old = tl.load(l_ptr + rows, mask=inside, other=0.0)
            s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION)
            seen = visible(rows[:, None], cols[None, :], n, n, rows, cols, CAUSAL, False)
            m, l, p, factor = advance(m_old, l_old, s, seen, scale2, True)
            inv = 1.0 / tl.where(l == 0.0, float("inf"), l)
            p = p.to(vj.dtype)
            if KEEP:
                both = inside[:, None] & (cols < n)[None, :]
                tl.store(_tile(p_ptr, rows[:, None], cols[None, :], n), p, mask=both)
                tl.store(then_ptr + c0 // BLOCK_KV * n + rows, finite(m), mask=inside)
            oi = oi * (factor * l_old * inv)[:, None]
            oi += tl.dot(p, vj, input_precision=PRECISION) * inv[:, None]
            store_rows(o_ptr, D, 1, r0, n, oi, BLOCK_Q, D, BLOCK_D)
            tl.store(m_ptr + rows, m, mask=inside)
            tl.store(l_ptr + rows, l, mask=inside)
        tl.debug_barrier()


@triton.jit
def _kept_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, m_ptr, l_ptr, delta_ptr, p_ptr, then_ptr,
    heads, n, scale,
    KEEP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, THEN_KV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 4, one program per K/V block, as flash_attention/v1/backward.py has it: tiles are
    [Bc, Br]. THEN_KV: the forward's Bc, a multiple of this one's."""
    head, j = locate(heads)
    q_ptr += head * n * D
    k_ptr += head * n * D
    v_ptr += head * n * D
    do_ptr += head * n * D
    dq_ptr += head * n * D
    m_ptr += head * n
    l_ptr += head * n
    delta_ptr += head * n
    p_ptr += head * n * n
    then_ptr += head * n * tl.cdiv(n, THEN_KV)
    c0 = j * BLOCK_KV
    kj = load_rows(k_ptr, D, 1, c0, n, BLOCK_KV, D, BLOCK_D)
    vj = load_rows(v_ptr, D, 1, c0, n, BLOCK_KV, D, BLOCK_D)
    dk = tl.zeros((BLOCK_KV, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_KV, BLOCK_D), dtype=tl.float32)
    scale2 = scale * LOG2_E
    for i in range(_first_block(c0, BLOCK_Q, CAUSAL), tl.cdiv(n, BLOCK_Q)):
        r0 = i * BLOCK_Q
        rows, cols = r0 + tl.arange(0, BLOCK_Q), c0 + tl.arange(0, BLOCK_KV)
        inside = rows < n
        qi = load_rows(q_ptr, D, 1, r0, n, BLOCK_Q, D, BLOCK_D)
        doi = load_rows(do_ptr, D, 1, r0, n, BLOCK_Q, D, BLOCK_D)
        m = tl.load(m_ptr + rows, mask=inside, other=0.0)
        l = tl.load(l_ptr + rows, mask=inside, other=1.0)
        delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
        if KEEP:
            both = inside[None, :] & (cols < n)[:, None]
            place = _tile(p_ptr, rows[None, :], cols[:, None], n)
            then = tl.load(then_ptr + c0 // THEN_KV * n + rows, mask=inside, other=0.0)
            pt = tl.load(place, mask=both, other=0.0) * (tl.exp2(then - m) / l)[None, :]
        else:
            st = tl.dot(kj, tl.trans(qi), input_precision=PRECISION) * scale2
            seen = visible(rows[None, :], cols[:, None], n, n, rows, cols, CAUSAL, False)
            pt = tl.exp2(tl.where(seen, st, float("-inf")) - m[None, :]) / l[None, :]
        dpt = tl.dot(vj, tl.trans(doi), input_precision=PRECISION)
        dv += tl.dot(pt.to(doi.dtype), doi, input_precision=PRECISION)
        dst = (pt * (dpt - delta[None, :])).to(qi.dtype)
        dk += tl.dot(dst, qi, input_precision=PRECISION)
        dq = tl.dot(tl.trans(dst), kj, input_precision=PRECISION)
        add_rows(dq_ptr, D, 1, r0, n, dq, BLOCK_Q, D, BLOCK_D)
    store_rows(dk_ptr + head * n * D, D, 1, c0, n, dk * scale, BLOCK_KV, D, BLOCK_D)
    store_rows(dv_ptr + head * n * D, D, 1, c0, n, dv, BLOCK_KV, D, BLOCK_D)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, keep):
        q, k, v = (t.contiguous() for t in (q, k, v))
        batch, heads, n, d = q.shape
        blocks = tiling.tuned(tables.FORWARD, d, q.element_size())
        o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        m = o.new_full(q.shape[:3], float("-inf"))
        l = torch.zeros_like(m)
        # Tiles above a causal diagonal stay unwritten and unread, but those it crosses are whole.
        p = q.new_empty((batch, heads, n, n) if keep else 1)
        then = o.new_empty((batch, heads, triton.cdiv(n, blocks.block_kv), n) if keep else 1)
        processors = launch.num_processors(q.device)
        splits = tiling.forward_splits(batch * heads, n, blocks, processors)
        with launch.on_device(q):
            _kept_forward[(batch * heads * splits,)](
                q, k, v, o, m, l, p, then, batch * heads, n, splits, d**-0.5,
                **_options(keep, causal, q, blocks),
            )  # fmt: skip
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, m, l, *((p, then) if keep else ()))
        ctx.causal, ctx.keep, ctx.then_kv = causal, keep, blocks.block_kv
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, m, l, *kept = ctx.saved_tensors
        do = do.contiguous()
        batch, heads, n, d = q.shape
        blocks = tiling.tuned(tables.BACKWARD, d, q.element_size())
        p, then = kept or (q, m)  # not read
        delta = (do.float() * o.float()).sum(-1)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        with launch.on_device(q):
            _kept_backward[(batch * heads * triton.cdiv(n, blocks.block_kv),)](
                q, k, v, do, dq, dk, dv, m, l, delta, p, then, batch * heads, n, d**-0.5,
                THEN_KV=ctx.then_kv, **_options(ctx.keep, ctx.causal, q, blocks),
            )  # fmt: skip
        return (dq * d**-0.5).to(q.dtype), dk, dv, None, None


def _options(keep: bool, causal: bool, q: Tensor, blocks: tiling.Blocks) -> dict:
    d = q.shape[3]
    return dict(
        KEEP=keep, CAUSAL=causal, D=d, BLOCK_D=tiling.padded_head_dim(d),
        BLOCK_Q=blocks.block_q, BLOCK_KV=blocks.block_kv,
        PRECISION=launch.dot_precision(q.dtype),
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
