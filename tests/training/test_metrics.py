"""The metrics callback inside real Lightning runs of a tiny GPT, on a clock under control."""

import gc
import sys
from functools import partial
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from flash_attention import NaiveAttention
from models.gpt import GPT
from models.lit_gpt import LitGPT
from models.loss import ChunkedLoss
from models.optim import AdamWCosine
from training import memory, metrics, throughput
from training.memory import saved_for_backward
from training.metrics import MetricsCallback
from training.units import GIB

N, MICRO_BATCH, ACCUMULATE = 8, 2, 3
TOKENS_PER_STEP = N * MICRO_BATCH * ACCUMULATE


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Rows(Logger):
    """Keeps the rows it is given, by step."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict] = {}

    def log_metrics(self, metrics, step=None):
        if "train/loss" in metrics:
            assert step not in self.rows
            self.rows[step] = metrics

    def log_hyperparams(self, *args, **kwargs): ...


class Model(LitGPT):
    """Takes 1 s for a micro-batch (9 s more for those of the first two steps of the process) and
    100 s for a validation batch; remembers losses and gradient norms."""

    def __init__(self, clock: Clock, width: int = 8) -> None:
        torch.manual_seed(0)
        gpt = GPT(
            vocab_size=16, seq_len=N, n_layer=1, n_head=2, width=width, attention=NaiveAttention()
        )
        super().__init__(gpt, AdamWCosine(lr=1e-2, max_steps=100, warmup_steps=10))
        self.clock = clock
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        self.clock.time += 1 if len(self.losses) >= 2 * ACCUMULATE else 10
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.clock.time += 100
        super().validation_step(batch, batch_idx)


class SlowCheckpoint(Checkpoint):
    """Saves after the given steps, taking 1000 s each time."""

    def __init__(self, clock: Clock, folder, steps) -> None:
        self.clock, self.folder, self.steps = clock, folder, steps
        self.last = 0

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step in self.steps and trainer.global_step != self.last:
            self.last = trainer.global_step
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_save_checkpoint(self, *args):
        self.clock.time += 1000


def batches(n_steps: int, varied: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"tokens": torch.randint(0, 16, (N + 1,), generator=generator)}
        for _ in range(n_steps * ACCUMULATE * MICRO_BATCH)
    ]
    return DataLoader(rows if varied else rows[:1] * len(rows), batch_size=MICRO_BATCH)


def fit(
    callback,
    model,
    max_steps,
    *,
    callbacks=(),
    ckpt=None,
    loader=None,
    accelerator="cpu",
    **trainer_settings,
):
    """Train; the rows logged, by step."""
    rows = Rows()
    trainer = L.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=ACCUMULATE,
        logger=rows,
        callbacks=[callback, *callbacks],
        accelerator=accelerator,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **trainer_settings,
    )
    trainer.fit(model, loader or batches(max_steps), batches(1), ckpt_path=ckpt, weights_only=True)
    return rows.rows


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics.throughput, "Stopwatch", partial(throughput.Stopwatch, now=clock))
    return clock


def test_rows_come_after_the_first_step_every_n_and_the_last(clock):
    rows = fit(MetricsCallback(log_every_n_steps=3), Model(clock), 7)
    assert list(rows) == [1, 3, 6, 7]


def test_no_row_comes_twice_when_the_last_step_is_due_anyway(clock):
    assert list(fit(MetricsCallback(log_every_n_steps=3), Model(clock), 6)) == [1, 3, 6]


def test_the_loss_is_the_mean_over_all_micro_batches_since_the_last_row(clock):
    model = Model(clock)
    rows = fit(MetricsCallback(log_every_n_steps=2), model, 4)
    losses = torch.tensor(model.losses).view(4, ACCUMULATE).mean(1)
    expected = [losses[0].item(), losses[1].item(), losses[2:4].mean().item()]
    assert [row["train/loss"] for row in rows.values()] == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_is_the_one_the_step_used(clock):
    model = Model(clock)
    rows = fit(MetricsCallback(log_every_n_steps=1), model, 4)
    expected = [1e-2 * (step + 1) / 11 for step in range(4)]  # linear warm-up over ten steps
    assert [row["train/lr"] for row in rows.values()] == pytest.approx(expected)


def test_the_gradient_norm_is_the_modules(clock):
    model = Model(clock)
    rows = fit(MetricsCallback(log_every_n_steps=1), model, 2)
    assert rows[2]["train/grad_norm"] == pytest.approx(model.grad_norm.item())


def test_tokens_are_counted_over_micro_batches_and_steps(clock):
    rows = fit(MetricsCallback(log_every_n_steps=2), Model(clock), 4)
    assert {step: row["train/tokens"] for step, row in rows.items()} == {
        step: step * TOKENS_PER_STEP for step in (1, 2, 4)
    }


def test_speed_leaves_out_the_warmup_steps(clock):
    callback = MetricsCallback(log_every_n_steps=3)
    rows = fit(callback, Model(clock), 6)
    assert "throughput/tokens_per_s" not in rows[1]
    # Step 3 alone, then steps 4 to 6: one second for each micro-batch.
    assert rows[3]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH)
    assert rows[6]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH)


def test_without_warmup_the_first_step_counts(clock):
    rows = fit(MetricsCallback(log_every_n_steps=3, warmup_steps=0), Model(clock), 3)
    assert rows[1]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH / 10)


def test_speed_leaves_out_validation_and_checkpoints(clock, tmp_path):
    slow = SlowCheckpoint(clock, tmp_path, steps=(4, 5))
    validate_each_step = {"val_check_interval": ACCUMULATE, "check_val_every_n_epoch": None}
    rows = fit(
        MetricsCallback(log_every_n_steps=3),
        Model(clock),
        7,
        callbacks=[slow],
        **validate_each_step,
    )
    assert clock.time > 2000  # they did take their time
    assert rows[6]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH)
    assert rows[7]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH)


def test_speed_counts_the_wait_for_data(clock):
    class SlowData(list):
        def __getitem__(self, index):
            clock.time += 0.25
            return super().__getitem__(index)

    data = SlowData(batches(6).dataset)
    loader = DataLoader(data, batch_size=MICRO_BATCH)
    rows = fit(MetricsCallback(log_every_n_steps=3), Model(clock), 6, loader=loader)
    assert rows[6]["throughput/tokens_per_s"] == pytest.approx(N * MICRO_BATCH / 1.5, rel=0.06)


def test_mfu_is_logged_for_a_known_device_only(clock, monkeypatch):
    callback, model = MetricsCallback(log_every_n_steps=4), Model(clock)
    assert "throughput/mfu" not in fit(callback, model, 4)[4]
    assert callback.summary()["mfu"] is None

    monkeypatch.setattr(metrics.throughput, "device_name", lambda device: "NVIDIA H200")
    callback, model = MetricsCallback(log_every_n_steps=4), Model(clock)
    row = fit(callback, model, 4)[4]
    expected = N * MICRO_BATCH * model.model.flops_per_token(N) / 66.9e12
    assert row["throughput/mfu"] == pytest.approx(expected)
    assert callback.summary()["mfu"] == pytest.approx(expected)


def test_nothing_waits_for_the_device_between_rows(clock):
    class CountReads(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    class Watched(MetricsCallback):
        def __init__(self):
            super().__init__(log_every_n_steps=4)
            self.reads = []

        def on_train_batch_end(self, *args):
            with CountReads() as reads:
                super().on_train_batch_end(*args)
            self.reads.append(reads.n)

    callback = Watched()
    fit(callback, Model(clock), 6)
    reading = [i // ACCUMULATE + 1 for i, n in enumerate(callback.reads) if n]
    assert reading == [1, 4]  # the steps with a row


def test_saved_bytes_are_those_of_the_trainers_precision(clock):
    model = Model(clock)
    row = fit(MetricsCallback(), model, 1, precision="bf16-mixed")[1]
    micro_batch = torch.zeros(MICRO_BATCH, N + 1, dtype=torch.int64)
    autocast = torch.autocast("cpu", torch.bfloat16)
    saved = saved_for_backward(model.model, micro_batch, precision=autocast)
    assert row["memory/saved_attention_gib"] * GIB == saved.attention
    assert row["memory/saved_total_gib"] * GIB == saved.total
    assert saved != saved_for_backward(model.model, micro_batch)


def test_saved_bytes_are_those_of_the_runs_loss(clock):
    model = Model(clock)
    model.loss_fn = ChunkedLoss(3)
    row = fit(MetricsCallback(), model, 1)[1]
    micro_batch = torch.zeros(MICRO_BATCH, N + 1, dtype=torch.int64)
    full, chunked = (
        saved_for_backward(model.model, micro_batch, loss_fn=loss_fn).total
        for loss_fn in (None, model.loss_fn)
    )
    assert row["memory/saved_total_gib"] * GIB == chunked != full


def test_counting_saved_bytes_does_not_change_the_training(clock, monkeypatch):
    counted = Model(clock)
    fit(MetricsCallback(), counted, 2)
    monkeypatch.setattr(
        metrics.memory, "saved_for_backward", lambda *a, **k: memory.SavedBytes(0, 0)
    )
    uncounted = Model(clock)
    fit(MetricsCallback(), uncounted, 2)
    assert counted.losses == uncounted.losses


def test_peak_memory_of_a_cpu_run_is_the_resident_set(clock):
    callback = MetricsCallback()
    row = fit(callback, Model(clock), 3)[3]
    assert 50 * 2**20 < callback.summary()["peak_rss_bytes"] < 64 * GIB
    assert row["memory/peak_rss_gib"] > 0.05
    assert callback.summary()["peak_allocated_bytes"] is None


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_peaks_start_after_the_warmup_steps(clock, monkeypatch, warmup_steps):
    resets = []
    model = Model(clock)
    monkeypatch.setattr(
        metrics.memory, "reset_peaks", lambda device: resets.append(len(model.losses))
    )
    fit(MetricsCallback(warmup_steps=warmup_steps), model, 4)
    assert resets == [warmup_steps * ACCUMULATE]


def test_peaks_of_a_run_no_longer_than_its_warmup_are_those_of_its_steps(clock, monkeypatch):
    resets = []
    monkeypatch.setattr(metrics.memory, "reset_peaks", resets.append)
    fit(MetricsCallback(warmup_steps=2), Model(clock), 2)
    assert resets == []


def test_a_micro_batch_beyond_ram_is_refused_before_the_first_step(clock, monkeypatch):
    class Ram:
        available = 100

    monkeypatch.setattr(memory.psutil, "virtual_memory", Ram)
    callback, model = MetricsCallback(), Model(clock)
    with pytest.raises(MemoryError, match="16 tokens"):
        fit(callback, model, 2)
    assert model.losses == []
    summary = callback.summary()
    assert summary["steps"] == 0
    assert summary["saved_total_bytes"] > 100
    assert summary["peak_rss_bytes"] > 0


def test_an_out_of_memory_says_where_before_the_trainer_frees_the_model(clock):
    class Full(Model):
        def training_step(self, batch, batch_idx):
            if len(self.losses) == 2:
                torch.empty(2**60, dtype=torch.uint8)
            return super().training_step(batch, batch_idx)

    callback = MetricsCallback()
    with pytest.raises(RuntimeError, match="allocate memory"):
        fit(callback, Full(clock), 2)
    summary = callback.summary()
    assert summary["oom_tried_bytes"] == 2**60
    assert summary["oom_where"] == "training_step"
    assert summary["oom_allocated_bytes"] > 50 * 2**20


def test_an_out_of_memory_of_the_optimizer_or_of_backward_inside_the_trainer_is_named(
    clock, monkeypatch
):
    full = Mock(side_effect=torch.OutOfMemoryError)  # a new one each time
    full.run_backward = full

    def where(owner, name: str) -> str:
        callback = MetricsCallback()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(torch.OutOfMemoryError):
                fit(callback, Model(clock), 1)
        return callback.summary()["oom_where"]

    # torch.optim.adam is no attribute of torch.optim.
    assert where(sys.modules["torch.optim.adam"], "_fused_adam") == "optimizer step"
    assert where(torch.autograd.Variable, "_execution_engine") == "backward"


def test_the_memory_before_forward_is_that_of_the_first_step_measured(clock, monkeypatch):
    model, asked = Model(clock), []

    def current(device):
        asked.append(len(model.losses))
        return 123

    monkeypatch.setattr(metrics.memory, "current", current)
    callback = MetricsCallback(warmup_steps=2)
    fit(callback, model, 4)
    assert asked == [2 * ACCUMULATE]
    assert callback.summary()["memory_before_forward_bytes"] == 123


@pytest.mark.gpu
def test_memory_before_forward_on_a_gpu_is_parameters_gradients_and_optimizer():
    def measured(width: int) -> tuple[int, int]:
        gc.collect()
        callback = MetricsCallback()
        fit(callback, Model(Clock(), width), 4, accelerator="gpu", devices=1)
        parts = callback.summary()["memory_parts_bytes"]
        held = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
        return callback.summary()["memory_before_forward_bytes"], held

    measured(8)  # a process's first run allocates what stays, such as the kernels' tables
    (small, small_held), (large, large_held) = measured(8), measured(512)
    # The difference leaves out cuBLAS's workspaces, which are of no part. The allocator rounds each
    # tensor up to 512 bytes.
    assert abs((large - small) - (large_held - small_held)) < 2**20


def test_summary_of_a_run(clock):
    callback, model = MetricsCallback(log_every_n_steps=2), Model(clock)
    rows = fit(callback, model, 4)
    summary = callback.summary()
    assert summary["train_loss_first"] == rows[1]["train/loss"]
    assert summary["train_loss_last"] == rows[4]["train/loss"]
    assert summary["tokens_per_s"] == pytest.approx(N * MICRO_BATCH)
    assert (summary["steps"], summary["tokens"]) == (4, 4 * TOKENS_PER_STEP)


def test_summary_of_a_run_shorter_than_its_warmup_has_no_speed(clock):
    callback = MetricsCallback()
    fit(callback, Model(clock), 1)
    assert callback.summary()["tokens_per_s"] is None
    assert callback.summary()["train_loss_last"] is not None


def test_summary_before_training_is_empty():
    summary = MetricsCallback().summary()
    assert summary.pop("steps") == summary.pop("tokens") == 0
    assert set(summary.values()) == {None}


def test_a_loss_that_is_not_finite_is_none_in_the_summary(clock):
    class Diverging(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    callback = MetricsCallback()
    fit(callback, Diverging(clock), 1)
    assert callback.summary()["train_loss_last"] is None


def test_a_resumed_run_continues_tokens_steps_and_the_open_row(clock, tmp_path):
    same = partial(batches, varied=False)
    whole = fit(MetricsCallback(log_every_n_steps=4), Model(clock), 6, loader=same(6))
    fit(
        MetricsCallback(log_every_n_steps=4),
        Model(clock),
        3,
        loader=same(6),
        callbacks=[SlowCheckpoint(clock, tmp_path, steps=(3,))],
    )
    callback = MetricsCallback(log_every_n_steps=4)
    resumed = fit(callback, Model(clock), 6, loader=same(6), ckpt=tmp_path / "3.ckpt")

    assert list(resumed) == [4, 6]
    for step in (4, 6):
        for key in ("train/loss", "train/lr", "train/grad_norm", "train/tokens"):
            assert resumed[step][key] == whole[step][key], (step, key)
    summary = callback.summary()
    assert (summary["steps"], summary["tokens"]) == (6, 6 * TOKENS_PER_STEP)
    assert summary["train_loss_first"] == whole[1]["train/loss"]


def test_a_resumed_run_has_its_own_warmup(clock, monkeypatch, tmp_path):
    checkpoint = SlowCheckpoint(clock, tmp_path, steps=(3,))
    fit(MetricsCallback(), Model(clock), 3, callbacks=[checkpoint])
    # The first two steps of the new process take ten times as long again.
    resets, model = [], Model(clock)
    monkeypatch.setattr(
        metrics.memory, "reset_peaks", lambda device: resets.append(len(model.losses))
    )
    callback = MetricsCallback(log_every_n_steps=1)
    rows = fit(callback, model, 6, loader=batches(6), ckpt=tmp_path / "3.ckpt")
    speeds = {step: row.get("throughput/tokens_per_s") for step, row in rows.items()}
    assert speeds == {4: None, 5: None, 6: pytest.approx(N * MICRO_BATCH)}
    assert resets == [2 * ACCUMULATE]


@pytest.mark.gpu
def test_a_gpu_run_reports_allocated_and_reserved_memory():
    callback = MetricsCallback(log_every_n_steps=4)
    row = fit(callback, Model(Clock()), 4, accelerator="gpu", devices=1)[4]
    summary = callback.summary()
    assert row["memory/peak_allocated_gib"] * GIB == summary["peak_allocated_bytes"]
    assert 0 < summary["peak_allocated_bytes"] <= summary["peak_reserved_bytes"]
    assert summary["peak_rss_bytes"] is None
    assert summary["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"log_every_n_steps": 0}, "log_every_n_steps=0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MetricsCallback(**settings)
