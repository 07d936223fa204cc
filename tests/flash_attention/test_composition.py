"""FlashAttention among PyTorch's tools: checkpointing, export, copies of the module."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attention import naive_attention, softmax
from tests.flash_attention.parity import make_inputs, results

KEY_PARTS = (slice(0, 7), slice(7, 64), slice(64, 100))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_reentrant_checkpointing_takes_o_beside_the_statistics(flash):
    """It hands zeros back for outputs that nothing followed."""
    q, k, v, do = make_inputs(1, 2, 2, 20, 20, 16, torch.float32, torch.device("cpu"))

    def attention(q, k, v):
        return flash(q, k, v, causal=True, return_stats=True)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=True)

    want = results(lambda *qkv: attention(*qkv)[0], q, k, v, do)
    checkpointed(q, k, v)[0].backward(do)
    for t, name in ((q, "dq"), (k, "dk"), (v, "dv")):
        torch.testing.assert_close(t.grad, want[name])
    o, _, l = checkpointed(q, k, v)
    with pytest.raises(RuntimeError, match="no gradient for the statistics"):
        (o.sum() + l.sum()).backward()


@pytest.mark.parametrize("where", DEVICES)
def test_activation_checkpointing_replays_the_dropout_mask(flash, where):
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device(where))

    def attention(q, k, v):
        return flash(q, k, v, causal=True, dropout_p=0.3, deterministic=True)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)

    torch.manual_seed(3)
    want = results(attention, q, k, v, do)
    torch.manual_seed(3)
    got = results(checkpointed, q, k, v, do)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("where", DEVICES)
def test_calls_on_parts_of_the_keys_merge_into_the_whole(flash, where):
    """Attention split over keys, as over the machines of a ring: o, m, l of each part, merged."""
    q, k, v, _ = make_inputs(2, 4, 2, 40, 100, 16, torch.float32, torch.device(where))
    parts = [flash(q, k[:, :, p], v[:, :, p], return_stats=True) for p in KEY_PARTS]
    states = [softmax.State(m, l, o) for o, m, l in parts]
    merged = softmax.merge(softmax.merge(states[2], states[0]), states[1])
    torch.testing.assert_close(merged.o, naive_attention(q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).mT).double() / 4  # scale 16^-1/2
    torch.testing.assert_close(merged.m + merged.l.log(), scores.logsumexp(-1).float())


class Made(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_backward_makes_no_gradients_of_the_statistics(flash):
    """Autograd would fill in zeros for them, two tensors per call that nobody reads."""
    q, k, v, do = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    q.requires_grad_()
    o = flash(q, k, v)
    with Made() as made:
        torch.autograd.grad(o, q, do)
    # The backward op alone: detach hands out the saved o, and allocates nothing.
    assert len([name for name in made.names if name != "detach"]) == 1, made.names


def test_an_output_whose_gradient_is_undefined_gives_none_to_the_inputs(flash):
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    q.requires_grad_()
    o = Undefined.apply(flash(q, k, v))
    assert torch.autograd.grad(o.sum(), q, allow_unused=True) == (None,)


def test_the_output_of_a_transformer_needs_no_copy(flash):
    q, k, v, _ = make_inputs(2, 4, 4, 10, 10, 16, torch.float16, torch.device("cpu"))
    o = flash(q, k, v).transpose(1, 2)
    assert o.is_contiguous()


def test_the_package_works_where_there_is_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # import triton now raises ImportError
import torch
from flash_attention import flash_attention_v1, flash_attention_v2, naive_attention
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
for flash in (flash_attention_v1, flash_attention_v2):
    o = flash(q, k, v, causal=True)
    torch.testing.assert_close(o, naive_attention(q, k, v, causal=True))
    o.sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_module_passes_its_knobs_on(flash):
    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    module = flash.module(block_q=16, block_kv=32)
    assert not list(module.parameters())
    want = flash(q, k, v, causal=True, block_q=16, block_kv=32)
    assert torch.equal(module(q, k, v), want)
    assert not torch.equal(want, flash(q, k, v, causal=True))  # the knobs have effect


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", DEVICES)
def test_an_exported_program_computes_the_same_at_other_lengths(flash, where, strict):
    device = torch.device(where)
    q, k, v, _ = make_inputs(2, 4, 2, 40, 40, 16, torch.float32, device)
    # The shape [batch, heads, length, head dim] with the batch and the length free.
    free = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        flash.module(deterministic=True), (q, k, v), dynamic_shapes=[free] * 3, strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    inputs = make_inputs(3, 4, 2, 70, 70, 16, torch.float32, device)
    want, got = results(naive_attention, *inputs, causal=True), results(loaded, *inputs)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)


def test_an_exported_program_draws_its_mask_when_it_runs(flash):
    class Dropped(torch.nn.Module):
        def forward(self, q):
            return flash(q, q, q, dropout_p=0.5)

    q = torch.randn(1, 2, 20, 16)
    program = torch.export.export(Dropped(), (q,)).module()
    assert not torch.equal(program(q), program(q))


@pytest.mark.parametrize(
    "copy_of",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_the_module_keeps_its_knobs(flash, copy_of):
    splits = dict(q_splits=2) if flash.splits else {}
    module = flash.module(deterministic=True, block_q=16, block_kv=32, **splits)
    copied = copy_of(module)
    assert copied is not module
    assert copied.knobs == module.knobs
    assert copied.knobs is not module.knobs
    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    assert torch.equal(copied(q, k, v), module(q, k, v))
    assert not torch.equal(copied(q, k, v), flash.module()(q, k, v))  # the blocks have effect
