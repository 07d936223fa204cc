"""nanoGPT's step, timed: tokens per step, what is counted, what is refused."""

import csv
import sys
from types import SimpleNamespace

import pytest
import torch

from scripts import nanogpt_step

# Stands for a clone of nanoGPT: by its clock, a step takes a time known from its tokens.
MODEL = """
from dataclasses import dataclass
import torch

now = 0.0
sdpa = []  # at each step, whether SDPA may choose its plain backend
cached = []  # at each step, whether a graph compiled before may be taken

@dataclass
class GPTConfig:
    block_size: int = 1
    vocab_size: int = 1
    dropout: float = 0.5

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert (config.vocab_size, config.dropout) == (50304, 0.0)
        self.config, self.calls = config, 0
        self.weight = torch.nn.Parameter(torch.ones(7))

    def forward(self, tokens, targets):
        assert tokens.shape == targets.shape and tokens.shape[1] == self.config.block_size
        sdpa.append(torch.backends.cuda.math_sdp_enabled())
        cached.append(not torch.compiler.config.force_disable_caches)
        assert torch.is_autocast_enabled("cpu") and torch.equal(tokens[:, 1:], targets[:, :-1])
        self.calls += 1
        global now
        slow = 1e6 if self.calls <= 3 else 3 if self.calls == 4 else 1  # a first step compiles
        now += slow * tokens.numel() / 1000
        return None, self.weight.sum()

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate)
"""


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "model.py").write_text(MODEL)
    return tmp_path / "nanoGPT"


def test_each_length_has_the_tokens_asked_for_or_one_sequence(clone, tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: sys.modules["nanogpt_model"].now)
    monkeypatch.setattr(nanogpt_step, "time", clock)
    out = tmp_path / "steps.csv"
    given = (
        f"{clone} --seq-lens 10 20 80 --tokens 40 --steps 3 --device cpu --no-compile --out {out}"
    )
    assert nanogpt_step.main(given.split()) == 0
    with open(out, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["seq_len"], r["batch"]) for r in rows] == [("10", "4"), ("20", "2"), ("80", "1")]
    for row in rows:
        # The median: the steps that warm up do not count, nor does one that is slow.
        assert float(row["tokens_per_s"]) == pytest.approx(1000)
        assert (row["parameters"], row["device_name"]) == ("7", "cpu")


@pytest.mark.parametrize(("given", "free"), [([], True), (["--sdpa", "flash"], False)])
def test_sdpa_has_the_backend_asked_for(clone, tmp_path, given, free):
    args = [str(clone), "--device=cpu", "--no-compile", "--steps=1", "--seq-lens=10"]
    assert nanogpt_step.main([*args, f"--out={tmp_path / 'steps.csv'}", *given]) == 0
    assert sys.modules["nanogpt_model"].sdpa == [free] * 4
    assert not any(sys.modules["nanogpt_model"].cached)  # by an earlier run, of another backend
    assert torch.backends.cuda.math_sdp_enabled()  # afterwards as before
    with open(tmp_path / "steps.csv", encoding="utf-8") as file:
        assert {row["sdpa"] for row in csv.DictReader(file)} == {given[-1] if given else "any"}


def test_a_folder_without_nanogpt_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        nanogpt_step.main([str(tmp_path), "--device", "cpu"])
    assert f"{tmp_path} has no model.py; give the folder of a clone" in capsys.readouterr().err


def test_a_backend_that_the_cpu_lacks_is_refused(clone, tmp_path, capsys):
    with pytest.raises(SystemExit):
        nanogpt_step.main([str(clone), "--device=cpu", "--sdpa=cudnn", f"--out={tmp_path / 'x'}"])
    assert "--sdpa: cudnn is not on the CPU; give any or flash" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
