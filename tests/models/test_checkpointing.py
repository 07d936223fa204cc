"""Activation checkpointing around the blocks of a GPT with flash_v1 and dropout."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flash_attention import FlashAttentionV1
from models.loss import cross_entropy

ATTENTION = torch.ops.flash_attention.v1_forward.default
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Checkpointed(nn.Module):
    """A block that keeps its input only, and runs again in backward."""

    def __init__(self, block: nn.Module, **options):
        super().__init__()
        self.block = block
        self.options = options
        self.runs = 0

    def forward(self, x, rotary):
        return checkpoint(self._run, x, rotary, **self.options)

    def _run(self, x, rotary):
        self.runs += 1
        return self.block(x, rotary)


def loss_and_gradients(model, tokens, dtype):
    torch.manual_seed(7)
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_checkpointed_gpt_replays_every_mask(make_gpt, tokens, where, use_reentrant, dtype):
    attention = FlashAttentionV1(deterministic=True)
    model = make_gpt(dropout=0.1, attention=attention, n_kv_head=2).train().to(where)
    checkpointed = copy.deepcopy(model)
    checkpointed.blocks = nn.ModuleList(
        Checkpointed(block, use_reentrant=use_reentrant, preserve_rng_state=True)
        for block in checkpointed.blocks
    )
    want_loss, want = loss_and_gradients(model, tokens.to(where), dtype)
    got_loss, got = loss_and_gradients(checkpointed, tokens.to(where), dtype)
    assert [block.runs for block in checkpointed.blocks] == [2, 2]  # forward, and again
    assert torch.equal(got_loss, want_loss)
    for a, b in zip(got, want, strict=True):
        if where == "cpu":
            assert torch.equal(a, b)
        else:  # PyTorch's own embedding gradient is summed in any order
            torch.testing.assert_close(a, b)


def test_without_the_generator_s_state_the_masks_differ(make_gpt, tokens):
    """The comparison above can fail: this is what it would see."""
    model = make_gpt(dropout=0.0, attention=FlashAttentionV1()).train()
    for block in model.blocks:
        block.attention.dropout = 0.5  # attention's own mask alone
    checkpointed = copy.deepcopy(model)
    checkpointed.blocks = nn.ModuleList(
        Checkpointed(block, use_reentrant=False, preserve_rng_state=False)
        for block in checkpointed.blocks
    )
    want_loss, want = loss_and_gradients(model, tokens, None)
    got_loss, got = loss_and_gradients(checkpointed, tokens, None)
    assert torch.equal(got_loss, want_loss)
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Count(TorchDispatchMode):
    """How often the attention op runs forward."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func == ATTENTION
        return func(*args, **(kwargs or {}))


def test_a_selective_policy_keeps_attention_and_recomputes_the_rest(make_gpt, tokens):
    model = make_gpt(dropout=0.1, attention=FlashAttentionV1()).train()
    checkpointed = copy.deepcopy(model)
    checkpointed.blocks = nn.ModuleList(
        Checkpointed(
            block,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts([ATTENTION]),
        )
        for block in checkpointed.blocks
    )
    with Count() as count:
        got_loss, got = loss_and_gradients(checkpointed, tokens, None)
    assert [block.runs for block in checkpointed.blocks] == [2, 2]
    assert count.calls == 2  # once per layer: not again in backward
    want_loss, want = loss_and_gradients(model, tokens, None)
    assert torch.equal(got_loss, want_loss)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
