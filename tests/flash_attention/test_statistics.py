"""The ops that tie the statistics to o in a compiled graph. What users see of them is in
test_compile.py, and of eager calls in test_flash.py and test_torch_func.py."""

import pytest
import torch
from torch.library import opcheck

from tests.flash_attention.parity import make_inputs

STATISTIC = torch.ops.flash_attention.statistic.default
REFUSE = torch.ops.flash_attention.refuse_gradient.default


def test_both_ops_pass_opcheck():
    o = torch.randn(2, 3, 5, 8, requires_grad=True)
    m = torch.randn(2, 3, 5)
    # A gradient into it is an error: what would send one is left out.
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(STATISTIC, (m, o, "f"), test_utils=parts)
    opcheck(REFUSE, (torch.zeros(2, 3, 5), "f"))


@pytest.mark.parametrize("bad", [1e-30, float("nan")])
def test_only_a_gradient_of_zero_passes(bad):
    grad = torch.zeros(2, 3, 5)
    assert REFUSE(grad, "f") == 0.0
    grad[1, 2, 4] = bad
    with pytest.raises(RuntimeError, match="f has no gradient for the statistics m and l"):
        REFUSE(grad, "f")


def test_an_exported_program_has_the_statistics(flash):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return flash(q, k, v, causal=True, return_stats=True)

    q, k, v, _ = make_inputs(1, 2, 1, 20, 20, 16, torch.float32, torch.device("cpu"))
    program = torch.export.export(Module(), (q, k, v))
    for got, want in zip(program.module()(q, k, v), Module()(q, k, v), strict=True):
        torch.testing.assert_close(got, want)
