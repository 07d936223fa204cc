"""The benchmark's check finds a fault in any part of what it is about to time."""

import pytest
import torch

from flash_attention import flash_attention_v1, naive_attention
from scripts.common import attention_check

N = 500  # more than three times the rows of one part


def inputs(dtype=torch.float32, n=N):
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(4, 2, 3, n, 16, generator=generator).to(dtype)
    return [t.requires_grad_(i < 3) for i, t in enumerate(made.unbind())]


def naive(q, k, v, causal):
    return naive_attention(q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 100, N])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_attention_passes(dtype, n, causal):
    for attention in (naive_attention, flash_attention_v1):
        given = inputs(dtype, n)
        assert attention_check.is_right(
            lambda q, k, v, c, f=attention: f(q, k, v, causal=c), *given, causal
        )


def zeroed(place):
    def attention(q, k, v, causal):
        kept = torch.ones_like(q)
        kept[place] = 0.0
        return naive(q, k, v, causal) * kept

    return attention


def halved(index):
    """The gradient of one of q, k and v is half of what it should be."""

    def attention(*args):
        *qkv, causal = args
        qkv[index] = 0.5 * qkv[index] + 0.5 * qkv[index].detach()
        return naive(*qkv, causal)

    return attention


FAULTS = {
    "first rows": zeroed((0, 0, slice(0, 10))),
    "middle rows": zeroed((0, 0, slice(245, 255))),
    "last rows": zeroed((0, 0, slice(N - 10, N))),
    "last head": zeroed((1, 2)),
    "dq": halved(0),
    "dk": halved(1),
    "dv": halved(2),
    "NaN": lambda q, k, v, causal: naive(q, k, v, causal) * float("nan"),
    "mask": lambda q, k, v, causal: naive(q, k, v, not causal),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, causal):
    assert not attention_check.is_right(FAULTS[fault], *inputs(), causal)
