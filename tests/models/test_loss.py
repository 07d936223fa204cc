import math

import pytest
import torch

from models.loss import cross_entropy


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
