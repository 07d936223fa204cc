"""How a kernel is judged: against naive attention in float64, by a rule that sets its own bound.

The rule is FlashAttention's (tests/test_flash_attn.py): an output may be twice, a gradient three
times as wrong as naive attention in the kernel's own dtype, plus the rounding of the result
itself. In float32, which that suite leaves out, naive attention is wrong by a few units in the
last place and its luck decides: the factor is 5 there, and naive attention's error counts as two
units of the largest value at least (at head dim 1 a GPU's naive attention came to half of one).
"""

import torch
from torch import Tensor

from flash_attention import naive_attention


def make_inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    nq: int,
    nk: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that require gradients, and dO."""
    generator = torch.Generator().manual_seed(seed)

    def normal(h: int, n: int) -> Tensor:
        t = torch.randn(batch, h, n, head_dim, generator=generator, dtype=torch.float64)
        return t.to(device=device, dtype=dtype)

    q, k, v, do = (
        normal(h, n) for h, n in ((heads, nq), (kv_heads, nk), (kv_heads, nk), (heads, nq))
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def results(attention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options) -> dict[str, Tensor]:
    """Output and gradients, by name."""
    o = attention(q, k, v, **options)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def upcast(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def assert_as_exact_as_naive(attention, q, k, v, do, reference=naive_attention, **options) -> None:
    """attention(q, k, v) and its gradients are within the rule's bound of the float64 result."""
    got = results(attention, q, k, v, do, **options)
    own = results(reference, q, k, v, do, **options)
    exact = results(reference, *upcast(q, k, v, do), **options)
    for name, ref in exact.items():
        assert_within_bound(name, got[name], own[name], ref)


def assert_within_bound(
    name: str, got: Tensor, own: Tensor, ref: Tensor, floor: float = 0.0
) -> None:
    """The rule. floor is added to the bound, for cases where naive attention's error is 0."""
    assert got.dtype == own.dtype
    assert got.shape == ref.shape
    if ref.numel() == 0:
        return
    error = (got.double() - ref).abs().max().item()
    own_error = (own.double() - ref).abs().max().item()
    rounded = ref.to(own.dtype)
    atol = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    factor = 5 if own.dtype == torch.float32 else 2 if name == "o" else 3
    if own.dtype == torch.float32:
        own_error = max(own_error, 2 * torch.finfo(own.dtype).eps * ref.abs().max().item())
    bound = factor * own_error + atol + floor
    assert error <= bound, f"{name}: error {error:.3g} is above {bound:.3g}"  # NaN fails too
