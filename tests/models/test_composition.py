"""The whole GPT with flash_v1 among PyTorch's tools: fake tensors, torch.func, copies."""

import copy
import io

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from flash_attention import FlashAttentionV1, NaiveAttention
from models.gpt import GPT
from models.loss import cross_entropy


def loss_of(model, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def test_a_fake_gpt_trains_at_a_length_that_no_memory_holds():
    with FakeTensorMode():
        model = GPT(
            vocab_size=50257, seq_len=2**20, n_layer=2, n_head=12, width=768,
            attention=FlashAttentionV1(), dropout=0.1,
        )  # fmt: skip
        tokens = torch.zeros(8, 2**20 + 1, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    for p in model.parameters():
        assert (p.grad.shape, p.grad.dtype) == (p.shape, torch.float32)


def test_per_sample_gradients_equal_those_of_naive_attention_one_sample_at_a_time(make_gpt, tokens):
    model = make_gpt(attention=FlashAttentionV1(), n_kv_head=2)
    naive = make_gpt(attention=NaiveAttention(), n_kv_head=2)
    naive.load_state_dict(model.state_dict())
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def sample_loss(parameters, sample):
        return loss_of(lambda idx: functional_call(model, parameters, (idx,)), sample[None])

    got = vmap(grad(sample_loss), in_dims=(None, 0))(parameters, tokens)
    for i, sample in enumerate(tokens):
        naive.zero_grad()
        loss_of(naive, sample[None]).backward()
        for name, p in naive.named_parameters():
            torch.testing.assert_close(got[name][i], p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copied_gpt_computes_the_same_and_trains_apart(make_gpt, tokens, how):
    model = make_gpt(attention=FlashAttentionV1(block_q=16, block_kv=16))
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert torch.equal(copied(tokens), model(tokens))
    loss_of(copied, tokens).backward()
    assert all(p.grad is None for p in model.parameters())
    assert copied.blocks[0].attention.kernel.knobs["block_q"] == 16
