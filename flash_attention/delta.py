"""What backward needs of every row before it starts, in one pass over O and dO (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attention import launch, tiling
from flash_attention.tiles import load_rows, locate, store_rows

BLOCK_Q = 64
# D sums products over threads, and each thread ends with the sum. Where one holds a single product
# of a row, a fused multiply-add would round the other thread's product and not its own: sums that
# differ in the last bit, and which of them is stored is left open.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, m_ptr, l_ptr, scaled_ptr, lse_ptr, delta_ptr,
    stride_ob, stride_oh, stride_on, stride_od,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_sb, stride_sh, stride_sn, stride_sd,
    batch_heads, heads, nq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program (batch * H + head, block of rows)."""
    head, block = locate(batch_heads)
    b, h = head // heads, head % heads
    o_ptr += b * stride_ob + h * stride_oh
    do_ptr += b * stride_gb + h * stride_gh
    scaled_ptr += b * stride_sb + h * stride_sh
    r0 = block * BLOCK_Q
    rows = r0 + tl.arange(0, BLOCK_Q)
    m = tl.load(m_ptr + head * nq + rows, mask=rows < nq, other=0.0)
    l = tl.load(l_ptr + head * nq + rows, mask=rows < nq, other=0.0)
    sees_none = l == 0.0  # m = -inf
    m = tl.where(sees_none, 0.0, m)
    log_l = tl.log2(tl.where(sees_none, 1.0, l))
    lse = m + log_l
    # Rounded up, it would ask for a larger dO, which float16 may not hold: then one step down, but
    # not far below m, where P would be large.
    below = tl.maximum(lse - tl.abs(lse) * (0.75 * 2.0**-23), tl.minimum(m, lse) - 1.0)
    lse = tl.where((m - lse) + log_l < 0.0, below, lse)
    lost = (m - lse) + log_l  # what the sum rounded away

    doi = load_rows(do_ptr, stride_gn, stride_gd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    doi = (doi * tl.exp2(-lost)[:, None]).to(doi.dtype)
    doi = tl.where(sees_none[:, None], 0.0, doi)  # what it holds is of no matter, NaN included
    oi = load_rows(o_ptr, stride_on, stride_od, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D)
    row_delta = tl.sum(oi.to(ACC) * doi.to(ACC), axis=1)
    store_rows(scaled_ptr, stride_sn, stride_sd, r0, nq, doi, BLOCK_Q, HEAD_DIM, BLOCK_D)
    lse = tl.where(sees_none, float("inf"), lse)  # P = 0
    tl.store(lse_ptr + head * nq + rows, lse, mask=rows < nq)
    tl.store(delta_ptr + head * nq + rows, row_delta, mask=rows < nq)


def delta(o: Tensor, do: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dO, L and D of backward's loops, in which P = 2^(s - L) and dS = P o (dO V^T - D).

    o and do ``[B, H, Nq, D]``, any strides; m (base 2) and l ``[B, H, Nq]``. D = rowsum(dO o O),
    and L = m + log2 l is the log-sum-exp, infinite for a row that sees no key. Algorithm 4 of
    arXiv:2205.14135 computes D inside the loop (line 19), and divides P by l there (line 13), one
    more multiplication for each score.

    Beside a large m, L has few bits left for log2 l: at 2^31 none, and P would be l times too
    large. Every gradient is linear in a row's dO, so dO is returned times 2^(L - m - log2 l), which
    makes up for it as far as dO / l is in its dtype's range. Beside scores below a thousand,
    half-precision dO stays as it is. L is rounded down, so that dO does not grow (beside scores up
    to 2^24). Of a row that sees no key it is 0.

    Returns dO like do, L and D like l.
    """
    batch, heads, nq, head_dim = o.shape
    scaled = launch.seq_major(do, do.dtype)
    lse, d = torch.empty_like(l), torch.empty_like(l)
    with launch.on_device(o):
        _delta_kernel[(batch * heads * triton.cdiv(nq, BLOCK_Q),)](
            o, do, m, l, scaled, lse, d, *o.stride(), *do.stride(), *scaled.stride(),
            batch * heads, heads, nq,
            HEAD_DIM=head_dim, BLOCK_D=tiling.padded_head_dim(head_dim), BLOCK_Q=BLOCK_Q,
            ACC=launch.triton_dtype(l.dtype), **OPTIONS,
        )  # fmt: skip
    return scaled, lse, d
