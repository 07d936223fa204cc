"""torch.func over each version of FlashAttention: vmap, grad, vjp, jacrev, and what is refused.

Ground truth is naive attention, slice by slice, under plain autograd.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from flash_attention import naive_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(where: str, *lead: int, heads: int = 2, n: int = 9, seed: int = 0) -> Tensor:
    """Normal numbers [*lead, 2, heads, n, 8]: float64 for the tiles, float32 for the kernels."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(*lead, 2, heads, n, 8, dtype=torch.float64, generator=generator)
    return t.to(where, torch.float64 if where == "cpu" else torch.float32)


@pytest.fixture
def attend(flash):
    def attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return flash(q, k, v, causal=True, deterministic=True, **options)

    return attention


@pytest.fixture
def with_dropout(attend):
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=0.5)

    return attention


def naive(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return naive_attention(q, k, v, causal=True, **options)


def assert_close(got, want) -> None:
    first = want[0] if isinstance(want, tuple) else want
    rtol, atol = (1e-7, 1e-9) if first.dtype == torch.float64 else (1e-3, 1e-4)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def loss_of(attention):
    """A scalar with another gradient for every entry of o."""

    def loss(q, k, v):
        o = attention(q, k, v)
        return (o * torch.arange(o.numel(), device=o.device).view_as(o).sin()).sum()

    return loss


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (4, 0, 2)], ids=str)
def test_vmap_equals_one_slice_after_the_other(attend, where, dims):
    q = make(where, *([3] if dims[0] is not None else []), heads=4)
    k, v = (make(where, *([3] if dims[1] is not None else []), n=7, seed=s) for s in (1, 2))
    args = list(zip((q, k, v), dims, strict=True))
    want = [naive(*(t if d is None else t[i] for t, d in args)) for i in range(3)]
    moved = [t if d is None else t.movedim(0, d) for t, d in args]
    assert_close(vmap(attend, in_dims=dims)(*moved), torch.stack(want))


@pytest.mark.parametrize("where", DEVICES)
def test_nested_vmap_with_segments(attend, where):
    x = make(where, 3, 2)
    lengths = torch.tensor([2, 3, 4], device=where)
    # [3 slices, batch, N], the same for the slices of the inner vmap
    segments = (torch.arange(9, device=where) // lengths[:, None])[:, None].expand(3, 2, 9)

    def attention(function):
        return lambda q, s: function(q, q, q, segment_ids=s)

    got = vmap(vmap(attention(attend), in_dims=(0, None)))(x, segments)
    want = [[attention(naive)(x[i, j], segments[i]) for j in range(2)] for i in range(3)]
    assert_close(got, torch.stack([torch.stack(row) for row in want]))


@pytest.mark.parametrize("where", DEVICES)
def test_vmap_over_no_slices_is_empty(attend, where):
    q, k, v = (make(where, 0, seed=seed) for seed in range(3))
    got = vmap(attend)(q, k, v)
    assert got.shape == vmap(naive)(q, k, v).shape == q.shape
    one = make(where)
    assert vmap(attend, in_dims=(0, None, None))(q, one, one).shape == q.shape
    assert vmap(grad(loss_of(attend)))(q, k, v).shape == q.shape


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_over_no_slices_with_dropout_is_empty(flash, randomness):
    x = make("cpu", 0)

    def dropped(q):
        return flash(q, q, q, dropout_p=0.3)

    assert vmap(dropped, randomness=randomness)(x).shape == x.shape
    got = vmap(grad(lambda q: dropped(q).sum()), randomness=randomness)(x)
    assert got.shape == x.shape


@pytest.mark.parametrize("where", DEVICES)
def test_grad_vjp_and_jacrev_equal_those_of_naive(attend, where):
    q, k, v = make(where, heads=4), make(where, seed=1), make(where, seed=2)
    qkv = (q, k, v)
    leaves = [t.clone().requires_grad_() for t in qkv]
    want = torch.autograd.grad(loss_of(naive)(*leaves), leaves)
    assert_close(grad(loss_of(attend), argnums=(0, 1, 2))(*qkv), want)

    do = make(where, heads=4, seed=3)
    o, pull = vjp(attend, *qkv)
    assert_close(o, naive(*qkv))
    assert_close(pull(do), vjp(naive, *qkv)[1](do))

    def rows(attention):  # a few numbers of o, so that the Jacobian stays small
        return lambda k: attention(q, k, v).sum(dim=(0, 1, 3))

    assert_close(jacrev(rows(attend))(k), jacrev(rows(naive))(k))


@pytest.mark.parametrize("where", DEVICES)
def test_per_sample_gradients_of_all_inputs_and_of_shared_keys(attend, where):
    q, k, v = make(where, 3, heads=4), make(where, seed=1), make(where, seed=2)
    got = vmap(grad(loss_of(attend), argnums=(0, 1, 2)), in_dims=(0, None, None))(q, k, v)
    for i in range(3):
        leaves = [t.clone().requires_grad_() for t in (q[i], k, v)]
        want = torch.autograd.grad(loss_of(naive)(*leaves), leaves)
        assert_close(tuple(g[i] for g in got), want)


@pytest.mark.parametrize("where", DEVICES)
def test_batched_cotangents_equal_one_backward_each(attend, where):
    q, k, v = (make(where, seed=s).requires_grad_() for s in range(3))
    do = make(where, 4, seed=3)
    got = torch.autograd.grad(attend(q, k, v), (q, k, v), do, is_grads_batched=True)
    for i in range(4):
        want = torch.autograd.grad(naive(q, k, v), (q, k, v), do[i])
        assert_close(tuple(g[i] for g in got), want)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("batch", [1, 2])
def test_what_the_slices_share_is_read_for_each_of_them(flash, device, batch):
    """m and l of one forward for three cotangents, segment ids for three q: one batch entry, folded
    into the batch, is a view of stride 0."""
    n = 20
    generator = torch.Generator().manual_seed(0)
    qs, dos = torch.randn(2, 3, batch, 2, n, 16, generator=generator).to(device)
    k, v = torch.randn(2, batch, 2, n, 16, generator=generator).to(device)
    segments = (torch.arange(n, device=device) // 7).expand(batch, n)

    def pulled(attention, upcast):
        q, key, value, cotangents = (upcast(t) for t in (qs[0], k, v, dos))
        _, pull = vjp(lambda *qkv: attention(*qkv, causal=True), q, key, value)
        return vmap(pull)(cotangents)

    got = pulled(flash, lambda t: t)
    want = pulled(naive_attention, Tensor.double)
    for name, a, b in zip("qkv", got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, msg=f"d{name}")

    got = vmap(lambda q: flash(q, k, v, segment_ids=segments))(qs)
    want = [naive_attention(q, k.double(), v.double(), segment_ids=segments) for q in qs.double()]
    torch.testing.assert_close(got.double(), torch.stack(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", DEVICES)
def test_the_module_works_under_functional_call(flash, where):
    q = make(where)
    got = grad(lambda t: functional_call(flash.module(), {}, (t, t, t)).square().sum())(q)
    assert_close(got, grad(lambda t: naive(t, t, t).square().sum())(q))


def test_vmap_with_dropout_asks_how_to_draw(with_dropout):
    x = make("cpu", 3)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(with_dropout)(x, x, x)


@pytest.mark.parametrize("where", DEVICES)
def test_vmap_draws_one_mask_where_it_is_told_same(with_dropout, where):
    x = make(where).expand(3, -1, -1, -1, -1)
    torch.manual_seed(0)
    want = with_dropout(x[0], x[0], x[0])
    torch.manual_seed(0)
    got = vmap(with_dropout, randomness="same")(x, x, x)
    assert_close(got, want.expand_as(got))


@pytest.mark.parametrize("where", DEVICES)
def test_vmap_draws_a_mask_per_slice_where_it_is_told_different(with_dropout, where):
    x = make(where).expand(3, -1, -1, -1, -1)
    o = vmap(with_dropout, randomness="different")(x, x, x)
    assert not any(torch.equal(o[i], o[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_under_vmap_replay_the_slice_s_own_mask(with_dropout, where, randomness):
    """o is linear in v for a given mask: <dO, o> = <dV, v> tells whether backward drew it again."""
    q, k, v, do = (make(where, 3, seed=s) for s in range(4))

    def one(q, k, v, do):
        o, pull = vjp(with_dropout, q, k, v)
        return (do * o).sum(), (pull(do)[2] * v).sum()

    assert_close(*vmap(one, randomness=randomness)(q, k, v, do))


TRANSFORMS_WITHOUT_A_RULE = {
    "jvp": (lambda f, q: jvp(f, (q,), (q,)), "no forward-mode derivative"),
    "vmap of jvp": (
        lambda f, q: vmap(lambda t: jvp(f, (q,), (t,))[1])(q[None]),
        "no forward-mode derivative",
    ),
    "jvp of vmap": (
        lambda f, q: jvp(vmap(f), (q[None],), (q[None],)),
        "no forward-mode derivative",
    ),
    "jvp of vmap of grad": (
        lambda f, q: jvp(vmap(grad(lambda q: f(q).sum())), (q[None],), (q[None],)),
        "no forward-mode derivative",
    ),
    "hessian": (lambda f, q: hessian(lambda q: f(q).sum())(q), "no forward-mode derivative"),
    "grad of grad": (
        lambda f, q: grad(lambda q: grad(lambda q: f(q).sum())(q).sum())(q),
        "no double backward",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS_WITHOUT_A_RULE)
def test_derivatives_that_do_not_exist_are_refused(attend, name):
    transform, message = TRANSFORMS_WITHOUT_A_RULE[name]
    with pytest.raises(RuntimeError, match=message):
        transform(lambda q: attend(q, q, q), make("cpu"))


@pytest.mark.parametrize("name", ["jvp", "grad of grad"])
def test_they_are_refused_in_a_compiled_function_too(attend, name):
    transform, message = TRANSFORMS_WITHOUT_A_RULE[name]
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=message):
        torch.compile(lambda q: transform(lambda q: attend(q, q, q), q), backend="aot_eager")(
            make("cpu")
        )


def test_dual_tensors_are_refused(attend):
    q = make("cpu")
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        attend(q, forward_ad.make_dual(q, q), q)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        vmap(lambda k: attend(q, k, q))(forward_ad.make_dual(q[None], q[None]))


@pytest.mark.parametrize("which", [1, 2])
def test_a_gradient_of_the_statistics_is_refused(flash, which):
    def loss(q):
        return flash(q, q, q, return_stats=True)[which].sum()

    with pytest.raises(RuntimeError, match="no gradient for the statistics"):
        grad(loss)(make("cpu"))


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_from_outside_vmap_into_the_statistics_is_refused(flash, compiled, which):
    """Inside, nothing says that the leaves outside require gradients."""
    torch._dynamo.reset()
    q = make("cpu", 3).requires_grad_()

    def attention(q):
        return vmap(lambda x: flash(x, x, x, causal=True, return_stats=True))(q)

    if compiled:
        attention = torch.compile(attention, backend="aot_eager")
    attention(q)[0].sum().backward()
    want = torch.autograd.grad(vmap(lambda x: naive(x, x, x))(q).sum(), q)
    torch.testing.assert_close(q.grad, want[0], rtol=1e-4, atol=1e-5)
    outputs = attention(q)
    with pytest.raises(RuntimeError, match="no gradient for the statistics"):
        (outputs[0].sum() + outputs[which].sum()).backward()


def test_o_beside_the_statistics_keeps_its_gradient_under_vmap(flash):
    def loss(q):
        return flash(q, q, q, causal=True, return_stats=True)[0].square().sum()

    x = make("cpu", 3)
    want = vmap(grad(lambda q: naive(q, q, q).square().sum()))(x)
    assert_close(vmap(grad(loss))(x), want)


def test_torch_func_inside_a_compiled_function_runs_eagerly_and_right(attend):
    def per_sample(x):
        return vmap(grad(lambda q: attend(q, q, q).square().sum()))(2.0 * x) + 1.0

    x = make("cpu", 3)
    want = vmap(grad(lambda q: naive(q, q, q).square().sum()))(2.0 * x) + 1.0
    torch._dynamo.reset()
    assert_close(torch.compile(per_sample, backend="aot_eager")(x), want)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="runs in eager mode only"):
        torch.compile(per_sample, backend="aot_eager", fullgraph=True)(x)
