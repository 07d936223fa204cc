"""FlashAttention V1 among PyTorch's tools: opcheck, compile, fake tensors, checkpointing."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from flash_attention import FlashAttentionV1, flash_attention_v1
from flash_attention.dropout import draw_seed
from tests.flash_attention.parity import make_inputs, results

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_opcheck_finds_nothing(where, dtype, dropout_p):
    q, k, v, _ = make_inputs(2, 4, 2, 33, 33, 16, dtype, torch.device(where))
    segment_ids = torch.arange(33, device=where).expand(2, 33).contiguous() // 10
    seed = draw_seed(q.device) if dropout_p else None
    for segments in (None, segment_ids):
        arguments = (q, k, v, segments, seed, True, 0.25, dropout_p, True, None, None, None)
        opcheck(torch.ops.flash_attention.v1_forward.default, arguments)


@pytest.mark.parametrize("where", DEVICES)
def test_compile_sees_one_graph_and_gives_the_eager_result(where):
    device = torch.device(where)
    q, k, v, do = make_inputs(1, 2, 2, 70, 70, 16, torch.float32, device)

    def attention(q, k, v):
        return flash_attention_v1(q * 2.0, k, v, causal=True, deterministic=True) + 1.0

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    want, got = results(attention, q, k, v, do), results(compiled, q, k, v, do)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_fake_tensors_know_shape_dtype_and_strides():
    real = make_inputs(2, 4, 2, 10, 20, 16, torch.float16, torch.device("cpu"))[:3]
    want = flash_attention_v1(*real, return_stats=True)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in real]
        got = flash_attention_v1(*fake, return_stats=True)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("where", DEVICES)
def test_activation_checkpointing_replays_the_dropout_mask(where):
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device(where))

    def attention(q, k, v):
        return flash_attention_v1(q, k, v, causal=True, dropout_p=0.3, deterministic=True)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)

    torch.manual_seed(3)
    want = results(attention, q, k, v, do)
    torch.manual_seed(3)
    got = results(checkpointed, q, k, v, do)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_forward_mode_differentiation_is_refused():
    q, k, v, _ = make_inputs(1, 1, 1, 8, 8, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: flash_attention_v1(q, k, v), (q.detach(),), (torch.ones_like(q),))


def test_the_output_of_a_transformer_needs_no_copy():
    q, k, v, _ = make_inputs(2, 4, 4, 10, 10, 16, torch.float16, torch.device("cpu"))
    o = flash_attention_v1(q, k, v).transpose(1, 2)
    assert o.is_contiguous()


def test_the_package_works_where_there_is_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch
from flash_attention import flash_attention_v1, naive_attention
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
o = flash_attention_v1(q, k, v, causal=True)
torch.testing.assert_close(o, naive_attention(q, k, v, causal=True))
o.sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_module_passes_its_knobs_on():
    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    module = FlashAttentionV1(block_q=16, block_kv=32)
    assert not list(module.parameters())
    want = flash_attention_v1(q, k, v, causal=True, block_q=16, block_kv=32)
    assert torch.equal(module(q, k, v), want)
    assert not torch.equal(want, flash_attention_v1(q, k, v, causal=True))  # the knobs have effect
