"""Which rows meet a block of keys when segment_ids are given: whole blocks of others are skipped.

Segment ids may come in any order. A row may see a key of the block only if its id lies between the
least and the greatest id there; for packed documents, whose ids ascend, this is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # rows looked at in one go


@triton.jit
def _spans_kernel(
    segment_ptr, span_ptr, blocks, n, BLOCK_KV: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program b * blocks + j: the span of K/V block j."""
    program = tl.program_id(0)
    segment_ptr += (program // blocks).to(tl.int64) * n
    # Positions beyond n stand for the last one, which changes neither a minimum nor a maximum.
    cols = tl.minimum(program % blocks * BLOCK_KV + tl.arange(0, BLOCK_KV), n - 1)
    keys = tl.load(segment_ptr + cols)
    least, greatest = tl.min(keys, axis=0), tl.max(keys, axis=0)
    first, stop, count = n, 0, 0
    for r0 in range(0, n, CHUNK):
        rows = r0 + tl.arange(0, CHUNK)
        ids = tl.load(segment_ptr + rows, mask=rows < n, other=0)
        inside = (rows < n) & (ids >= least) & (ids <= greatest)
        first = tl.minimum(first, tl.min(tl.where(inside, rows, n), axis=0))
        stop = tl.maximum(stop, tl.max(tl.where(inside, rows + 1, 0), axis=0))
        count += tl.sum(inside.to(tl.int32), axis=0)
    one_segment = (least == greatest) & (count == stop - first)
    span_ptr += program * 3
    tl.store(span_ptr, first)
    tl.store(span_ptr + 1, stop)
    tl.store(span_ptr + 2, one_segment.to(tl.int32))


def spans(segment_ids: Tensor, block_kv: int) -> Tensor:
    """For each block of block_kv keys: the first row that may see one of them, one past the last
    such row, and 1 if these rows and keys are all of one segment (else 0).

    segment_ids ``[B, N]``, contiguous. Returns ``[B, ceil(N / block_kv), 3]`` int32.
    """
    batch, n = segment_ids.shape
    blocks = triton.cdiv(n, block_kv)
    out = torch.empty((batch, blocks, 3), dtype=torch.int32, device=segment_ids.device)
    _spans_kernel[(batch * blocks,)](segment_ids, out, blocks, n, BLOCK_KV=block_kv, CHUNK=CHUNK)
    return out
