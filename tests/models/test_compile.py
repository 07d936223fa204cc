"""torch.compile over the whole GPT with flash_v1: one graph, eager's losses and gradients.

On the CPU the graph runs as traced (aot_eager): equal to eager bit for bit, the random numbers
too. On a GPU Inductor compiles it, with random numbers and roundings of its own.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attention import FlashAttentionV1
from models.loss import cross_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def make_flash_gpt(make_gpt):
    """``make_gpt`` with flash_v1 and grouped heads, in training mode."""

    def make(**changes):
        attention = FlashAttentionV1(deterministic=True)
        return make_gpt(**({"attention": attention, "n_kv_head": 2} | changes)).train()

    return make


def compiler(where: str) -> CompileCounterWithBackend:
    return CompileCounterWithBackend("inductor" if where == "cuda" else "aot_eager")


def loss_and_gradient(model, forward, tokens: Tensor, *, autocast=None, seed=0):
    """Loss, and the gradient of every parameter in one vector."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast(tokens.device.type, dtype=autocast) if autocast else nullcontext():
        loss = cross_entropy(forward(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.detach(), gradient.clone()


@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, None), (0.2, BF16)], ids=str)
def test_the_gpt_is_one_graph_and_trains_as_eager_does(make_flash_gpt, tokens, dropout, autocast):
    model, counter = make_flash_gpt(dropout=dropout), compiler("cpu")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    got = loss_and_gradient(model, compiled, tokens, autocast=autocast)
    want = loss_and_gradient(model, model, tokens, autocast=autocast)
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("autocast", [None, torch.float16, BF16], ids=str)
def test_inductor_compiles_the_gpt_to_one_graph_no_less_exact_than_eager(
    make_flash_gpt, tokens, positions, autocast
):
    model, tokens = make_flash_gpt(positions=positions).cuda(), tokens.cuda()
    counter = compiler("cuda")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    exact_loss, exact_gradient = loss_and_gradient(model, model, tokens)
    errors = []
    for forward in (model, compiled):
        loss, gradient = loss_and_gradient(model, forward, tokens, autocast=autocast)
        error = (gradient - exact_gradient).norm() / exact_gradient.norm()
        errors.append(((loss - exact_loss).abs().item(), error.item()))
    assert counter.frame_count == 1
    for eager, inductor in zip(*errors, strict=True):
        assert inductor <= 2 * eager + 1e-4 * (1 if autocast is None else 10)


@pytest.mark.parametrize("where", DEVICES)
def test_compiled_gradients_belong_to_the_masks_that_were_drawn(make_flash_gpt, tokens, where):
    """Along the gradient g the loss of the same masks rises by |g|: a central difference."""
    model, tokens = make_flash_gpt(dropout=0.5).to(where), tokens.to(where)
    compiled = torch.compile(model, fullgraph=True, backend=compiler(where))
    first, gradient = loss_and_gradient(model, compiled, tokens)
    assert torch.equal(loss_and_gradient(model, compiled, tokens)[0], first)
    assert not torch.equal(loss_and_gradient(model, compiled, tokens, seed=1)[0], first)
    before = [p.detach().clone() for p in model.parameters()]
    direction = gradient / gradient.norm()
    step, losses = 5e-3, []
    for distance in (step, -step):
        with torch.no_grad():
            parts = direction.split([p.numel() for p in before])
            for p, start, part in zip(model.parameters(), before, parts, strict=True):
                p.copy_(start + distance * part.view_as(p))
        losses.append(loss_and_gradient(model, compiled, tokens)[0].item())
    slope = (losses[0] - losses[1]) / (2 * step)
    assert slope == pytest.approx(gradient.norm().item(), rel=5e-3)


@pytest.mark.parametrize("where", DEVICES)
def test_eight_lengths_take_at_most_three_compilations(make_flash_gpt, where):
    model = make_flash_gpt(n_layer=1, seq_len=64).to(where)
    counter = compiler(where)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (8, 17, 33, 64, 50, 1, 24, 7):
        generator = torch.Generator().manual_seed(n)
        tokens = torch.randint(61, (2, n + 1), generator=generator).to(where)
        got = loss_and_gradient(model, compiled, tokens)
        want = loss_and_gradient(model, model, tokens)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert counter.frame_count <= 3


@pytest.mark.gpu
def test_cuda_graphs_of_the_compiled_gpt_replay_on_new_tokens(make_flash_gpt):
    model = make_flash_gpt().cuda()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        tokens = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(seed)).cuda()
        got = loss_and_gradient(model, compiled, tokens)
        want = loss_and_gradient(model, model, tokens)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
