"""The predicted peak, against closed forms, what autograd really keeps, and measured peaks."""

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from flash_attention import NaiveAttention
from models.gpt import GPT
from training import predict
from training.compose import composed
from training.ledger import Ledger
from training.memory import saved_for_backward
from training.memory_names import PARTS
from training.predict import longest_that_fits, predict_peak, with_changes
from training.units import GIB

WIDTH, HEADS, VOCAB = 64, 2, 256
SIZES = [f"model.width={WIDTH}", f"model.n_head={HEADS}"]


@cache
def settings(*overrides: str):
    """A small model, one sequence at a time."""
    return composed(["micro_batch_tokens=1", *SIZES, *overrides])


def peak(n: int, *overrides: str, layers: int = 1) -> int:
    sizes = {"seq_len": n, "model.n_layer": layers}
    return predict_peak(with_changes(settings(*overrides), sizes)).peak_bytes


def growth_per_layer(n: int, *overrides: str) -> int:
    """By how much a second layer's bytes grow from ``n`` to ``2 n`` tokens."""
    return (
        peak(2 * n, *overrides, layers=2)
        - peak(2 * n, *overrides, layers=1)
        - peak(n, *overrides, layers=2)
        + peak(n, *overrides, layers=1)
    )


# What a layer keeps of a token, in bytes: the inputs of both norms (float32) with mean and
# 1/deviation; then, in half precision or not, both norms' outputs, q, k, v and o, the MLP's hidden
# channels before and after GELU (2 + 4 + 8 times the width); and m and l in float32.
KEPT_IN_BF16 = (8 + 2 * 14) * WIDTH + 16 + 8 * HEADS
KEPT_IN_FP32 = (8 + 4 * 14) * WIDTH + 16 + 8 * HEADS


@pytest.mark.parametrize(
    ("overrides", "bytes_per_token"),
    [
        (["precision=bf16-mixed"], KEPT_IN_BF16),
        (["precision=32-true"], KEPT_IN_FP32),
        # Its input in float32, or nothing.
        (["model.activation_checkpointing=block", "loss=chunked"], 4 * WIDTH),
        (["model.activation_checkpointing=block", "model.offload_checkpoints=true"], 0),
    ],
)
def test_what_a_further_layer_takes_grows_with_the_tokens(overrides, bytes_per_token):
    n = 4096
    assert growth_per_layer(n, *overrides) == n * bytes_per_token


def test_a_further_layer_of_naive_attention_takes_its_scores_too():
    # P in float32 and in bfloat16 for each head, and the mask; not m and l, and no o for backward
    # but the output projection's input, which it is.
    n = 8192
    linear = n * (KEPT_IN_BF16 - 8 * HEADS)
    found = growth_per_layer(n, "attention=naive")
    assert found == pytest.approx(linear + 3 * n**2 * (6 * HEADS + 1), rel=1e-3)


def test_the_vocabulary_adds_twelve_bytes_a_token_to_the_full_loss_and_none_to_the_chunked():
    def per_token_and_id(loss: str) -> float:
        n, big, small = 16384, 8192, 4096
        with_big, with_small = (
            peak(n, f"loss={loss}", f"model.vocab_size={vocab}") for vocab in (big, small)
        )
        return (with_big - with_small) / n / (big - small)

    # Log-probabilities, their gradient and the logits' gradient, in float32. The embedding itself
    # takes 16 WIDTH bytes an id, over all tokens.
    assert per_token_and_id("full") == pytest.approx(12, abs=0.15)
    assert per_token_and_id("chunked") == pytest.approx(0, abs=0.15)


def test_parameters_gradients_and_adam_take_sixteen_bytes_a_parameter():
    # A wide model at few tokens is little else; its temporaries are those of one layer.
    overrides = ["seq_len=128", "micro_batch_tokens=1", "model.width=1024", "precision=32-true"]
    parts = predict_peak(composed(overrides)).parts
    n = 4 * 12 * 1024**2 + 256 * 1024  # four layers' matrices, and the embedding
    assert list(parts) == list(PARTS)
    assert parts["parameters"] == pytest.approx(4 * n, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * n, rel=0.01)
    state = sum(parts[p] for p in ("parameters", "optimizer", "gradients"))
    assert 0.75 * 16 * n < state < 1.01 * 16 * n  # gradients come one after the other


@pytest.mark.parametrize("attention", ["naive", "flash_v1", "flash_v2"])
def test_the_peak_holds_what_autograd_really_keeps_and_little_more(attention):
    n, b, layers = 256, 4, 4
    batch = [f"seq_len={n}", f"micro_batch_tokens={b * n}", f"global_batch_tokens={b * n}"]
    cfg = composed([f"attention={attention}", *SIZES, *batch, "precision=32-true"])
    backend = predict.instantiate(cfg.attention)
    sizes = {"width": WIDTH, "n_head": HEADS, "n_layer": layers, "vocab_size": VOCAB}
    model = GPT(**sizes, seq_len=n, attention=backend)
    tokens = torch.zeros(b, n + 1, dtype=torch.int64)
    kept = saved_for_backward(model, tokens, fake=False).total
    parts = predict_peak(cfg).parts
    parts["rest"] -= 2 * 32 * 2**20  # cuBLAS's workspaces
    predicted = sum(parts[p] for p in ("attention", "mlp", "logits_and_loss", "rest"))
    assert kept < predicted < 1.5 * kept


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("attention", ["naive", "flash_v1", "sdpa"])
def test_attention_and_mlps_have_what_they_save_at_a_peak_in_the_loss(attention, precision):
    """Attention q, k and v too, as a run counts them; the big vocabulary puts the peak there."""
    n, b = 256, 2
    batch = [f"seq_len={n}", f"micro_batch_tokens={b * n}", f"global_batch_tokens={b * n}"]
    model = ["model.n_layer=2", "model.n_kv_head=1", "model.vocab_size=8192"]
    cfg = composed([f"attention={attention}", f"precision={precision}", *SIZES, *batch, *model])
    sizes = {"width": WIDTH, "n_head": HEADS, "n_kv_head": 1, "n_layer": 2, "vocab_size": 8192}
    gpt = GPT(**sizes, seq_len=n, attention=predict.instantiate(cfg.attention))
    half = precision == "bf16-mixed"
    saved = saved_for_backward(
        gpt,
        torch.zeros(b, n + 1, dtype=torch.int64),
        precision=torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False),
    )
    parts = predict_peak(cfg).parts
    assert {p: parts[p] for p in ("attention", "mlp")} == {
        p: saved.parts[p] for p in ("attention", "mlp")
    }


def test_a_second_micro_batch_finds_the_gradients_of_the_first():
    n, width = 16384, "model.width=512"
    one = peak(n, f"global_batch_tokens={n}", width)
    two = peak(n, f"global_batch_tokens={2 * n}", width)
    n_params = 12 * 512**2 + VOCAB * 512
    # None of them waits at the peak of one, near the start of backward; all do at that of two.
    assert 0.5 * 4 * n_params < two - one < 1.1 * 4 * n_params


def test_scores_in_float16_are_not_copied_to_float32_and_those_in_bfloat16_are():
    # On a GPU. Backward of the softmax then makes its result in half precision: 2 bytes less.
    n = 8192
    scores = HEADS * n**2
    half, brain = (peak(n, "attention=naive", f"precision={p}") for p in ("16-mixed", "bf16-mixed"))
    assert brain - half == pytest.approx(2 * scores, rel=0.02)


# Measured on one NVIDIA H200 (results/h200_gpt2_small_8k.csv): torch.cuda.max_memory_allocated.
@pytest.mark.parametrize(("attention", "gib"), [("flash_v1", 4.122), ("naive", 65.873)])
def test_the_peak_is_the_measured_one(attention, gib):
    cfg = composed([f"attention={attention}", "model=gpt2_small", "seq_len=8192"])
    assert predict_peak(cfg).peak_bytes / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=sdpa"],
        ["attention=naive", "precision=16-mixed", "loss=chunked"],
        ["model.dropout=0.1", "model.positions=learned", "model.n_kv_head=1"],
        ["tokenizer=bpe", "compile=true", "device=cpu"],
    ],
)
def test_other_settings_can_be_played(overrides):
    assert peak(256, *overrides) > 64 * 2**20


def test_the_config_and_the_random_state_stay_as_they_are():
    cfg = composed([*SIZES, "seq_len=128"])
    before, state = cfg.copy(), torch.get_rng_state()
    predict_peak(cfg)
    assert cfg == before
    assert torch.equal(torch.get_rng_state(), state)


# The search for the longest length, over peaks of a known form


@pytest.fixture
def closed_form(monkeypatch):
    """Replaces the play; returns the lengths that were asked for, with their layers."""
    asked = []

    def use(constant: float, linear: float, square: float) -> list:
        def peak(cfg):
            n, layers = cfg.seq_len, cfg.model.n_layer
            asked.append((n, layers))
            bytes_ = constant + layers * (linear * n + square * n**2) + linear * n
            return SimpleNamespace(peak_bytes=int(bytes_))

        monkeypatch.setattr(predict, "predict_peak", peak)
        return asked

    return use


@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize(("linear", "square"), [(30_000, 0), (20_000, 70), (1_000, 0), (0.0, 600)])
def test_the_longest_length_is_where_the_peak_reaches_the_card(closed_form, layers, linear, square):
    asked = closed_form(2 * GIB, linear, square)
    found = longest_that_fits(composed([f"model.n_layer={layers}"]), 80 * GIB, multiple=128)
    a, b, c = layers * square, (layers + 1) * linear, -78 * GIB
    exact = -c / b if a == 0 else (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)
    assert found == exact // 128 * 128
    assert len(asked) <= 30
    assert len([n for n, played in asked if played == layers]) <= (12 if layers == 1 else 3)


def test_nothing_fits_a_card_smaller_than_the_parameters(closed_form):
    closed_form(2 * GIB, 1, 0)
    assert longest_that_fits(composed([]), GIB) == 0


def test_no_length_is_longer_than_a_step(closed_form):
    closed_form(0, 1, 0)
    cfg = composed(["global_batch_tokens=1000", "seq_len=100"])
    assert longest_that_fits(cfg, GIB, multiple=128) == 896


# The ledger


def no_scratch(func, args) -> int:
    return 0


def test_the_ledger_counts_storages_while_they_live():
    with Ledger("cpu", no_scratch) as ledger:
        a = torch.zeros(1024)  # 4 KiB
        b = a.view(32, 32)  # the same storage
        c = a + 1
        assert ledger.live.total() == 2 * 4096
        del a, c
        assert ledger.live.total() == 4096
        del b
    assert ledger.live.total() == 0
    assert ledger.peak.total() == 2 * 4096


def test_the_ledger_rounds_up_as_the_allocator_does():
    with Ledger("cpu", no_scratch) as ledger:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert ledger.live.total() == 512 + 1024
    assert len(kept) == 2


def test_scratch_counts_while_the_operation_runs():
    with Ledger("cpu", lambda func, args: 10_240 if "exp" in str(func) else 0) as ledger:
        torch.zeros(128).exp()
        assert ledger.live.total() == 0
    assert ledger.peak.total() == 2 * 512 + 10_240


def test_gradients_of_one_tensor_are_summed_in_place():
    x = torch.ones(1024, requires_grad=True)
    y = x * 1
    loss = (y * 2 + y * 3).sum()
    with Ledger("cpu", no_scratch) as ledger:
        loss.backward()
    # The gradients of y: two, and no third for their sum. That of the loss is one number.
    assert 2 * 4096 <= ledger.peak.total() < 3 * 4096


def test_the_parts_of_a_model_in_forward_and_in_backward():
    sizes = {"vocab_size": 64, "seq_len": 512, "n_layer": 1, "n_head": 1, "width": 32}
    model = GPT(**sizes, attention=NaiveAttention())
    ledger = Ledger("cpu", no_scratch)
    with ledger.watching(model), ledger:
        loss = model(torch.zeros(1, 512, dtype=torch.int64)).sum()
        assert ledger.live["attention"] >= 512 * 512 * 4  # P
        assert ledger.live["mlp"] >= 2 * 512 * 4 * 32 * 4  # before and after GELU
        assert ledger.live["mlp"] < 512 * 512 * 4
        loss.backward()
    assert ledger.peak["attention"] >= 2 * 512 * 512 * 4  # and its gradient
