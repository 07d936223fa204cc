"""What an out-of-memory says: real failed allocations at known places of a real model."""

import gc
import inspect
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_attention import NaiveAttention
from models.gpt import GPT
from models.lit_gpt import LitGPT
from models.optim import AdamWCosine
from training import memory, out_of_memory
from training.memory import SavedBytes
from training.out_of_memory import describe, tried_bytes

EXBIBYTE = 2**60
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # As PyTorch's CUDA allocator words it.
        (
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
            "139.72 GiB of which 1.81 GiB is free.",
            5 * 2**29,
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU", 20 * 2**20),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("Triton Error [CUDA]: out of memory", None),
        ("Tried to allocate a lot", None),
    ],
)
def test_the_size_is_read_from_the_message(message, expected):
    assert tried_bytes(message) == expected


def test_the_size_is_read_from_real_messages_of_the_cpus_allocators():
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(EXBIBYTE, dtype=torch.uint8)
    assert tried_bytes(str(of_torch.value)) == EXBIBYTE
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(EXBIBYTE, dtype=np.uint8)
    assert tried_bytes(str(of_numpy.value)) == EXBIBYTE


class Greedy(NaiveAttention):
    """Asks for an exbibyte at its call of the given number."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.calls, self.at_call = 0, at_call

    def forward(self, q, k, v, **settings):
        self.calls += 1
        if self.calls == self.at_call:
            torch.empty(EXBIBYTE, dtype=torch.uint8)
        return super().forward(q, k, v, **settings)


def lit_gpt(attention=None) -> LitGPT:
    gpt = GPT(
        vocab_size=16,
        seq_len=8,
        n_layer=3,
        n_head=2,
        width=8,
        attention=attention or NaiveAttention(),
    )
    return LitGPT(gpt, AdamWCosine(lr=1e-2, max_steps=10, warmup_steps=1))


def step(model: LitGPT) -> torch.Tensor:
    return model.training_step({"tokens": torch.zeros(1, 9, dtype=torch.int64)}, 0)


def caught(function, *arguments) -> dict:
    with pytest.raises((RuntimeError, MemoryError)) as error:
        function(*arguments)
    return describe(error.value, CPU)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_an_attention_that_all_blocks_share_is_named_by_its_block(block):
    found = caught(step, lit_gpt(Greedy(at_call=1 + block)))
    assert found["oom_where"] == f"blocks.{block}.attention.kernel"
    assert found["oom_tried_bytes"] == EXBIBYTE


def ask(*_, **__):
    torch.empty(EXBIBYTE, dtype=torch.uint8)


def test_the_frame_is_the_innermost_line_of_this_project():
    found = caught(step, lit_gpt(Greedy(at_call=1)))
    lines, start = inspect.getsourcelines(Greedy.forward)
    at = start + next(i for i, line in enumerate(lines) if "torch.empty" in line)
    assert found["oom_frame"] == f"tests/training/test_out_of_memory.py:{at} in forward"


def test_a_module_and_the_loss_are_named(monkeypatch):
    model = lit_gpt()
    model.model.blocks[1].mlp.register_forward_hook(ask)
    assert caught(step, model)["oom_where"] == "blocks.1.mlp"
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    monkeypatch.setattr("torch.nn.functional.cross_entropy", full)
    assert caught(step, lit_gpt())["oom_where"] == "loss"


def test_backward_is_told_from_forward():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.empty(EXBIBYTE, dtype=torch.uint8)

    model = lit_gpt()
    model.model.norm.register_forward_hook(lambda module, inputs, output: Asks.apply(output))
    loss = step(model)
    found = caught(loss.backward)
    assert found["oom_where"] == "backward"
    assert found["oom_frame"].endswith("in backward")


def test_a_checkpoint_computed_again_in_backward_is_named():
    class Checkpointed(nn.Module):
        """A whole step; its inner layer asks for too much when it runs again."""

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.calls = 0
            self.layers[1].register_forward_pre_hook(self.count)

        def count(self, *_):
            self.calls += 1
            if self.calls == 2:
                ask()

        def forward(self, x):
            checkpoint(self.layers, x, use_reentrant=False).sum().backward()

    found = caught(Checkpointed(), torch.ones(2, 4))
    assert found["oom_where"] == "backward, layers.1"


def test_the_optimizers_step_is_named(monkeypatch):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    monkeypatch.setattr(torch, "zeros_like", ask)  # its moments
    assert caught(optimizer.step)["oom_where"] == "optimizer step"


def test_a_micro_batch_refused_for_its_size_is_no_part_of_the_model():
    found = caught(memory.check_fits_in_ram, SavedBytes(0, EXBIBYTE), 8)
    assert found["oom_where"] == "before the first step"
    assert found["oom_tried_bytes"] is None


def test_the_memory_at_that_time_is_the_processs_on_a_cpu():
    block = np.ones(2**28, dtype=np.uint8)
    with_block = caught(ask)["oom_allocated_bytes"]
    del block
    assert with_block - caught(ask)["oom_allocated_bytes"] > 2**27


@pytest.mark.gpu
def test_a_real_gpu_failure_has_its_size_its_place_and_what_was_allocated():
    class GreedyOnGpu(Greedy):
        def forward(self, q, k, v, **settings):
            self.calls += 1
            if self.calls == self.at_call:
                torch.empty(2**48, dtype=torch.uint8, device="cuda")
            return NaiveAttention.forward(self, q, k, v, **settings)

    device = torch.device("cuda")
    gc.collect()
    others = torch.cuda.memory_allocated()
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    model = lit_gpt(GreedyOnGpu(at_call=2)).cuda()
    with pytest.raises(torch.OutOfMemoryError) as error:
        model.training_step({"tokens": torch.zeros(1, 9, dtype=torch.int64, device=device)}, 0)
    found = out_of_memory.describe(error.value, device)
    assert found["oom_tried_bytes"] == 2**48
    assert found["oom_where"] == "blocks.1.attention.kernel"
    # The model is small; cuBLAS's workspace, if this is its first use, is 32 MiB or so.
    assert block.nbytes < found["oom_allocated_bytes"] - others < block.nbytes + 2**27
