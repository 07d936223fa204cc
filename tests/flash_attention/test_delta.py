"""What backward needs of every row, beside float64."""

import pytest
import torch

pytest.importorskip("triton")

kernels = pytest.mark.parametrize(
    "device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def made(dtype: torch.dtype, device: torch.device, m: float):
    """o, do [2, 3, 70, 24], do expanded over batch; row maxima about m, row sums up to 1000."""
    generator = torch.Generator().manual_seed(0)
    o, do = torch.randn(2, 2, 3, 70, 24, generator=generator).to(device, dtype)
    maxima = m + torch.randn(2, 3, 70, generator=generator).to(device)
    sums = 1 + 999 * torch.rand(2, 3, 70, generator=generator).to(device)
    return o, do[:1].expand(2, -1, -1, -1), maxima, sums


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [0.0, -300.0, 900.0])
def test_half_precision_do_stays_as_it_is_beside_scores_below_a_thousand(m, dtype, device):
    from flash_attention.delta import delta

    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts float32 off where a GPU rounds to bfloat16")
    o, do, m, l = made(dtype, device, m)
    do, o[..., 0] = do.clone(), 0
    do[..., 0] = torch.finfo(dtype).max  # and does not overflow
    scaled, lse, row_delta = delta(o, do, m, l)
    assert torch.equal(scaled, do)
    torch.testing.assert_close(lse.double(), m.double() + l.double().log2(), rtol=2e-7, atol=2e-6)
    want = (o.double() * do.double()).sum(-1)
    torch.testing.assert_close(row_delta.double(), want, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("m", [0.0, 1e3, -1e5, 1e6, -1e7, 1e8, 2e8, 1e30])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 2.0**-10)], ids=str
)
def test_what_the_log_sum_exp_has_no_bits_for_is_in_do(m, dtype, error, device):
    """P dO is 2^(s - m) / l dO in the end; s = m here. Where m's neighbours are 16 apart, the
    nearest L may be 8 too large, and 2^8 dO has no float16."""
    from flash_attention.delta import delta

    o, do, m, l = made(dtype, device, m)
    do = 1000 * do
    scaled, lse, row_delta = delta(o, do, m, l)
    p = torch.exp2(m.double() - lse.double())[..., None]
    assert p.max() <= 1
    assert (scaled.abs() <= do.abs()).all()
    want = do.double() / l.double()[..., None]
    torch.testing.assert_close(p * scaled, want, rtol=error, atol=0.0)
    want = (o.double() * scaled.double()).sum(-1)
    torch.testing.assert_close(row_delta.double(), want, rtol=1e-5, atol=1e-2)


@kernels
@pytest.mark.parametrize(("m", "least"), [(16104.0, 0.9996), (1.08e7, 0.7)])
def test_do_does_not_grow_where_rounding_made_l_less_than_one(m, least, device):
    """As where forward's fused multiply-add has more bits than the maximum that it subtracts."""
    from flash_attention.delta import delta

    do = torch.full((1, 1, 16, 16), 65504.0, dtype=torch.float16, device=device)
    m, l = torch.full((1, 1, 16), m, device=device), torch.linspace(least, 1, 16, device=device)
    l = l.expand_as(m).contiguous()
    scaled, lse, _ = delta(torch.zeros_like(do), do, m, l)
    assert (scaled <= do).all()
    p = torch.exp2(m.double() - lse.double())[..., None]
    torch.testing.assert_close(p * scaled, do / l.double()[..., None], rtol=2.0**-10, atol=0.0)


@kernels
def test_a_row_that_sees_no_key_has_an_infinite_log_sum_exp_and_a_do_of_zero(device):
    from flash_attention.delta import delta

    o, do, m, l = made(torch.float32, device, 0.0)
    m[0, 1, 5], l[0, 1, 5], o[0, 1, 5] = -torch.inf, 0.0, 0.0
    do = do.clone()
    do[0, 1, 5] = torch.nan
    scaled, lse, row_delta = delta(o, do, m, l)
    assert lse[0, 1, 5] == torch.inf
    assert row_delta[0, 1, 5] == 0.0
    assert (scaled[0, 1, 5] == 0.0).all()
    assert scaled.isfinite().all()
    assert lse.isfinite().sum() == lse.numel() - 1


@kernels
def test_every_product_is_rounded_before_the_sum(device):
    """A fused multiply-add rounds one product of two: which one differs by thread, where threads
    share a row, and so would what is stored (triton#7264). Rows of 9 are at no multiple of 16, so
    that a thread holds one product; columns 0 and 8 meet first."""
    from flash_attention.delta import delta

    generator = torch.Generator().manual_seed(0)
    o, do = torch.randn(2, 2, 3, 70, 9, generator=generator).to(device)
    o[..., 1:8] = 0.0
    m, l = torch.zeros(2, 3, 70, device=device), torch.ones(2, 3, 70, device=device)
    _, _, row_delta = delta(o, do, m, l)
    products = o * do
    assert torch.equal(row_delta, products[..., 0] + products[..., 8])
