"""What a kernel allocates while it runs, beside what a GPU counts."""

import pytest
import torch

from flash_attention import flash_attention_v1, flash_attention_v2
from training import memory
from training.cuda_memory import scratch

OPS = torch.ops.flash_attention
VERSIONS = {
    "v1": (flash_attention_v1, OPS.v1_forward.default, OPS.v1_backward.default),
    "v2": (flash_attention_v2, OPS.v2_forward.default, OPS.v2_backward.default),
}
ROWS = 3 * 4096


@pytest.mark.parametrize(
    ("version", "dtype", "forward", "backward"),
    [
        # o in float32; dq in float32, a copy of dO, two statistics of each row
        ("v1", torch.bfloat16, 4 * ROWS * 64, (4 + 2) * ROWS * 64 + 8 * ROWS),
        ("v1", torch.float32, 0, 4 * ROWS * 64 + 8 * ROWS),
        ("v2", torch.bfloat16, 0, 2 * ROWS * 64 + 8 * ROWS),
    ],
    ids=str,
)
def test_scratch_is_what_the_kernels_say_they_take(version, dtype, forward, backward):
    q = torch.empty(1, 3, 4096, 64, dtype=dtype)
    _, forward_op, backward_op = VERSIONS[version]
    assert scratch(forward_op, (q, q, q)) == forward
    assert scratch(backward_op, (q, q, q, q)) == backward


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("version", VERSIONS)
def test_scratch_is_what_a_gpu_allocates(version, dtype):
    attention, forward_op, backward_op = VERSIONS[version]
    device = torch.device("cuda")
    q, k, v = (torch.randn(1, 3, 4096, 64, device=device, dtype=dtype) for _ in range(3))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    do = torch.randn_like(q)

    def extra(step) -> int:
        """Bytes at the peak of the step besides what it returns."""
        step()  # compiles
        memory.reset_peaks(device)
        before = memory.current(device)
        kept = step()
        extra = memory.peaks(device)["allocated"] - memory.current(device)
        assert memory.current(device) > before
        del kept
        return extra

    o = attention(q, k, v, causal=True)
    small = 2**16  # seeds, and what the allocator rounds up
    forward = extra(lambda: attention(q, k, v, causal=True))
    assert abs(forward - scratch(forward_op, (q, k, v))) < small
    backward = extra(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    assert abs(backward - scratch(backward_op, (do, q, k, v))) < small
