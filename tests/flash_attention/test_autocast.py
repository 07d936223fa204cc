"""The autocast rule: q, k and v are cast to the autocast dtype, and nothing inside the op is.

So a call under autocast equals a call on tensors cast by hand, bit for bit, and its gradients
come in the inputs' own dtypes.
"""

import pytest
import torch
import torch.nn.functional as F

from flash_attention import (
    flash_attention_v1,
    flash_attention_v2,
    naive_attention,
    sdpa_attention,
)
from tests.flash_attention.parity import make_inputs, results

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF = [torch.float16, torch.bfloat16]
BACKENDS = [naive_attention, sdpa_attention, flash_attention_v1, flash_attention_v2]


@pytest.fixture(params=DEVICES)
def inputs(request):
    """q float32, k bfloat16, v float16, all with gradients, and a float32 dO."""
    device = torch.device(request.param)
    q, k, v, do = make_inputs(2, 4, 2, 70, 70, 16, torch.float32, device)
    k, v = (t.detach().to(dtype).requires_grad_() for t, dtype in ((k, HALF[1]), (v, HALF[0])))
    return q, k, v, do


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_mixed_inputs_are_cast_and_gradients_come_in_their_own_dtypes(flash, inputs, dtype):
    *qkv, do = inputs

    def autocast(q, k, v):
        with torch.autocast(q.device.type, dtype=dtype):
            return flash(q, k, v, causal=True, deterministic=True)

    def by_hand(q, k, v):
        return flash(*(t.to(dtype) for t in (q, k, v)), causal=True, deterministic=True)

    got = results(autocast, *qkv, do.to(dtype))
    want = results(by_hand, *qkv, do.to(dtype))
    assert [t.dtype for t in got.values()] == [dtype, torch.float32, HALF[1], HALF[0]]
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", DEVICES)
def test_backward_called_under_autocast_is_no_less_exact(flash, where, dtype):
    q, k, v, do = make_inputs(1, 2, 2, 70, 70, 16, dtype, torch.device(where))
    o = flash(q, k, v, causal=True, deterministic=True)
    want = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    with torch.autocast(where, dtype=torch.bfloat16):
        got = torch.autograd.grad(o, (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("where", DEVICES)
def test_float64_stays_float64(where, attention):
    q, k, v, _ = make_inputs(1, 2, 2, 20, 20, 16, torch.float64, torch.device(where))
    with torch.autocast(where, dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.float64  # PyTorch's rule
        o = attention(q, k, v)
    assert torch.equal(o, attention(q, k, v))


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize(
    ("dtypes", "error", "message"),
    [
        ("float64 float32 float32", ValueError, "same dtype; got torch.float64, torch.bfloat16"),
        ("float32 float64 float64", ValueError, "same dtype; got torch.bfloat16, torch.float64"),
        ("int64 int64 int64", TypeError, "must be float16, bfloat16, float32 or float64"),
    ],
)
def test_what_pytorch_does_not_cast_is_not_cast(attention, dtypes, error, message):
    qkv = [torch.zeros(1, 1, 4, 8, dtype=getattr(torch, dtype)) for dtype in dtypes.split()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*qkv)
        with pytest.raises(error, match=message):
            attention(*qkv)


def test_autocast_switched_off_inside_leaves_the_dtype(flash):
    q, k, v, _ = make_inputs(1, 2, 2, 20, 20, 16, torch.float32, torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert flash(q, k, v).dtype == torch.float32
