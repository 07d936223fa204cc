"""CUDA graphs: forward and backward captured once and replayed, and no wait for the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.flash_attention.parity import make_inputs

pytestmark = pytest.mark.gpu

SIZES = (2, 4, 2, 200, 200, 64)  # B, H, Hkv, Nq, Nk, D


def capture(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """``step`` as a graph, and the tensors that a replay writes its results to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: the kernels are compiled and loaded outside the graph
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def attention_step(flash, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options):
    """A call that returns o, dq, dk, dv."""

    def step() -> list[Tensor]:
        o = flash(q, k, v, **options)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]

    return step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("segmented", [False, True])
def test_replays_on_new_inputs_equal_eager_calls(flash, dtype, segmented):
    device = torch.device("cuda")
    static = make_inputs(*SIZES, dtype, device)
    segment_ids = (torch.arange(200, device=device) // 70).expand(2, 200) if segmented else None
    options = dict(causal=True, deterministic=True, segment_ids=segment_ids)
    graph, outputs = capture(attention_step(flash, *static, **options))
    for seed in (1, 2):
        fresh = make_inputs(*SIZES, dtype, device, seed=seed)
        with torch.no_grad():
            for held, new in zip(static, fresh, strict=True):
                held.copy_(new)
        graph.replay()
        want = attention_step(flash, *fresh, **options)()
        assert all(torch.equal(got, w) for got, w in zip(outputs, want, strict=True))


def test_every_replay_draws_a_new_mask_and_its_backward_uses_it(flash):
    """q = 0 makes every probability 1/64; v and dO the identity make o = P and dV = P^T."""
    q, k = (torch.zeros(2, 4, 64, 64, device="cuda", requires_grad=True) for _ in range(2))
    eye = torch.eye(64, device="cuda").expand(2, 4, 64, 64).contiguous()
    v = eye.clone().requires_grad_()
    graph, (o, _, _, dv) = capture(attention_step(flash, q, k, v, eye, dropout_p=0.3))
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(o == 0)
        assert torch.equal(masks[-1], dv.transpose(-1, -2) == 0)
        assert masks[-1].double().mean().item() == pytest.approx(0.3, abs=0.015)  # 6 sigma
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_a_replayed_mask_follows_the_seed(flash):
    q, k, v, do = make_inputs(*SIZES, torch.float32, torch.device("cuda"))
    options = dict(dropout_p=0.3, deterministic=True)
    graph, outputs = capture(attention_step(flash, q, k, v, do, **options))
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        graph.replay()
        runs.append([t.clone() for t in outputs])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_no_call_waits_for_the_device(flash, dropout_p):
    device = torch.device("cuda")
    segment_ids = torch.zeros(2, 200, dtype=torch.int64, device=device)
    step = attention_step(
        flash,
        *make_inputs(*SIZES, torch.bfloat16, device),
        causal=True,
        dropout_p=dropout_p,
        segment_ids=segment_ids,
    )
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_reduce_overhead_mode_replays_graphs_of_its_own(flash, dropout_p):
    """torch.compile captures CUDA graphs itself there; the op must not keep it from that."""
    torch._dynamo.reset()
    q, k, v, do = make_inputs(*SIZES, torch.float32, torch.device("cuda"))

    def attention(q, k, v):
        return flash(q * 2.0, k, v, causal=True, dropout_p=dropout_p, deterministic=True)

    call = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    want = attention(q, k, v)
    want = [want.detach(), *torch.autograd.grad(want, (q, k, v), do)]
    last = None
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        o = call(q, k, v)
        grads = torch.autograd.grad(o, (q, k, v), do)
        got = [t.detach().clone() for t in (o, *grads)]
        if dropout_p == 0.0:
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
        else:  # o is linear in v for a given mask: <dO, o> = <dV, v>
            left = (do.double() * got[0].double()).sum()
            right = (got[3].double() * v.detach().double()).sum()
            torch.testing.assert_close(left, right, rtol=1e-4, atol=0.01)
            assert last is None or not torch.equal(got[0], last)
            last = got[0]
