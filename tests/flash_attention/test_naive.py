"""Standard attention against closed forms: it is the reference of every other test."""

import itertools

import pytest
import torch

from flash_attention import naive_attention
from tests.flash_attention.parity import make_inputs

CPU = torch.device("cpu")


def one_row(q, k, v, scale: float):
    """One query, written out as sums over the keys: sum_j e^{s_j} v_j / sum_j e^{s_j}."""
    weights = [torch.exp(scale * (q * key).sum()) for key in k]
    return sum(w * value for w, value in zip(weights, v, strict=True)) / sum(weights)


@pytest.mark.parametrize(("nq", "nk"), [(4, 4), (3, 5)])
def test_causal_rows_are_written_out_sums_over_the_keys_up_to_the_diagonal(nq, nk):
    q, k, v, _ = make_inputs(1, 4, 2, nq, nk, 8, torch.float64, CPU)
    o = naive_attention(q, k, v, causal=True)
    for h, i in itertools.product(range(4), range(nq)):
        seen = i + 1 + nk - nq  # bottom-right: the last query sees the last key
        want = one_row(q[0, h, i], k[0, h // 2, :seen], v[0, h // 2, :seen], 8**-0.5)
        torch.testing.assert_close(o[0, h, i], want)


def test_rows_without_a_key_are_zero_and_pass_no_gradient():
    q, k, v, do = make_inputs(1, 1, 1, 5, 2, 8, torch.float64, CPU)
    o = naive_attention(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    assert (o[:, :, :3] == 0).all()
    assert (dq[:, :, :3] == 0).all()
    assert all(t.isfinite().all() for t in (dk, dv))


def test_dropout_drops_its_fraction_and_keeps_the_mean():
    torch.manual_seed(0)
    q = k = torch.zeros(1, 1, 400, 8)
    v = torch.eye(400).expand(1, 1, 400, 400)
    p = naive_attention(q.expand(1, 1, 400, 8), k, v[..., :8], dropout_p=0.3)
    zero = (p == 0).double().mean()
    assert abs(zero - 0.3) < 0.03
    assert abs(p.mean() * 400 - 1) < 0.05
