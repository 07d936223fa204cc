"""Forward and backward of some attentions at some shapes: the program that ncu watches.

    ncu --profile-from-start off ... python -m scripts.common.io_probe \\
        '{"attention": "flash_v1", "batch": 1, "heads": 32, "seq_len": 4096, "head_dim": 64}'

Each argument is a case: JSON, which may also say "causal", "forward_only", "block_q" and
"block_kv". A case is compiled and allocated once before the profiler is started for it. A kernel
named ``_boundary`` ends its forward, another one its backward, also where there is none.
"""

import json
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

import flash_attention
from flash_attention import naive_attention

BOUNDARY = "_boundary"


@triton.jit
def _boundary(ptr):
    tl.store(ptr, 0)


def attend(name: str, block_q: int | None, block_kv: int | None):
    """f(q, k, v, causal) of that name. Blocks: of the flash attentions."""
    if name == "naive":
        return lambda q, k, v, causal: naive_attention(q, k, v, causal=causal)
    function = getattr(flash_attention, name.replace("flash", "flash_attention"))
    return lambda q, k, v, causal: function(
        q, k, v, causal=causal, block_q=block_q, block_kv=block_kv
    )


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


def watched(case: dict, mark: Tensor) -> None:
    """Run one case twice, the second time with the profiler on."""
    attention = attend(case["attention"], case.get("block_q"), case.get("block_kv"))
    shape = (case[name] for name in ("batch", "heads", "seq_len", "head_dim"))
    q, k, v, do = inputs(*shape, mark.device)

    def run() -> None:
        o = attention(q, k, v, case.get("causal", False))
        _boundary[(1,)](mark)
        if not case.get("forward_only"):
            torch.autograd.grad(o, (q, k, v), do)
        _boundary[(1,)](mark)

    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main(argv: list[str]) -> None:
    mark = torch.zeros(1, dtype=torch.int32, device="cuda")
    for text in argv:
        watched(json.loads(text), mark)
        torch.cuda.empty_cache()  # ncu too needs memory, to run a kernel several times


if __name__ == "__main__":
    main(sys.argv[1:])
