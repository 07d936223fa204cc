"""One trial: the training step of train.py, its memory and what stops it."""

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from flash_attention import NaiveAttention
from models.loss import ChunkedLoss
from training import build, cli, memory, probe
from training.errors import ConfigError

TINY = ["model.n_layer=1", "model.width=32", "device=cpu"]


@pytest.fixture
def job(tmp_path):
    def make(*overrides, seq_len=192, steps=2, cap_bytes=None):
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
            cfg = hydra.compose("train", [*TINY, "run_dir=.", *overrides])
        OmegaConf.save(cfg, tmp_path / "config.yaml")
        return {
            "config": str(tmp_path / "config.yaml"),
            "seq_len": seq_len,
            "steps": steps,
            "cap_bytes": cap_bytes,
            "limit_s": 60.0,
        }

    return make


def run(job):
    """The result of a trial, and what it told before."""
    lines = []
    return probe.run(job, lambda **values: lines.append(values)), lines


@pytest.fixture
def seen(monkeypatch):
    """What each step of a trial begins with: tokens, and bytes that are there already."""
    steps = []

    class Watch(probe.StepWatch):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            state = trainer.optimizers[0].state.values()
            steps.append(
                {
                    "tokens": tuple(batch["tokens"].shape),
                    "module": pl_module,
                    "state": sum(t.numel() for of in state for t in of.values() if t.numel() > 1),
                    "gradients": sum(p.grad is not None for p in pl_module.parameters()),
                    "norm": pl_module.grad_norm,
                    "weight": pl_module.model.head_weight.detach().clone(),
                }
            )

    monkeypatch.setattr(probe, "StepWatch", Watch)
    return steps


def test_the_measured_step_is_a_whole_one_with_all_that_a_long_run_holds(job, seen):
    result, lines = run(job("attention=naive", "loss=chunked", "model.vocab_size=320"))
    assert result["status"] == "ok", result
    assert [step["tokens"] for step in seen] == [(1, 129)] * 3 + [(1, 193)] * 2
    assert lines == [{"event": "step", "number": 1}, {"event": "step", "number": 2}]
    module = seen[0]["module"]
    assert isinstance(module.loss_fn, ChunkedLoss)
    assert isinstance(module.model.blocks[0].attention.kernel, NaiveAttention)
    assert (module.model.seq_len, module.model.vocab_size) == (192, 320)
    parameters = list(module.parameters())
    matrices = [p for p in parameters if p.numel() > 1]
    assert seen[3]["state"] == 2 * sum(p.numel() for p in matrices)  # Adam's two moments
    assert seen[3]["gradients"] == len(parameters)
    assert seen[3]["norm"] > 0  # it was clipped
    assert not torch.equal(seen[3]["weight"], seen[4]["weight"])  # and updated
    assert result["seconds_per_step"] > 0
    assert 0 < result["allocated_bytes"] <= memory._peak_rss() + 2**20
    assert result["device"] == "cpu"


def test_a_long_step_is_not_made_twice(job, seen, monkeypatch):
    monkeypatch.setattr(probe, "LONG_STEP_S", 0.0)
    result, lines = run(job(steps=3))
    assert (result["status"], len(lines)) == ("ok", 1)


def test_it_leaves_no_file(job, tmp_path, monkeypatch):
    made = job()
    monkeypatch.chdir(tmp_path)
    run(made)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_more_than_the_ram_is_out_of_memory_before_it_is_tried(job):
    # 4 heads of 2^20 x 2^20 float32 scores: 16 TiB
    result, lines = run(job("attention=naive", seq_len=2**20))
    assert (result["status"], lines) == ("oom", [])
    assert result["oom_where"] == "before the first step"
    assert result["seq_len"] == 2**20


def test_more_resident_memory_than_the_cap_is_out_of_memory(job):
    result, lines = run(job(cap_bytes=2**26))  # no process with PyTorch is so small
    assert (result["status"], result["cap_bytes"]) == ("oom", 2**26)
    assert len(lines) == 2
    assert "GiB resident, more than the cap" in result["message"]
    result, lines = run(job("attention=naive", seq_len=2048, cap_bytes=2**26))
    assert (result["status"], lines) == ("oom", [])  # 4 x 2048^2 scores in float32 are 2^26 alone


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision=16-mixed"], "precision=16-mixed needs a GPU"),
        (["tokenizer=pretrained"], "model.vocab_size is not set, and nothing is tokenised here"),
    ],
)
def test_settings_that_no_length_can_have_are_refused(job, overrides, message):
    result, _ = run(job(*overrides))
    assert result["status"] == "refused"
    assert result["message"].startswith(message)


def test_a_fault_is_an_error_and_no_out_of_memory(job, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nadvice")

    monkeypatch.setattr("models.lit_gpt.LitGPT.training_step", fail)
    result, _ = run(job())
    assert result["status"] == "error"
    assert result["message"].endswith("an illegal memory access was encountered")
    assert "Traceback" in capsys.readouterr().err


def test_what_ran_out_of_memory_is_said(job, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")

    monkeypatch.setattr("models.gpt.MLP.forward", fail)
    result, _ = run(job())
    assert (result["status"], result["oom_tried_bytes"]) == ("oom", 2 * 2**30)
    assert result["oom_where"] == "blocks.0.mlp"


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["tokenizer=byte"], 256),
        (["tokenizer=bpe", "tokenizer.vocab_size=1000"], 1000),
        (["tokenizer=pretrained", "model.vocab_size=50304"], 0),  # not asked
    ],
)
def test_the_vocabulary_is_known_without_a_corpus(job, overrides, tokens):
    assert build.tokens_without_corpus(OmegaConf.load(job(*overrides)["config"])) == tokens


def test_a_cap_over_the_device_is_refused():
    with pytest.raises(ConfigError, match=r"a cap of 1,048,576\.000 GiB is more than the"):
        probe.limit_memory(torch.device("cpu"), 2**50)


@pytest.mark.gpu
def test_a_cap_limits_what_the_allocator_holds(job):
    """In this process the cap stays, so it is taken back."""
    try:
        scores = job("device=cuda", "attention=naive", seq_len=16384, cap_bytes=2**30)
        result, _ = run(scores)
        assert result["status"] == "oom"
        assert result["oom_tried_bytes"] > 0
        fits = job("device=cuda", seq_len=1024, cap_bytes=2**30)
        result, _ = run(fits)
        assert result["status"] == "ok"
        assert result["allocated_bytes"] <= result["reserved_bytes"] <= 2**30
        assert result["capacity_bytes"] == 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
