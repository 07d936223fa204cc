"""train.py on a GPU: short runs of every backend, in the precision the device chooses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.gpu


def train(folder: Path, *overrides: str) -> dict:
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "device=cuda",
        "seq_len=500",  # no multiple of any block
        "global_batch_tokens=8000",
        "micro_batch_tokens=4000",
        "max_steps=10",
        "trainer.log_every_n_steps=1",
        "logger=csv",
        "sample.max_new_tokens=8",
        f"data.cache_dir='{folder / 'cache'}'",
        f"hydra.run.dir='{folder / 'run'}'",
        *overrides,
    ]
    subprocess.run(command, check=True, timeout=280)
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.parametrize("attention", ["flash_v1", "flash_v2"])
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["compile=true"],
        ["model.dropout=0.1"],
        ["loss=chunked", "model.activation_checkpointing=block", "compile=true"],
        [
            "loss=chunked",
            "model.activation_checkpointing=block",
            "model.offload_checkpoints=true",
            "model.dropout=0.1",
        ],
    ],
)
def test_flash_trains_in_bf16_and_reports_gpu_memory(tmp_path, attention, changes):
    summary = train(tmp_path, f"attention={attention}", *changes)
    assert (summary["status"], summary["device"]) == ("ok", "cuda")
    assert summary["precision"] == "bf16-mixed"
    assert summary["train_loss_last"] < summary["train_loss_first"] - 0.5
    assert summary["peak_reserved_bytes"] >= summary["peak_allocated_bytes"] > 0
    assert summary["tokens_per_s"] > 0


def test_backends_train_alike_in_float32(tmp_path):
    losses = {}
    for name in ("naive", "sdpa", "flash_v1", "flash_v2"):
        folder = tmp_path / name
        losses[name] = train(folder, f"attention={name}", "precision=32-true")["train_loss_last"]
    for name in ("sdpa", "flash_v1", "flash_v2"):
        assert losses[name] == pytest.approx(losses["naive"], rel=1e-3)


def test_saving_memory_leaves_the_losses_as_they_are(tmp_path):
    blocks = ["loss=chunked", "loss.chunk_tokens=900", "model.activation_checkpointing=block"]
    choices = {
        "plain": [],
        "checkpoints": blocks,
        "offloaded": [*blocks, "model.offload_checkpoints=true"],
        "compiled": [*blocks, "model.offload_checkpoints=true", "compile=true"],
    }
    summaries = {
        name: train(tmp_path / name, "precision=32-true", "deterministic=true", *choice)
        for name, choice in choices.items()
    }
    for name in choices:
        assert summaries[name]["train_loss_last"] == pytest.approx(
            summaries["plain"]["train_loss_last"], rel=1e-3
        )
    assert (
        summaries["offloaded"]["peak_allocated_bytes"]
        < summaries["checkpoints"]["peak_allocated_bytes"]
        < summaries["plain"]["peak_allocated_bytes"]
    )


def test_a_float16_run_with_the_loss_in_chunks_learns(tmp_path):
    losses = [
        train(tmp_path / name, "precision=16-mixed", f"loss={name}")["train_loss_last"]
        for name in ("full", "chunked")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
