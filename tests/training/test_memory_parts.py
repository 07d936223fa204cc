"""The parts of a training step's memory, counted by hand and against a real optimizer."""

import pytest
import torch
from torch import nn

from training.memory import SavedBytes
from training.memory_names import PARTS
from training.memory_parts import memory_parts


@pytest.fixture
def model() -> nn.Module:
    model = nn.Linear(10, 7)
    model.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    return model


def test_parameters_gradients_and_adams_moments_by_hand(model):
    saved = SavedBytes.of({1: 5, 2: 6, 3: 7}, {1: "mlp", 2: "attention", 3: "mlp"})
    parts = memory_parts(model, torch.optim.AdamW(model.parameters()), saved)
    assert parts == {
        "parameters": 77 * 4 + 3 * 8,
        "gradients": 77 * 4,
        "optimizer": 2 * 77 * 4 + 2 * 4,  # and a count of steps for each of two parameters
        "attention": 6,
        "mlp": 12,
        "logits_and_loss": 0,
        "rest": 0,
    }
    assert list(parts) == list(PARTS)


def test_the_gradient_of_a_parameter_that_is_not_trained_is_none(model):
    model.bias.requires_grad_(False)
    parts = memory_parts(model, torch.optim.AdamW(model.parameters()), SavedBytes(0, 0))
    assert (parts["gradients"], parts["optimizer"]) == (70 * 4, 2 * 70 * 4 + 4)


@pytest.mark.parametrize("fused", [False, True])
def test_what_adam_will_hold_is_what_it_holds_after_a_step(model, fused):
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    before = memory_parts(model, optimizer, SavedBytes(0, 0))
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert memory_parts(model, optimizer, SavedBytes(0, 0)) == before


def test_an_optimizer_without_state_holds_nothing(model):
    parts = memory_parts(model, torch.optim.SGD(model.parameters()), SavedBytes(0, 0))
    assert parts["optimizer"] == 0
