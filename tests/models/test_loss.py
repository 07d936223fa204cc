import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.loss import ChunkedLoss, FullLoss, chunk_size, cross_entropy, linear_cross_entropy
from tests.models.live_bytes import LiveBytes
from training import memory


def test_it_is_the_mean_negative_log_probability():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(7.0), 0.0]]])
    targets = torch.tensor([[0, 0]])  # probabilities 1/4 and 7/8
    assert cross_entropy(logits, targets).item() == pytest.approx(
        -(math.log(1 / 4) + math.log(7 / 8)) / 2
    )


def test_ignored_targets_count_neither_in_sum_nor_mean():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(1))
    partly = targets.clone()
    partly[:, 3:] = -100
    assert torch.equal(cross_entropy(logits, partly), cross_entropy(logits[:, :3], targets[:, :3]))


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(64)
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_each_target_s_own_loss_is_its_negative_log_probability():
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(7.0), 0.0], [1.0, 2.0]]])
    losses = cross_entropy(logits, torch.tensor([[0, 0, -100]]), reduction="none")
    assert losses.shape == (1, 3)
    assert losses[0].tolist() == pytest.approx([-math.log(1 / 4), -math.log(7 / 8), 0])


# --- a chunk of tokens at a time ---------------------------------------------------------------

B, N, WIDTH, V = 2, 9, 6, 11
CHUNKS = [1, 4, 6, 18, 1000, "auto"]  # 18 tokens in all: chunks that divide them, or not, or exceed


def head(dtype=torch.float64, seed=0, n=N, v=V):
    """features [B, n, WIDTH], weight [v, WIDTH] and targets [B, n], a slice as that of tokens."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(B, n, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(v, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    return features, weight, torch.randint(v, (B, n + 1), generator=generator)[:, 1:]


def by_hand(features, weight, targets):
    """Loss of each target in float64, and the gradients of their mean, from the formulas."""
    x, w, t = features.detach().double(), weight.detach().double(), targets.clamp(min=0)
    p = (x @ w.T).softmax(dim=-1)  # [B, N, V]
    counts = targets != -100
    losses = -p.gather(-1, t[..., None])[..., 0].log() * counts
    d_logits = (p - F.one_hot(t, len(w))) * counts[..., None] / counts.sum()
    return losses, d_logits @ w, torch.einsum("bnv,bnd->vd", d_logits, x)


def assert_as_by_hand(features, weight, targets, chunk, **tolerance):
    losses, d_features, d_weight = by_hand(features, weight, targets)
    loss = linear_cross_entropy(features, weight, targets, chunk)
    expected = losses.sum() / (targets != -100).sum()
    torch.testing.assert_close(loss, expected.to(loss.dtype), **tolerance)
    got = torch.autograd.grad(loss, (features, weight))
    for grad, expected in zip(got, (d_features, d_weight), strict=True):
        torch.testing.assert_close(grad, expected.to(grad.dtype), **tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_of_any_size_give_the_loss_and_its_gradients(chunk):
    assert_as_by_hand(*head(), chunk)
    assert_as_by_hand(*head(torch.float32), chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_leave_ignored_targets_out(chunk):
    features, weight, targets = head()
    targets[0, :5] = targets[1, -1] = -100  # a whole chunk of 4, and parts of others
    assert_as_by_hand(features, weight, targets, chunk)


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_gradient_in_chunks_passes_gradcheck(chunk):
    features, weight, targets = head(n=4, v=5)
    targets[1, 2] = -100
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, chunk) * 3.0, (features, weight)
    )


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_without_any_target_the_loss_is_nan_and_the_gradients_are_zero(shape):
    targets = torch.full(shape, -100)
    features = torch.randn(*shape, WIDTH, requires_grad=True)
    weight = torch.randn(V, WIDTH, requires_grad=True)
    loss = linear_cross_entropy(features, weight, targets, 2)
    assert loss.isnan()
    loss.backward()
    assert torch.equal(features.grad, torch.zeros(*shape, WIDTH))
    assert torch.equal(weight.grad, torch.zeros(V, WIDTH))
    with torch.no_grad():
        assert linear_cross_entropy(features, weight, targets, 2).isnan()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_each_tokens_own_loss_in_chunks(chunk):
    features, weight, targets = head()
    targets[1, 3] = -100
    losses = linear_cross_entropy(features, weight, targets, chunk, reduction="none")
    torch.testing.assert_close(losses, by_hand(features, weight, targets)[0])
    assert not losses.requires_grad


def test_only_the_gradients_that_are_asked_for_are_made():
    for frozen in (0, 1):
        tensors = list(head())
        tensors[frozen] = tensors[frozen].detach()
        expected = by_hand(*tensors)[1:][1 - frozen]
        linear_cross_entropy(*tensors, 4).backward()
        torch.testing.assert_close(tensors[1 - frozen].grad, expected)
        assert tensors[frozen].grad is None


@pytest.mark.parametrize(
    ("features_too", "weight_too", "grad", "products"),
    [(True, True, True, 3), (True, False, True, 2), (False, True, True, 2), (True, True, False, 1)],
)
def test_no_product_is_made_that_is_not_needed(features_too, weight_too, grad, products):
    features, weight, targets = head()
    features.requires_grad_(features_too)
    weight.requires_grad_(weight_too)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
        linear_cross_entropy(features, weight, targets, 4)
    assert counter.get_total_flops() == products * 2 * B * N * WIDTH * V


def test_a_graph_that_is_kept_gives_the_gradients_again():
    features, weight, targets = head()
    loss = linear_cross_entropy(features, weight, targets, 4)
    once = torch.autograd.grad(loss, (features, weight), retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(loss, (features, weight))))


def test_second_derivatives_are_refused():
    features, weight, targets = head()
    loss = linear_cross_entropy(features, weight, targets, 4)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(loss, features, create_graph=True)


def test_the_gradient_of_the_weight_is_summed_in_float32():
    # 600 chunks of one token with the same gradient each: a sum in bfloat16 stops growing at 256.
    features = torch.ones(600, 1, requires_grad=True)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(features, weight, torch.zeros(600, dtype=torch.int64), 1).backward()
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight.grad, torch.tensor([[-0.5], [0.5]]))


def test_under_autocast_the_products_are_in_half_precision_and_the_loss_in_float32():
    features, weight, targets = head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(features, weight, targets, 4)
    assert loss.dtype == torch.float32
    loss.backward()
    assert features.grad.dtype == weight.grad.dtype == torch.float32
    # What bfloat16 makes of the inputs, in float64: the logits are rounded once more.
    rounded = [t.detach().bfloat16().double() for t in (features, weight)]
    losses, d_features, d_weight = by_hand(*rounded, targets)
    exact = by_hand(features, weight, targets)[0].mean()
    assert abs(loss - losses.mean()) < 0.5 * abs(loss - exact)
    torch.testing.assert_close(features.grad.double(), d_features, atol=2e-3, rtol=0.02)
    torch.testing.assert_close(weight.grad.double(), d_weight, atol=2e-3, rtol=0.02)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("what", ["training", "validation", "per token"])
def test_the_logits_of_all_tokens_are_never_held(what, autocast):
    features, weight, targets = head(torch.float32, n=256, v=100)  # 512 tokens in all
    with LiveBytes() as memory, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if what == "training":
            linear_cross_entropy(features, weight, targets, 8).backward()
        elif what == "validation":
            with torch.no_grad():
                linear_cross_entropy(features, weight, targets, 8)
        else:
            linear_cross_entropy(features, weight, targets, 8, reduction="none")
    logits = 8 * 100 * 4
    linear = 512 * (2 * 4 * WIDTH + 8 + 4)  # features and their gradient, targets, losses
    assert logits <= memory.peak < 6 * logits + linear + 4 * weight.nbytes
    assert memory.largest < 512 * 100


def test_an_automatic_chunk_has_logits_as_large_as_the_features():
    # GPT-2 small at 131,072 tokens: 96 Mi numbers of features
    assert chunk_size(2**17, 768, 50304, "auto") == 2**17 * 768 // 50304
    assert chunk_size(2**20, 768, 50304, "auto") == 2**28 // 50304  # 1 GiB, not 3
    assert chunk_size(2048, 128, 50304, "auto") == 2**24 // 50304  # 64 MiB, not 1
    assert chunk_size(2048, 128, 320, "auto") > 2048  # a small vocabulary: one chunk
    assert chunk_size(10, 8, 2**29, "auto") == 1


def test_a_chunk_has_less_than_two_to_the_31_logits():
    assert chunk_size(2**20, 768, 50304, 2**20) == (2**31 - 1) // 50304
    assert chunk_size(2**20, 768, 50304, 1000) == 1000


# --- of a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [FullLoss(), ChunkedLoss(), ChunkedLoss(7)])
def test_the_loss_of_tokens_is_that_of_each_next_one(make_gpt, tokens, loss_fn):
    model = make_gpt().double()
    log_probs = model(tokens[:, :-1]).log_softmax(dim=-1)
    expected = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]  # [3, 15]
    per_token = loss_fn.per_token(model, tokens)
    torch.testing.assert_close(per_token.double(), expected, atol=1e-6, rtol=1e-6)
    assert not per_token.requires_grad
    torch.testing.assert_close(
        loss_fn(model, tokens).double(), expected.mean(), atol=1e-6, rtol=1e-6
    )


def test_the_full_loss_of_each_token_is_zero_where_it_is_ignored():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 3], [0, 4, 2]])
    losses = cross_entropy(logits, targets, reduction="none")
    assert losses.shape == (2, 3)
    assert losses[0, 1] == 0
    torch.testing.assert_close(losses.sum() / 5, cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("many", TypeError)]
)
def test_a_bad_chunk_is_refused(value, error):
    with pytest.raises(error, match=r"chunk_tokens=.* must be a whole number, at least 1"):
        ChunkedLoss(value)


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_on_a_gpu_give_the_gradients_of_the_full_loss(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, 64, generator=generator), torch.randn(5000, 64, generator=generator)
    targets = torch.randint(5000, (3000,), generator=generator).cuda()
    targets[::7] = -100
    losses, *exact = by_hand(values[0][None], values[1], targets.cpu()[None])
    grads = {}
    for name in ("full", "chunked"):
        x, w = (v.cuda().requires_grad_() for v in values)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            if name == "full":
                loss = cross_entropy(F.linear(x, w), targets)
            else:
                loss = linear_cross_entropy(x, w, targets, 700)
        (loss * 2.0**16).backward()  # as a float16 scaler would
        expected = losses.sum().item() / (targets != -100).sum().item()
        assert loss.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2e-3)
        grads[name] = [x.grad.cpu().double() / 2**16, w.grad.cpu().double() / 2**16]
    for full, chunked, right in zip(grads["full"], grads["chunked"], exact, strict=True):
        right = right.view_as(full)
        error = (chunked - right).norm() / right.norm()
        assert error <= 1.1 * (full - right).norm() / right.norm() + 1e-6


def of_logits(n: int, v: int, device: str = "cpu"):
    """A model whose output is a parameter, bfloat16 ``[1, n, v]``; tokens; and float64's result."""
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(1, n, v, device=device, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(v, (1, n + 1), device=device, generator=generator)
    exact = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(exact[0], tokens[0, 1:])
    loss.backward()
    return (lambda idx: logits), logits, tokens, (loss.detach(), exact.grad)


def test_a_compiled_loss_keeps_half_precision_logits_as_they_are(monkeypatch):
    # Everything of torch.compile but the slow generation of C++.
    compiled = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compiled)
    model, logits, tokens, (loss, grad) = of_logits(32, 999)
    kept = {}
    for compile in (False, True):
        loss_fn = FullLoss()
        if compile:
            loss_fn.compile()
        logits.grad, saved = None, {}

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            got = loss_fn(model, tokens)
        got.backward()
        torch.testing.assert_close(got.double(), loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits.grad.double(), grad, atol=1e-6, rtol=1e-2)
        kept[compile] = sum(saved.values()) / logits.numel()  # bytes per logit
    assert kept[False] >= 4  # float32
    assert 2 <= kept[True] < 2.2  # the logits themselves, and few numbers per token


@pytest.mark.gpu
def test_a_compiled_loss_makes_no_float32_logits():
    model, logits, tokens, (loss, grad) = of_logits(4096, 20_000, "cuda")
    loss_fn = FullLoss()
    loss_fn.compile()
    loss_fn(model, tokens).backward()  # compiles
    each = loss_fn.per_token(model, tokens)
    logits.grad = None
    memory.reset_peaks(logits.device)
    before = memory.current(logits.device)
    got = loss_fn(model, tokens)
    got.backward()
    # The gradient's two bytes per logit; a float32 copy of them would be four more.
    assert memory.peaks(logits.device)["allocated"] - before < 3 * logits.numel()
    torch.testing.assert_close(got.double(), loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(each.mean().double(), loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), grad, atol=1e-7, rtol=1e-2)


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits_are_no_trouble():
    generator = torch.Generator(device="cuda").manual_seed(0)
    n, v = 2**16 + 3, 2**15 + 5
    x = torch.randn(n, 16, device="cuda", generator=generator).requires_grad_()
    w = torch.randn(v, 16, device="cuda", generator=generator).requires_grad_()
    targets = torch.randint(v, (n,), device="cuda", generator=generator)
    memory.reset_peaks(x.device)
    linear_cross_entropy(x, w, targets).backward()
    assert memory.peaks(x.device)["allocated"] < 4 * n * v / 2  # all logits: 8 GiB in float32
    last = slice(n - 5, n)
    p = (x[last].double() @ w.double().T).softmax(dim=-1)
    expected = (p - F.one_hot(targets[last], v)) @ w.double() / n
    torch.testing.assert_close(x.grad[last].double(), expected, atol=1e-9, rtol=1e-3)


@pytest.mark.gpu
def test_chunks_run_where_nondeterminism_is_refused():
    grads = []
    for _ in range(2):
        features, weight, targets = (t.detach().cuda() for t in head(torch.float32, n=500, v=999))
        torch.use_deterministic_algorithms(True)
        try:
            linear_cross_entropy(features, weight.requires_grad_(), targets, 64).backward()
        finally:
            torch.use_deterministic_algorithms(False)
        grads.append(weight.grad)
    assert torch.equal(*grads)
