"""train.py from end to end, on a model and a corpus small enough for seconds."""

import csv
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

import train
from training.cli import CONFIGS

ROOT = CONFIGS.parent
EXPERIMENTS = sorted({path.stem for path in (CONFIGS / "experiment").glob("*.yaml")} - {"none"})
GROUP_CHOICES = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONFIGS.glob("*/*.yaml")
    if path.parent.name != "hydra" and path.stem != "base"
)
SMALL = [
    "device=cpu",
    "precision=32-true",
    "seq_len=32",
    "global_batch_tokens=256",
    "micro_batch_tokens=128",  # two forward passes per step
    "max_steps=4",
    "model.n_layer=1",
    "model.n_head=2",
    "model.width=32",
    "data=text_files",
    "data.val_fraction=0.2",
    "data.val_tokens=256",
    "optim.lr=1e-2",
    "optim.warmup_steps=0",
    "logger=csv",
    "sample.max_new_tokens=8",
    "trainer.log_every_n_steps=1",
    "trainer.val_every_n_steps=2",
    "callbacks.checkpoint.every_n_steps=2",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(10):
        lines = (f"def f{i}_{j}(x): return x + {i * j}" for j in range(40))
        (folder / f"{i}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def overrides(corpus, tmp_path):
    """The command line of a small run in a folder of tmp_path."""

    def command_line(*more: str, run: str = "run") -> list[str]:
        return [
            *SMALL,
            f"data.files='{corpus}/*.txt'",
            f"data.cache_dir='{corpus}/cache'",
            f"output_dir='{tmp_path}'",
            f"run_dir='{tmp_path / run}'",
            *more,
        ]

    return command_line


@pytest.fixture
def run(overrides):
    """Runs in this process; returns the summary."""

    def start(*more: str, run: str = "run") -> dict:
        return train.run(compose(*overrides(*more, run=run)))

    return start


def compose(*overrides: str):
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", list(overrides))


def column(folder: Path, key: str) -> dict[int, str]:
    """Step -> the column's value as written, where there is one."""
    return dict(rows(folder, key))


def rows(folder: Path, key: str) -> list[tuple[int, str]]:
    """Every (step, value) of the column, in the order of the file."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return [(int(row["step"]), row[key]) for row in csv.DictReader(file) if row.get(key)]


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


# --- a good run --------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_outputs(run, tmp_path):
    summary = run("max_steps=20", "trainer.val_every_n_steps=10")
    assert (summary["status"], summary["exit_code"], summary["error"]) == ("ok", 0, None)
    assert summary["train_loss_last"] < 0.75 * summary["train_loss_first"]
    assert summary["train_loss_first"] == pytest.approx(math.log(256), rel=0.1)
    assert summary["val_loss"] < 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert list(column(tmp_path / "run", "train/loss")) == list(range(1, 21))


def test_the_console_shows_validations_a_sample_and_the_summary(run, capsys):
    run()
    out = capsys.readouterr().out
    assert "step 2/4" in out
    assert "bits per byte" in out
    assert "sample" in out
    assert "run summary" in out


def test_the_end_of_a_run_is_validated_once(run, tmp_path):
    summary = run("trainer.val_every_n_steps=3")
    losses = rows(tmp_path / "run", "val/loss")
    assert [step for step, _ in losses] == [3, 4]
    assert float(losses[-1][1]) == summary["val_loss"]


def test_the_summary_describes_the_run(run):
    summary = run("attention=naive")
    expected = {"attention": "naive", "seq_len": 32, "tokens_per_step": 256, "accumulate": 2}
    assert expected.items() <= summary.items()
    assert summary["tokens"] == 4 * 256
    assert summary["versions"]["torch"] == torch.__version__


def test_a_seed_repeats_the_run(run, tmp_path):
    for name in ("a", "b"):
        run("model.dropout=0.1", run=name)
    run("model.dropout=0.1", "seed=1", run="c")
    a, b, c = (column(tmp_path / name, "train/loss") for name in "abc")
    assert a == b
    assert a != c


def test_backends_train_alike_over_twenty_steps(run, tmp_path):
    losses = {}
    steps = [
        "max_steps=20",
        "trainer.val_every_n_steps=20",
        "callbacks.checkpoint.every_n_steps=20",
    ]
    for name in ("naive", "sdpa", "flash_v1", "flash_v2"):
        run(f"attention={name}", *steps, run=name)
        column_text = column(tmp_path / name, "train/loss")
        losses[name] = torch.tensor([float(loss) for loss in column_text.values()])
    for name in ("sdpa", "flash_v1", "flash_v2"):
        torch.testing.assert_close(losses[name], losses["naive"], rtol=1e-4, atol=0)


def test_wandb_is_offline_without_a_key_and_holds_metrics_and_config(run, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run("logger=default")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    # W&B's own process writes the file, and may do so after its answer to finish().
    wait_for(lambda: any(r.HasField("exit") for r in read_wandb(file)))
    records = read_wandb(file)
    history = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    with open(tmp_path / "run" / "metrics.csv", newline="", encoding="utf-8") as file:
        written = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "throughput/tokens_per_s",
        "memory/saved_attention_gib",
        "memory/saved_total_gib",
        "val/loss",
    } <= {key for row in written for key in row}
    for row in written:
        row["trainer/global_step"] = row.pop("step")
    for row in history:
        for key in [key for key in row if key.startswith("_")]:  # W&B's own
            del row[key]
    assert history == written
    config = {i.key for r in records if r.HasField("run") for i in r.run.config.update}
    config |= {i.key for r in records if r.HasField("config") for i in r.config.update}
    assert "seq_len" in config
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]


def read_wandb(file: Path) -> list:
    """The records of a W&B file: a LevelDB log of protocol buffers, with W&B's own file header."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, header = 32768, 7
    data = file.read_bytes()
    records, parts, at = [], [], header
    while at + header <= len(data):
        if block - at % block < header:  # a block's rest is padding when no header fits
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + header + length > len(data):
            break  # not written yet
        parts.append(data[at + header : at + header + length])
        at += header + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


# --- the configs -------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", GROUP_CHOICES)
def test_every_choice_composes_and_resolves(choice):
    cfg = compose(choice, "run_dir=x")
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


# What makes an experiment small enough for a test; everything else is its own setting.
EXPERIMENT_SIZES = {
    "context_gain": [
        "seq_len=64",
        "global_batch_tokens=128",
        "callbacks.loss_by_position.first=16",
        "max_steps=2",
    ],
    "gpt2_small_8k": [
        "seq_len=64",
        "global_batch_tokens=128",
        "micro_batch_tokens=64",
        "tokenizer.vocab_size=300",
        "max_steps=3",
    ],
    "long_context": ["seq_len=64", "global_batch_tokens=128", "max_steps=11"],
    "parity": ["seq_len=64", "global_batch_tokens=128", "max_steps=4"],
    "recall": ["seq_len=64", "global_batch_tokens=128", "max_steps=2", "data.val_tokens=2048"],
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_with_its_own_settings(tmp_path, experiment, deterministic_as_before):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(4):
        lines = (f"def f{i}_{j}(x): return x + {i * j}\n" for j in range(200))
        (corpus / f"{i}.txt").write_text("".join(lines), encoding="utf-8")
    summary = train.run(
        compose(
            f"experiment={experiment}",
            *EXPERIMENT_SIZES[experiment],
            "device=cpu",
            "model.n_layer=1",
            "model.n_head=2",
            "model.width=32",
            *(
                ["data.n_tokens=100000"]
                if experiment == "recall"
                else ["data=text_files", f"data.files='{corpus}/*.txt'", "sample.max_new_tokens=8"]
            ),
            f"data.cache_dir='{tmp_path}/cache'",
            "logger=csv",
            f"output_dir='{tmp_path}'",
            f"run_dir='{tmp_path}/run'",
        )
    )
    assert summary["status"] == "ok"
    rates = [float(lr) for lr in column(tmp_path / "run", "train/lr").values()]
    if experiment == "gpt2_small_8k":
        assert summary["precision"] == "bf16-mixed"
        assert rates == pytest.approx([6e-4 / 51, 6e-4 * 3 / 51])
        state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
        assert state["run"]["model"]["vocab_size"] == 320  # of the BPE: bytes would have 256
    elif experiment == "long_context":
        assert compose("experiment=long_context", "run_dir=x").seq_len == 4096
        assert list(column(tmp_path / "run", "val/loss")) == [10, 11]
    elif experiment == "parity":
        assert summary["precision"] == "32-true"
        assert torch.are_deterministic_algorithms_enabled()
        assert len(rates) == 4  # every step has its row
    elif experiment == "recall":
        assert summary["recall_lag"] > 64  # the sequence's length here: nothing to recall
        assert 0 <= summary["recall_accuracy"] < 0.3
        assert summary["recall_chance"] == float(column(tmp_path / "run", "val/recall_chance")[2])
    elif experiment == "context_gain":
        found = [(b["first"], b["last"]) for b in summary["loss_by_position"]]
        assert found == [(0, 15), (16, 31), (32, 63)]
        assert (tmp_path / "run" / "loss_by_position.png").exists()
    else:
        raise AssertionError("say here what the experiment is for")


@pytest.fixture
def deterministic_as_before():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def test_every_consumer_has_the_root_seq_len():
    cfg = OmegaConf.to_container(compose("seq_len=77", "run_dir=x"), resolve=True)
    found = [value for key, value in leaves(cfg) if key == "seq_len"]
    assert len(found) == 3  # the root, the model, the data
    assert set(found) == {77}


def test_every_consumer_has_the_root_max_steps():
    cfg = OmegaConf.to_container(compose("max_steps=77", "run_dir=x"), resolve=True)
    assert {value for key, value in leaves(cfg) if key == "max_steps"} == {77}


def leaves(node: dict):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield key, value


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("seq_len=0", "seq_len=0 is not accepted; give an integer of at least 1"),
        ("seq_len=-1", "seq_len=-1 is not accepted; give an integer of at least 1"),
        ("model.n_head=3", "model.n_head=3 does not divide model.width=32"),
        ("global_batch_tokens=8", "global_batch_tokens=8 holds no sequence of seq_len=32"),
        ("precision=16-mixed", "precision=16-mixed needs a GPU"),
        ("resume=nowhere", "resume=nowhere holds no checkpoint"),
        ("model.vocab_size=100", "model.vocab_size=100 is smaller than the tokeniser's 256"),
        ("data.files='/nowhere/*.txt'", "data.files="),
        ("model.offload_checkpoints=true", "there are none; give model.activation_checkpointing="),
        pytest.param("device=cuda", "device=cuda, but PyTorch sees no CUDA GPU", marks=NO_GPU),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, capsys, change, sentence):
    check_refused(run(change), tmp_path, capsys, sentence)


def test_offloading_on_a_cpu_is_one_sentence_and_exit_code_2(run, tmp_path, capsys):
    summary = run("model.activation_checkpointing=block", "model.offload_checkpoints=true")
    check_refused(summary, tmp_path, capsys, "off a GPU, this run is on the cpu")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"caf\xe9", "is not UTF-8 (byte 3); convert it"),
        (b"", "data=text_files has no text; give at least one document with text"),
    ],
)
def test_a_bad_file_is_one_sentence_and_exit_code_2(run, tmp_path, capsys, content, sentence):
    (tmp_path / "bad.txt").write_bytes(content)
    summary = run(f"data.files='{tmp_path}/bad.txt'", f"data.cache_dir='{tmp_path}/cache'")
    check_refused(summary, tmp_path, capsys, sentence)
    assert not list(tmp_path.glob("cache/**/*.bin*"))


def test_a_seq_len_longer_than_the_corpus_is_one_sentence_and_exit_code_2(run, tmp_path, capsys):
    summary = run("seq_len=1000000", "global_batch_tokens=auto")
    check_refused(summary, tmp_path, capsys, "seq_len=1000000 is too long for the training split")


def check_refused(summary: dict, tmp_path: Path, capsys, sentence: str) -> None:
    assert (summary["status"], summary["exit_code"]) == ("error", 2)
    stderr = capsys.readouterr().err
    assert sentence in stderr
    progress = "Tokenising"  # of the first run on a corpus
    assert len([line for line in stderr.splitlines() if not line.startswith(progress)]) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"] in stderr


def test_a_diverged_run_stops_and_saves_no_bad_checkpoint(run, tmp_path, capsys):
    summary = run("optim.lr=1e30", "optim.grad_clip=null", "max_steps=20")
    assert (summary["status"], summary["exit_code"]) == ("diverged", 1)
    assert "lower optim.lr" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_running_out_of_memory_is_a_status(run, monkeypatch, capsys):
    import training.memory

    class NoMemory:
        available = 0

    monkeypatch.setattr(training.memory.psutil, "virtual_memory", NoMemory)
    summary = run()
    assert (summary["status"], summary["exit_code"]) == ("oom", 3)
    assert summary["saved_total_bytes"] > 0  # measured before it failed
    assert "\nout of memory: " in "\n" + capsys.readouterr().err  # after "Tokenising"


def test_an_out_of_memory_on_the_way_says_what_was_being_allocated(run, capsys):
    summary = run("+callbacks.die={_target_: tests.dying.Die, seq_len: 32, ways: {32: memory}}")
    assert (summary["status"], summary["exit_code"]) == ("oom", 3)
    assert summary["oom_tried_bytes"] == 2**60
    assert summary["oom_frame"].startswith("tests/dying.py:")
    assert summary["oom_allocated_bytes"] > 2**27  # the process's; PyTorch alone is more
    assert summary["oom_where"] == "on_train_batch_end"
    assert "in on_train_batch_end: tests/dying.py:" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_and_a_log(run, tmp_path, monkeypatch, capsys):
    fail_at_validation(monkeypatch, RuntimeError("something\nbroke"))
    summary = run()
    assert (summary["status"], summary["exit_code"]) == ("error", 1)
    log = tmp_path / "run" / "error.log"
    assert "Traceback" in log.read_text()
    stderr = capsys.readouterr().err
    assert f"error: RuntimeError: something\nThe full traceback is in {log}\n" in stderr
    assert "Traceback" not in stderr


def test_ctrl_c_is_interrupted(run, monkeypatch):
    fail_at_validation(monkeypatch, KeyboardInterrupt())
    before = signal.getsignal(signal.SIGINT)
    try:
        summary = run()
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores further ones
    assert (summary["status"], summary["exit_code"]) == ("interrupted", 130)
    assert not list(Path(summary["run_dir"]).glob("checkpoints/*"))
    assert summary["error"] == "stopped by Ctrl-C or a signal, before the first checkpoint"


def fail_at_validation(monkeypatch, error: BaseException) -> None:
    from training.console import ValidationReport

    def fail(*_):
        raise error

    monkeypatch.setattr(ValidationReport, "on_validation_end", fail)


# --- resuming ----------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """Sums are split over threads: bit for bit needs the same number in every process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    torch.set_num_threads(before)


LOSSES = ("train/loss", "train/lr", "train/grad_norm", "train/tokens", "val/loss")


def test_a_killed_run_goes_on_bit_for_bit(overrides, run, tmp_path, one_thread):
    settings = [
        "optim.max_steps=24",  # the learning rates, however many steps there are
        "model.dropout=0.1",
        "trainer.val_every_n_steps=6",
        "callbacks.checkpoint.every_n_steps=4",
    ]
    killed = tmp_path / "killed"
    endless = overrides(*settings, "max_steps=100000", run="killed")
    command = [sys.executable, str(ROOT / "train.py"), *endless]
    process = subprocess.Popen(
        [*command, f"hydra.run.dir='{killed}'"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **one_thread},
    )
    # Past a checkpoint, so that there are rows that the resumed run must not keep.
    wait_for(lambda: (killed / "checkpoints" / "last.ckpt").exists() or process.poll() is not None)
    wait_for(lambda: max(column(killed, "train/loss")) % 4 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "summary.json").exists()

    # Wherever the kill has landed, some steps are left.
    checkpoint = torch.load(killed / "checkpoints" / "last.ckpt", weights_only=True)
    settings.append(f"max_steps={checkpoint['global_step'] + 11}")
    run(*settings, run="whole")
    assert run(*settings, f"resume='{killed}'", run="elsewhere")["status"] == "ok"
    assert run(*settings, "resume=auto", run="killed")["status"] == "ok"
    for folder in ("elsewhere", "killed"):
        for key in LOSSES:
            assert rows(tmp_path / folder, key) == rows(tmp_path / "whole", key), (folder, key)
    weights = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "elsewhere")
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_a_validation_at_the_checkpoint_s_step_is_not_repeated(run, tmp_path, monkeypatch):
    settings = ["max_steps=6", "callbacks.checkpoint.every_n_steps=4"]
    run(*settings, run="whole")
    with monkeypatch.context() as patch:
        only_first_checkpoint(patch)
        run(*settings, run="cut")
    run(*settings, f"resume='{tmp_path / 'cut'}'", run="resumed")
    for key in LOSSES:
        assert rows(tmp_path / "resumed", key) == rows(tmp_path / "whole", key)


def test_a_resume_may_change_the_micro_batch(run, tmp_path, monkeypatch):
    run("max_steps=6", run="whole")
    with monkeypatch.context() as patch:
        only_first_checkpoint(patch)
        run("max_steps=6", run="cut")
    smaller = ["micro_batch_tokens=64", f"resume='{tmp_path / 'cut'}'"]
    run("max_steps=6", *smaller, run="resumed")
    for key in ("train/loss", "val/loss"):
        whole, resumed = (column(tmp_path / name, key) for name in ("whole", "resumed"))
        assert list(resumed) == list(whole)
        assert [float(v) for v in resumed.values()] == pytest.approx(
            [float(v) for v in whole.values()], rel=1e-5
        )


def only_first_checkpoint(patch) -> None:
    """As if the run had been killed before its second checkpoint."""
    from training.checkpoint import AtomicCheckpointIO

    save = AtomicCheckpointIO.save_checkpoint
    patch.setattr(
        AtomicCheckpointIO,
        "save_checkpoint",
        lambda self, state, path, **_: Path(path).exists() or save(self, state, path),
    )


@pytest.mark.parametrize(("before", "after"), [("naive", "flash_v1"), ("flash_v1", "naive")])
def test_a_checkpoint_goes_on_with_another_backend_and_more_steps(run, tmp_path, before, after):
    more = ["max_steps=6", "optim.max_steps=6"]
    run(f"attention={before}", *more, run="whole")
    run(f"attention={before}", "optim.max_steps=6", run="first")
    summary = run(f"attention={after}", *more, "resume=last", run="second")
    assert (summary["status"], summary["steps"], summary["attention"]) == ("ok", 6, after)
    for key in ("train/loss", "val/loss"):
        whole, second = (column(tmp_path / name, key) for name in ("whole", "second"))
        assert list(second) == list(whole)
        assert [float(v) for v in second.values()] == pytest.approx(
            [float(v) for v in whole.values()], rel=1e-4
        )


def test_a_run_goes_on_with_less_memory_and_the_same_losses(run, tmp_path):
    settings = ["max_steps=6", "optim.max_steps=6", "model.dropout=0.1"]
    run(*settings, run="whole")
    run(*settings, "max_steps=4", run="first")
    less = ["loss=chunked", "loss.chunk_tokens=50", "model.activation_checkpointing=block"]
    summary = run(*settings, *less, "resume=last", run="second")
    assert (summary["status"], summary["steps"]) == ("ok", 6)
    for key in ("train/loss", "val/loss"):
        whole, second = (column(tmp_path / name, key) for name in ("whole", "second"))
        assert list(second) == list(whole)
        assert [float(v) for v in second.values()] == pytest.approx(
            [float(v) for v in whole.values()], rel=1e-5
        )


def test_a_finished_run_with_resume_auto_stays_as_it_is(run, tmp_path, capsys):
    before = run()
    written = files(tmp_path / "run")
    capsys.readouterr()
    assert run("resume=auto") == before
    out = capsys.readouterr().out
    assert "nothing is left to train" in out
    assert out.count("\n") == 1
    assert files(tmp_path / "run") == written


def test_a_finished_run_that_then_failed_ends_well_with_resume_auto(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("training.sample.sample_text", lambda *_, **__: 1 / 0)
        assert run()["status"] == "error"
    assert run("resume=auto")["status"] == "ok"


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_of_another_model_is_refused_with_the_keys(run, capsys):
    run(run="first")
    summary = run("model.width=64", "model.n_layer=2", "max_steps=6", "resume=last", run="second")
    assert summary["exit_code"] == 2
    error = capsys.readouterr().err
    assert "model.n_layer (1 there, 2 here), model.width (32 there, 64 here)" in error


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("resume=null", "already holds a run"),
        ("seq_len=0", "seq_len=0 is not accepted"),
        ("model.width=64", "differs in"),
    ],
)
def test_a_refused_attempt_leaves_the_run_in_its_folder_as_it_is(
    run, tmp_path, capsys, change, sentence
):
    run()
    written = files(tmp_path / "run")
    capsys.readouterr()
    summary = run("max_steps=6", "resume=auto", change)
    assert summary["exit_code"] == 2
    assert sentence in capsys.readouterr().err
    assert files(tmp_path / "run") == written


def test_an_attempt_that_breaks_before_training_writes_no_log_over_a_run(
    run, tmp_path, monkeypatch, capsys
):
    run()
    written = files(tmp_path / "run")
    monkeypatch.setattr("training.build.build_model", lambda *_: 1 / 0)
    summary = run("max_steps=6", "resume=auto")
    assert (summary["status"], summary["exit_code"]) == ("error", 1)
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert files(tmp_path / "run") == written


def test_a_resumed_run_that_trained_and_failed_says_so(run, tmp_path, monkeypatch):
    run()
    fail_at_validation(monkeypatch, RuntimeError("broke"))
    run("max_steps=6", "resume=auto")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "error"
    assert (tmp_path / "run" / "error.log").exists()


def test_a_resume_with_another_length_says_so(run, tmp_path, capsys):
    run(run="first")
    capsys.readouterr()
    again = ["max_steps=6", f"resume={tmp_path / 'first'}"]
    assert run(*again, "seq_len=16", "global_batch_tokens=512", run="second")["status"] == "ok"
    out = capsys.readouterr().out
    assert "seq_len=16 (32 in the checkpoint) and tokens_per_step=512 (256 in the" in out


def test_the_newest_run_of_another_length_is_not_gone_on_with(run):
    run(run="first")
    summary = run("max_steps=6", "resume=last", "seq_len=16", run="second")
    assert summary["status"] == "error"
    assert "seq_len=16 (32 in the checkpoint)" in summary["error"]


def test_a_resume_with_the_same_lengths_says_nothing_of_them(run, capsys):
    run(run="first")
    capsys.readouterr()
    run("max_steps=6", "resume=last", run="second")
    assert "in the checkpoint" not in capsys.readouterr().out


def test_a_resumed_run_keeps_its_wandb_id(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("logger=default", run="first")
    run("logger=default", "max_steps=6", "resume=last", run="second")
    files = [next((tmp_path / n / "wandb").glob("*/run-*.wandb")) for n in ("first", "second")]
    assert files[0].name == files[1].name


# --- the program -------------------------------------------------------------------------------


def program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_misspelt_key_is_one_line(tmp_path):
    done = program("seqlen=8192", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: there is no key seqlen; did you mean seq_len?\n"


def test_an_unknown_choice_is_one_line_and_leaves_nothing(tmp_path):
    done = program("attention=nope", "hydra.run.dir=here", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: attention=nope is no choice; give one of flash_v1, flash_v2, naive, sdpa\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_refused_value_ends_the_program_with_exit_code_2(overrides, monkeypatch):
    """What the whole program prints and leaves then is in test_multirun.py."""
    monkeypatch.setattr(
        train, "HydraConfig", SimpleNamespace(get=lambda: SimpleNamespace(mode=RunMode.RUN))
    )
    with pytest.raises(SystemExit) as end:
        train.main(compose(*overrides("seq_len=0")))
    assert end.value.code == 2


def test_help_names_every_root_key_and_every_choice(tmp_path):
    done = program("--help", cwd=tmp_path)
    assert done.returncode == 0
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    for key in set(compose("run_dir=x")) - groups - {"run_dir"}:
        assert f"{key}:" in done.stdout
    for choice in GROUP_CHOICES:
        group, name = choice.split("=")
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [group])
        assert name in line
