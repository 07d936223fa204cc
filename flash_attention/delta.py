"""What backward needs of every row before it starts, in one pass over O and dO (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attention import launch, tiling
from flash_attention.tiles import load_rows, locate

BLOCK_Q = 64


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, l_ptr, delta_ptr, inv_ptr,
    stride_ob, stride_oh, stride_on, stride_od,
    stride_gb, stride_gh, stride_gn, stride_gd,
    batch_heads, heads, nq,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program (batch * H + head, block of rows)."""
    head, block = locate(batch_heads)
    b, h = head // heads, head % heads
    o_ptr += b * stride_ob + h * stride_oh
    do_ptr += b * stride_gb + h * stride_gh
    r0 = block * BLOCK_Q
    rows = r0 + tl.arange(0, BLOCK_Q)
    oi = load_rows(o_ptr, stride_on, stride_od, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D).to(ACC)
    doi = load_rows(do_ptr, stride_gn, stride_gd, r0, nq, BLOCK_Q, HEAD_DIM, BLOCK_D).to(ACC)
    tl.store(delta_ptr + head * nq + rows, tl.sum(oi * doi, axis=1), mask=rows < nq)
    l = tl.load(l_ptr + head * nq + rows, mask=rows < nq, other=0.0)
    inv = 1.0 / tl.where(l == 0.0, float("inf"), l)  # 0 for a row without keys
    tl.store(inv_ptr + head * nq + rows, inv, mask=rows < nq)


def delta(o: Tensor, do: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """D = rowsum(dO o O) and 1 / l (0 where l is), each ``[B, H, Nq]`` like l.

    o and do ``[B, H, Nq, D]``, any strides. Algorithm 4 of arXiv:2205.14135 has both inside the
    loop over K/V blocks (lines 13 and 19); neither depends on the block.
    """
    batch, heads, nq, head_dim = o.shape
    d, inv = torch.empty_like(l), torch.empty_like(l)
    with launch.on_device(o):
        _delta_kernel[(batch * heads * triton.cdiv(nq, BLOCK_Q),)](
            o, do, l, d, inv, *o.stride(), *do.stride(), batch * heads, heads, nq,
            HEAD_DIM=head_dim, BLOCK_D=tiling.padded_head_dim(head_dim), BLOCK_Q=BLOCK_Q,
            ACC=launch.triton_dtype(l.dtype),
        )  # fmt: skip
    return d, inv
