"""Tensors without data, fake and meta: the same shapes, dtypes and strides as the real result."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.flash_attention.parity import make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _contiguous(q, k, v):
    return q, k, v


def _packed(q, k, v):
    """Slices of one [B, N, H + 2 Hkv, D] projection: one head after the other in a row."""
    qkv = torch.cat([t.transpose(1, 2) for t in (q, k, v)], dim=2)
    parts = qkv.split([t.shape[1] for t in (q, k, v)], dim=2)
    return [t.transpose(1, 2) for t in parts]


# name: (sizes B, H, Hkv, Nq, Nk, D; dtype; layout; options)
CASES = {
    "grouped heads": ((2, 6, 2, 10, 10, 16), torch.float32, _contiguous, {}),
    "half": ((2, 4, 4, 10, 10, 24), torch.bfloat16, _contiguous, dict(causal=True)),
    "packed": ((2, 4, 2, 10, 10, 16), torch.float16, _packed, dict(causal=True)),
    "more keys": ((2, 4, 2, 10, 20, 16), torch.float16, _contiguous, dict(causal=True)),
    "more queries": ((2, 2, 2, 20, 10, 8), torch.float64, _contiguous, dict(causal=True)),
    "dropout": ((2, 4, 2, 10, 10, 16), torch.float16, _packed, dict(dropout_p=0.1)),
    "one head": ((1, 1, 1, 10, 10, 16), torch.float32, _contiguous, dict(scale=-0.5)),
    "no keys": ((2, 4, 2, 10, 0, 16), torch.float16, _contiguous, {}),
}


def _real_inputs(case: str, device: torch.device) -> list[Tensor]:
    sizes, dtype, layout, _ = CASES[case]
    qkv = layout(*(t.detach() for t in make_inputs(*sizes, dtype, device)[:3]))
    return [t.requires_grad_() for t in qkv]


def _forward_and_backward(flash, q: Tensor, k: Tensor, v: Tensor, **options) -> list[Tensor]:
    o, m, l = flash(q, k, v, return_stats=True, **options)
    return [o, m, l, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]


def _looks(tensors: list[Tensor]) -> list[tuple]:
    """Shape, dtype, strides; the stride of a dimension of size 1 says nothing and is left out."""
    return [
        (t.shape, t.dtype, [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1])
        for t in tensors
    ]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_look_like_the_real_ones(flash, case, where):
    real = _real_inputs(case, torch.device(where))
    options = CASES[case][3]
    want = _looks(_forward_and_backward(flash, *real, **options))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in real]
        got = _forward_and_backward(flash, *fake, **options)
    assert _looks(got) == want
    assert {t.device.type for t in got} == {where}


@pytest.mark.parametrize("case", CASES)
def test_meta_tensors_look_like_the_real_ones(flash, case):
    real = _real_inputs(case, torch.device("cpu"))
    options = CASES[case][3]
    want = _looks(_forward_and_backward(flash, *real, **options))
    meta = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=True)
        for t in real
    ]
    got = _forward_and_backward(flash, *meta, **options)
    assert _looks(got) == want
    assert {t.device.type for t in got} == {"meta"}


@pytest.mark.parametrize("case", CASES)
def test_fake_cuda_tensors_need_no_gpu(flash, case):
    """Nothing on the way asks the device. Autograd itself does, so backward is called as an op."""
    real = _real_inputs(case, torch.device("cpu"))
    options = CASES[case][3]
    want = _looks(_forward_and_backward(flash, *real, **options))
    with FakeTensorMode():
        q, k, v = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in real
        )
        o, m, l = flash(q, k, v, return_stats=True, **options)
        grads = flash.backward_op(
            o, q, k, v, o, m, l, None, None, False, 1.0, 0.0, False, None, None, None
        )
        assert _looks([o, m, l, *grads]) == want
    assert {t.device.type for t in (o, m, l, *grads)} == {"cuda"}
