from types import SimpleNamespace

import pytest
import torch

from training.divergence import StopOnDivergence
from training.errors import DivergedError


def step(callback, n, loss, grad_norm=1.0, precision="32-true"):
    trainer = SimpleNamespace(global_step=n, precision=precision)
    module = SimpleNamespace(grad_norm=None if grad_norm is None else torch.tensor(grad_norm))
    callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, 0)
    return trainer


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_bad_loss_stops_the_run_at_the_next_look(loss):
    callback = StopOnDivergence(every_n_steps=3)
    step(callback, 1, loss)
    step(callback, 2, 1.0)
    with pytest.raises(DivergedError, match=r"by step 3; lower optim\.lr"):
        step(callback, 3, 1.0)


def test_good_losses_go_on():
    callback = StopOnDivergence(every_n_steps=1)
    for n in range(1, 5):
        trainer = step(callback, n, 1.0)
    callback.on_save_checkpoint(trainer, None, {})


def test_a_checkpoint_is_refused_between_looks():
    callback = StopOnDivergence(every_n_steps=100)
    trainer = step(callback, 1, float("nan"))
    with pytest.raises(DivergedError):
        callback.on_save_checkpoint(trainer, None, {})


@pytest.mark.parametrize("grad_norm", [float("nan"), float("inf")])
def test_a_checkpoint_is_refused_after_a_bad_gradient_of_a_good_loss(grad_norm):
    callback = StopOnDivergence(every_n_steps=100)
    trainer = step(callback, 1, 1.0, grad_norm)
    with pytest.raises(DivergedError, match="loss or its gradient was not a finite number"):
        callback.on_save_checkpoint(trainer, None, {})


def test_a_gradient_that_the_float16_scaler_leaves_out_goes_on():
    callback = StopOnDivergence(every_n_steps=1)
    step(callback, 1, 1.0, float("inf"), precision="16-mixed")


def test_a_micro_batch_before_the_first_gradient_goes_on():
    step(StopOnDivergence(every_n_steps=1), 0, 1.0, grad_norm=None)


def test_a_bad_validation_loss_stops_the_run():
    trainer = SimpleNamespace(global_step=5, callback_metrics={"val/loss": torch.tensor(torch.inf)})
    with pytest.raises(DivergedError, match="validation loss was infinite by step 5"):
        StopOnDivergence(every_n_steps=1).on_validation_end(trainer, None)
