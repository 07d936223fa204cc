import math

import pytest
import torch

from models.optim import AdamWCosine, param_groups


def test_norms_and_biases_and_nothing_else_are_free_of_decay(make_gpt):
    model = make_gpt(positions="learned")
    decay, free = param_groups(model, 0.1)
    assert (decay["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    free_names = {names[id(p)] for p in free["params"]}
    assert free_names == {n for n in names.values() if "norm" in n or n.endswith("bias")}
    decay_names = {names[id(p)] for p in decay["params"]}
    assert decay_names == set(names.values()) - free_names
    assert "token_embedding.weight" in decay_names
    assert "position_embedding.weight" in decay_names


def closed_form(step, *, lr, ratio, warmup, total):
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    angle = math.pi * min(1.0, (step - warmup) / (total - warmup))
    return lr * (ratio + (1 - ratio) * (1 + math.cos(angle)) / 2)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_learning_rate_follows_warmup_and_cosine(make_gpt, warmup):
    optim = AdamWCosine(lr=0.02, min_lr_ratio=0.1, warmup_steps=warmup, max_steps=20)
    optimizer = optim.optimizer(make_gpt())
    scheduler = optim.scheduler(optimizer)
    for step in range(25):  # past the end it stays at the minimum
        expected = closed_form(step, lr=0.02, ratio=0.1, warmup=warmup, total=20)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(expected), step
        optimizer.step()
        scheduler.step()


def test_the_schedule_starts_above_zero_peaks_after_warmup_and_ends_at_the_minimum():
    optim = AdamWCosine(lr=1.0, min_lr_ratio=0.25, warmup_steps=3, max_steps=11)
    factors = [optim.lr_factor(step) for step in range(12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[7] == pytest.approx((1 + 0.25) / 2)  # halfway down
    assert factors[11] == 0.25
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_a_run_shorter_than_the_warmup_keeps_warming():
    optim = AdamWCosine(lr=1.0, warmup_steps=9, max_steps=2)
    assert [optim.lr_factor(step) for step in range(3)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_is_adamws(fused):
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, 2.0)
    torch.nn.init.constant_(layer.bias, 3.0)
    optim = AdamWCosine(lr=0.01, weight_decay=0.5, max_steps=1)
    optimizer = optim.optimizer(layer, fused=fused)
    layer(torch.tensor([[4.0]])).backward()
    optimizer.step()
    # The first Adam step is lr * sign(gradient); decay is lr * weight_decay * weight.
    assert layer.weight.item() == pytest.approx(2.0 * (1 - 0.01 * 0.5) - 0.01)
    assert layer.bias.item() == pytest.approx(3.0 - 0.01)


def test_settings_reach_adamw(make_gpt):
    optimizer = AdamWCosine(lr=0.5, betas=[0.8, 0.7], eps=1e-3, max_steps=1).optimizer(make_gpt())
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.7)
        assert type(group["betas"]) is tuple  # a list type of a config library would not load
        assert group["eps"] == 1e-3
        assert group["fused"] is True


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lr": 0.0}, ValueError, "lr=0.0 must be a number, above 0"),
        ({"lr": "fast"}, TypeError, "lr='fast' must be a number"),
        ({"lr": math.inf}, ValueError, "lr=inf must be a number"),
        ({"min_lr_ratio": 1.1}, ValueError, "min_lr_ratio=1.1 must be .* at most 1"),
        ({"betas": [0.9]}, ValueError, r"betas=\[0.9\] must be two numbers"),
        ({"betas": 0.9}, ValueError, "betas=0.9 must be two numbers"),
        ({"betas": [0.9, 1.0]}, ValueError, "betas=1.0 must be .* below 1"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08 must be a number, above 0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1 must be"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be a whole number, at least 0"),
        ({"warmup_steps": 0.1}, TypeError, "warmup_steps=0.1 must be a whole number"),
        ({"grad_clip": -1.0}, ValueError, "grad_clip=-1.0 must be"),
        ({"max_steps": 0}, ValueError, "max_steps=0 must be a whole number, at least 1"),
    ],
)
def test_bad_settings_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        AdamWCosine(**({"lr": 1e-3, "max_steps": 10} | changes))
