"""torch.compile over each version of FlashAttention: one graph, the eager result, few compilations.

On the CPU the graph runs as traced (aot_eager); on a GPU Inductor compiles what surrounds the op.
"""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attention import naive_attention
from tests.flash_attention.parity import make_inputs, results
from tests.flash_attention.versions import V2

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [24, 17, 33, 64, 1, 70, 128, 5]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend(where: str) -> str:
    return "inductor" if where == "cuda" else "aot_eager"


def compiled(function, where: str, **options):
    return torch.compile(function, fullgraph=True, backend=backend(where), **options)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("segmented", [False, True])
def test_one_graph_gives_the_eager_result(flash, where, segmented):
    device = torch.device(where)
    inputs = make_inputs(1, 4, 2, 70, 70, 16, torch.float32, device)
    segment_ids = (torch.arange(70, device=device) // 20)[None] if segmented else None

    def attention(q, k, v):
        o = flash(q * 2.0, k, v, causal=True, deterministic=True, segment_ids=segment_ids)
        return o + 1.0

    want = results(attention, *inputs)
    got = results(compiled(attention, where), *inputs)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
def test_the_statistics_are_those_of_the_eager_call(flash, where):
    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device(where))

    def attention(q, k, v):
        return flash(q, k, v, causal=True, return_stats=True)

    for got, want in zip(compiled(attention, where)(q, k, v), attention(q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("which", [1, 2], ids=["m", "l"])
def test_a_gradient_into_the_statistics_is_refused(flash, where, which):
    """A compiled graph hands zeros back for outputs that nothing followed: those must pass."""
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device(where))

    def attention(q, k, v):
        return flash(q, k, v, causal=True, return_stats=True)

    fast = compiled(attention, where)
    want = results(lambda *qkv: attention(*qkv)[0], q, k, v, do)
    got = results(lambda *qkv: fast(*qkv)[0], q, k, v, do)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)
    outputs = fast(q, k, v)
    with pytest.raises(RuntimeError, match="no gradient for the statistics"):
        (outputs[0].sum() + outputs[which].square().sum()).backward()


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
def test_autocast_holds_inside_the_graph(flash, where):
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device(where))

    def attention(q, k, v):
        with torch.autocast(where, dtype=torch.bfloat16):
            return flash(q, k, v, causal=True, deterministic=True)

    want = results(attention, q, k, v, do.bfloat16())
    got = results(compiled(attention, where), q, k, v, do.bfloat16())
    assert got["o"].dtype == torch.bfloat16
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def dropped_entries(attention, where: str) -> tuple[Tensor, Tensor]:
    """Which entries of P ``[2, 4, 64, 64]`` forward and backward drop.

    With q = 0 every probability is 1/64; with v and dO the identity, o is P and dV is P^T.
    """
    q, k = (torch.zeros(2, 4, 64, 64, device=where) for _ in range(2))
    v = torch.eye(64, device=where).expand(2, 4, 64, 64).clone().requires_grad_()
    o = attention(q, k, v)
    (dv,) = torch.autograd.grad(o, v, torch.eye(64, device=where).expand_as(o))
    return o == 0, dv.transpose(-1, -2) == 0


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
def test_a_compiled_call_draws_a_new_mask_each_time_and_backward_replays_it(flash, where):
    def attention(q, k, v):
        return flash(q, k, v, dropout_p=0.3)

    call = compiled(attention, where)
    masks = []
    for seed in (0, None, 0):
        if seed is not None:
            torch.manual_seed(seed)
        forward, backward = dropped_entries(call, where)
        assert torch.equal(forward, backward)
        assert forward.double().mean().item() == pytest.approx(0.3, abs=0.015)  # 6 sigma
        masks.append(forward)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
def test_an_activation_checkpoint_inside_the_graph_replays_the_mask(flash, where):
    def attention(q, k, v):
        def inner(q, k, v):
            return flash(q, k, v * 1.0, dropout_p=0.3)

        return torch.utils.checkpoint.checkpoint(inner, q, k, v, use_reentrant=False)

    forward, backward = dropped_entries(compiled(attention, where), where)
    assert torch.equal(forward, backward)
    assert 0.2 < forward.double().mean().item() < 0.4


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
def test_a_second_scale_breaks_no_graph(flash, where):
    q, k, v, _ = make_inputs(1, 2, 2, 20, 20, 16, torch.float32, torch.device(where))

    def attention(q, k, v, scale):
        return flash(q, k, v, scale=scale)

    call = compiled(attention, where)
    for scale in (0.1, 0.2, 0.3, -0.4, 0.0):
        want = naive_attention(q, k, v, scale=scale)
        torch.testing.assert_close(call(q, k, v, scale), want, rtol=1e-4, atol=1e-5)


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_eight_lengths_take_at_most_three_compilations(flash, where, dynamic):
    """The first length, any length, and the length 1, which PyTorch always treats apart."""
    counter = CompileCounterWithBackend(backend(where))

    def attention(q, k, v):
        return flash(q, k, v, causal=True, deterministic=True)

    call = torch.compile(attention, fullgraph=True, backend=counter, dynamic=dynamic)
    for n in LENGTHS:
        inputs = make_inputs(1, 2, 2, n, n, 16, torch.float32, torch.device(where))
        want, got = results(naive_attention, *inputs, causal=True), results(call, *inputs)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)
    assert counter.frame_count <= 3


@pytest.mark.gpu
def test_the_kernels_are_not_compiled_for_every_length(flash):
    """A variant for lengths that 16 divides and one for others, each in V1 for one split, splits
    that 16 divides and others: 6 of a kernel, however many lengths there are."""
    from flash_attention import v1, v2
    from flash_attention.delta import _delta_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    if flash is V2:
        own = (v2.forward._forward_kernel, v2.backward._dk_dv_kernel, v2.backward._dq_kernel)
    else:
        own = (v1.forward._forward_kernel, v1.backward._backward_kernel)
    kernels = (*own, _delta_kernel)

    def variants() -> list[int]:
        return [len(kernel.device_caches[device.index][0]) for kernel in kernels]

    before = variants()
    lengths = [*range(100, 4100, 160), *range(128, 4200, 256)]  # 25 odd ones, 16 multiples of 16
    for i, n in enumerate(lengths):
        # A head dim that no other test has: no variant is there before.
        head_dim = 152 if flash is V2 else 144
        inputs = make_inputs(1, 2, 2, n, n, head_dim, torch.float16, device)
        results(flash, *inputs, causal=True)
        if i == 0:
            assert all(now > then for now, then in zip(variants(), before, strict=True))
    assert all(now - then <= 6 for now, then in zip(variants(), before, strict=True))
