"""PyTorch's attention under this package's contract equals standard attention in float64."""

import pytest
import torch

from flash_attention import naive_attention, sdpa_attention
from tests.flash_attention.parity import make_inputs, results


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("nq", "nk"), [(20, 20), (20, 33), (33, 20), (1, 9), (5, 0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_output_and_gradients_match_naive(causal, scale, nq, nk, heads, kv_heads):
    inputs = make_inputs(2, heads, kv_heads, nq, nk, 16, torch.float64, torch.device("cpu"))
    want = results(naive_attention, *inputs, causal=causal, scale=scale)
    got = results(sdpa_attention, *inputs, causal=causal, scale=scale)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("causal", [False, True])
def test_segments_match_naive(causal):
    inputs = make_inputs(2, 2, 2, 30, 30, 16, torch.float64, torch.device("cpu"))
    segment_ids = (torch.arange(30) // 7).expand(2, 30)
    want = results(naive_attention, *inputs, causal=causal, segment_ids=segment_ids)
    got = results(sdpa_attention, *inputs, causal=causal, segment_ids=segment_ids)
    for name in want:
        torch.testing.assert_close(got[name], want[name])
