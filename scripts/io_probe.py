"""One forward and backward of one attention at one shape: the program that ncu watches.

    ncu --profile-from-start off ... python -m scripts.io_probe --attention flash_v1 --seq-len 4096

Everything is compiled and allocated once before the profiler starts. A kernel named ``_boundary``
stands between forward and backward.
"""

import argparse

import torch
import triton
import triton.language as tl
from torch import Tensor

import flash_attention
from flash_attention import flash_attention_v1, naive_attention

BOUNDARY = "_boundary"


@triton.jit
def _boundary(ptr):
    tl.store(ptr, 0)


def attend(name: str, block_q: int | None, block_kv: int | None):
    """f(q, k, v, causal) of that name."""
    if name == "naive":
        return lambda q, k, v, causal: naive_attention(q, k, v, causal=causal)
    if name == "flash_v1":
        return lambda q, k, v, causal: flash_attention_v1(
            q, k, v, causal=causal, block_q=block_q, block_kv=block_kv
        )
    function = getattr(flash_attention, name.replace("flash", "flash_attention"))
    return lambda q, k, v, causal: function(q, k, v, causal=causal)


def inputs(batch: int, heads: int, n: int, head_dim: int, device: torch.device) -> list[Tensor]:
    """q, k, v, which require gradients, and dO, in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    made = [
        torch.randn(
            batch, heads, n, head_dim, dtype=torch.bfloat16, device=device, generator=generator
        )
        for _ in range(4)
    ]
    return [t.requires_grad_(i < 3) for i, t in enumerate(made)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--attention", required=True)
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=32)
    add("--seq-len", type=int, required=True)
    add("--head-dim", type=int, default=64)
    add("--block-q", type=int)
    add("--block-kv", type=int)
    add("--causal", action="store_true")
    add("--forward-only", action="store_true")
    args = parser.parse_args()
    attention = attend(args.attention, args.block_q, args.block_kv)
    device = torch.device("cuda")
    q, k, v, do = inputs(args.batch, args.heads, args.seq_len, args.head_dim, device)
    mark = torch.zeros(1, dtype=torch.int32, device=device)

    def run() -> None:
        o = attention(q, k, v, args.causal)
        _boundary[(1,)](mark)
        if not args.forward_only:
            torch.autograd.grad(o, (q, k, v), do)

    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
