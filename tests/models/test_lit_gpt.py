from functools import partialmethod
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from models.gpt import GPT
from models.lit_gpt import LitGPT
from models.loss import ChunkedLoss, cross_entropy
from models.optim import AdamWCosine


def rows(n):
    """n rows of 17 token ids below 61, each a dict as the data module's."""
    data = torch.randint(61, (n, 17), generator=torch.Generator().manual_seed(2))
    return [{"tokens": row} for row in data]


def trainer(**changes):
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**(settings | changes))


def optim(**changes):
    return AdamWCosine(**({"lr": 1e-2, "max_steps": 100, "min_lr_ratio": 1.0} | changes))


def flat_grad(model, batches):
    """Gradient of the mean loss over ``batches`` of tokens, by hand."""
    model.zero_grad()
    for tokens in batches:
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        (loss / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_training_lowers_the_loss_on_what_it_sees(make_gpt):
    data = rows(4)
    lit = LitGPT(make_gpt(), optim())
    tokens = torch.stack([row["tokens"] for row in data])
    before = lit.loss(tokens).item()
    trainer(max_steps=60).fit(lit, DataLoader(data, batch_size=4))
    assert before > 3.5
    assert lit.loss(tokens).item() < 1.0


def test_the_loss_is_of_each_next_token(make_gpt):
    lit = LitGPT(make_gpt(), optim())
    tokens = torch.stack([row["tokens"] for row in rows(2)])
    log_probs = lit.model(tokens[:, :16]).log_softmax(dim=-1)
    expected = -torch.stack(
        [log_probs[b, n, tokens[b, n + 1]] for b in range(2) for n in range(16)]
    ).mean()
    torch.testing.assert_close(lit.training_step({"tokens": tokens}, 0), expected)


def test_saving_memory_leaves_training_and_validation_as_they_are(make_gpt):
    data = rows(8)
    results = []
    for loss_fn, checkpointing in ((None, "none"), (ChunkedLoss(7), "block")):
        model = make_gpt(dropout=0.1, activation_checkpointing=checkpointing)
        lit = LitGPT(model, optim(), loss_fn=loss_fn)
        torch.manual_seed(3)
        fit = trainer(max_steps=4, accumulate_grad_batches=2)
        fit.fit(lit, DataLoader(data, batch_size=1), DataLoader(data[:3], batch_size=2))
        results.append((fit.callback_metrics["val/loss"], lit.grad_norm))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_validation_weights_a_smaller_last_batch_by_its_tokens(make_gpt):
    data = rows(5)
    data[4]["tokens"] = torch.zeros(17, dtype=torch.long)  # a loss unlike the others'
    lit = LitGPT(make_gpt(noise=0.3), optim())
    validation = trainer()
    validation.validate(lit, DataLoader(data, batch_size=4), verbose=False)
    with torch.no_grad():
        each = [lit.loss(row["tokens"][None]).item() for row in data]
    assert validation.callback_metrics["val/loss"].item() == pytest.approx(sum(each) / 5, rel=1e-5)
    assert abs(sum(each[:4]) / 4 - each[4]) > 0.5  # so that an unweighted mean would show


@pytest.mark.parametrize("grad_clip", [0.01, 1e6, None, 0])
def test_grad_norm_is_that_before_clipping(make_gpt, grad_clip):
    data = rows(4)
    model = make_gpt()
    lit = LitGPT(model, optim(grad_clip=grad_clip))
    expected = flat_grad(model, [torch.stack([row["tokens"] for row in data])]).norm()
    assert expected > 0.1
    trainer(max_steps=1).fit(lit, DataLoader(data, batch_size=4))
    assert lit.grad_norm.shape == ()
    torch.testing.assert_close(lit.grad_norm, expected)


@pytest.mark.parametrize(
    ("grad_clip", "clipped"), [(0.01, True), (1e6, False), (None, False), (0, False)]
)
def test_the_gradient_is_clipped_to_grad_clip(make_gpt, grad_clip, clipped):
    class KeepGrad(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            self.grad = torch.cat(grads) if grads else None

        def on_train_end(self, trainer, module):
            self.grad = torch.cat([p.grad.flatten() for p in module.parameters()])

    data = rows(4)
    model = make_gpt()
    expected = flat_grad(model, [torch.stack([row["tokens"] for row in data])])
    if clipped:
        expected *= grad_clip / expected.norm()
    keep = KeepGrad()
    fit = trainer(max_steps=1, callbacks=[keep])
    fit.fit(LitGPT(model, optim(grad_clip=grad_clip)), DataLoader(data, batch_size=4))
    torch.testing.assert_close(keep.grad, expected, atol=1e-6, rtol=1e-4)


def test_accumulated_micro_batches_are_one_step(make_gpt):
    data = rows(4)
    model = make_gpt()
    lit = LitGPT(model, optim(grad_clip=None))
    expected = flat_grad(model, [row["tokens"][None] for row in data]).norm()
    fit = trainer(max_steps=1, accumulate_grad_batches=4)
    fit.fit(lit, DataLoader(data, batch_size=1))
    torch.testing.assert_close(lit.grad_norm, expected)


def test_the_learning_rate_advances_once_an_optimizer_step(make_gpt):
    lit = LitGPT(make_gpt(), optim(lr=1e-2, min_lr_ratio=0.0, max_steps=4))
    fit = trainer(max_steps=2, accumulate_grad_batches=3)
    fit.fit(lit, DataLoader(rows(9), batch_size=1))  # stops within the epoch
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5e-2)  # halfway


def test_the_trainers_own_clipping_is_refused(make_gpt):
    fit = trainer(max_steps=1, gradient_clip_val=1.0)
    with pytest.raises(ValueError, match=r"gradient_clip_val=1.0 is not used; set grad_clip"):
        fit.fit(LitGPT(make_gpt(), optim()), DataLoader(rows(1)))


@pytest.mark.parametrize(
    ("precision", "fused"), [("32-true", True), ("bf16-mixed", True), ("16-mixed", False)]
)
def test_the_fused_update_is_left_out_where_it_would_see_scaled_gradients(
    make_gpt, precision, fused
):
    lit = LitGPT(make_gpt(), optim())
    lit._trainer = SimpleNamespace(precision=precision)
    optimizer = lit.configure_optimizers()["optimizer"]
    assert {group["fused"] for group in optimizer.param_groups} == {fused}


def test_a_checkpoint_loads_with_weights_only(make_gpt, tmp_path):
    lit = LitGPT(make_gpt(), optim())
    fit = trainer(max_steps=2)
    fit.fit(lit, DataLoader(rows(2)))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert not [name for name in saved["state_dict"] if "rotary" in name]


def test_compiled_model_computes_the_same_under_the_same_names(make_gpt, tokens):
    batch = {"tokens": tokens[:, :9]}
    losses, grads, names = [], [], []
    for compile in (False, True):
        lit = LitGPT(make_gpt(n_layer=1), optim(), compile=compile)
        loss = lit.training_step(batch, 0)
        loss.backward()
        losses.append(loss)
        grads.append(torch.cat([p.grad.flatten() for p in lit.parameters()]))
        names.append(list(lit.state_dict()))
    assert lit.model._compiled_call_impl is not None
    assert names[0] == names[1]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_compiled_checkpoints_and_chunks_compute_the_same(make_gpt, tokens, monkeypatch):
    # Everything of torch.compile but the slow generation of C++.
    compiled = partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(GPT, "compile", compiled)
    grads = []
    for compile in (False, True):
        model = make_gpt(activation_checkpointing="block")
        lit = LitGPT(model, optim(), compile, ChunkedLoss(5))
        lit.training_step({"tokens": tokens[:, :9]}, 0).backward()
        grads.append(torch.cat([p.grad.flatten() for p in lit.parameters()]))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_with_offloading_the_blocks_are_compiled_one_by_one(make_gpt):
    model = make_gpt(activation_checkpointing="block", offload_checkpoints=True)
    LitGPT(model, optim(), compile=True)
    assert model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_grad_norm_under_mixed_precision_is_unscaled(make_gpt, precision):
    data = rows(4)
    model = make_gpt()
    expected = flat_grad(model, [torch.stack([row["tokens"] for row in data])]).norm()
    lit = LitGPT(model, optim(grad_clip=0.01))
    fit = trainer(max_steps=1, accelerator="gpu", devices=1, precision=precision)
    fit.fit(lit, DataLoader(data, batch_size=4))
    torch.testing.assert_close(lit.grad_norm.cpu(), expected, atol=0, rtol=0.02)
