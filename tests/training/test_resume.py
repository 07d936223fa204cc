import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from training.errors import ConfigError
from training.resume import Resumed, check_same_run, find_checkpoint, read_header

NEWEST = Path("run") / "checkpoints" / "last.ckpt"
ABOUT = {
    "model": {"width": 128, "n_layer": 4, "positions": "rotary", "seq_len": 256, "dropout": 0.0},
    "optim": {"lr": 1e-3, "max_steps": 100},
    "tokenizer": "bytes",
    "seq_len": 256,
    "tokens_per_step": 4096,
}


def save(run_dir, step=5, age=0):
    path = run_dir / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"run": {"step": step, **ABOUT}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def find(tmp_path, resume, max_steps=100):
    return find_checkpoint(
        OmegaConf.create(
            {
                "resume": resume,
                "run_dir": str(tmp_path / "own"),
                "output_dir": str(tmp_path),
                "max_steps": max_steps,
            }
        )
    )


def test_null_starts_anew(tmp_path):
    save(tmp_path / "other")
    assert find(tmp_path, None) is None


def test_null_does_not_overwrite_a_run(tmp_path):
    save(tmp_path / "own")
    with pytest.raises(ConfigError, match="already holds a run; give resume=auto"):
        find(tmp_path, None)


def test_last_is_the_newest_checkpoint_under_output_dir(tmp_path):
    save(tmp_path / "day" / "old", age=10)
    newest = save(tmp_path / "day" / "new")
    save(tmp_path / "day" / "older", age=20)
    assert find(tmp_path, "last").path == newest


def test_last_without_any_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"resume=last, but no run under output_dir=.* has a"):
        find(tmp_path, "last")


def test_auto_is_the_own_folder_only(tmp_path):
    save(tmp_path / "other")
    assert find(tmp_path, "auto") is None
    own = save(tmp_path / "own")
    assert find(tmp_path, "auto").path == own


@pytest.mark.parametrize("name", ["run", "run/checkpoints", "run/checkpoints/last.ckpt"])
def test_a_path_is_a_run_folder_or_a_checkpoint(tmp_path, name):
    save(tmp_path / "run", step=7)
    resumed = find(tmp_path, str(tmp_path / name))
    assert (resumed.step, resumed.run_dir) == (7, tmp_path / "run")


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"resume=.*nowhere holds no checkpoint"):
        find(tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    file = tmp_path / "some.ckpt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some.ckpt is not a checkpoint of this program"):
        find(tmp_path, str(file))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    path = save(tmp_path / "run")
    torch.save({"run": {"step": 5, "x": tmp_path}}, path)  # not a plain value: pickle calls Path
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        find(tmp_path, str(path))


def test_a_checkpoint_at_max_steps_leaves_nothing_to_train(tmp_path):
    save(tmp_path / "other", step=100)
    with pytest.raises(ConfigError, match="is at step 100 already, so that max_steps=100"):
        find(tmp_path, "last")
    assert find(tmp_path, "last", max_steps=101).step == 100


def changed(group, **values):
    return {**ABOUT, group: {**ABOUT[group], **values}}


def check(about, was=ABOUT, resume="run"):
    check_same_run(Resumed(NEWEST, 5, was), about, resume)


@pytest.mark.parametrize(
    ("about", "names"),
    [
        (changed("model", width=64), r"model.width \(128 there, 64 here\)"),
        (changed("model", n_layer=2), r"model.n_layer \(4 there, 2 here\)"),
        (changed("optim", lr=1.0), r"optim.lr \(0.001 there, 1.0 here\)"),
        ({**ABOUT, "tokenizer": "words"}, r"differs in tokenizer;"),
    ],
)
def test_another_model_optimizer_or_tokeniser_is_refused(about, names):
    with pytest.raises(ConfigError, match=names):
        check(about)


@pytest.mark.parametrize(
    "about",
    [
        changed("model", dropout=0.1),
        # neither was there in older checkpoints
        changed("model", activation_checkpointing="block", offload_checkpoints=True),
        changed("model", seq_len=512),  # rotary positions have no table
        changed("optim", max_steps=200),
    ],
)
def test_what_may_change_is_accepted(about):
    check(about)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seq_len": 512}, "note: this run goes on with seq_len=512 (256 in the checkpoint)\n"),
        (
            {"seq_len": 512, "tokens_per_step": 8192},
            "note: this run goes on with seq_len=512 (256 in the checkpoint) "
            "and tokens_per_step=8192 (4096 in the checkpoint)\n",
        ),
        ({}, ""),
    ],
)
def test_other_lengths_are_told(changes, says, capsys):
    check({**ABOUT, **changes})
    assert capsys.readouterr().out == f"going on from step 5 of {NEWEST}\n{says}"


@pytest.mark.parametrize("changes", [{"seq_len": 512}, {"tokens_per_step": 8192}])
def test_the_newest_checkpoint_is_not_taken_for_another_command(changes):
    """As after a stop before the first checkpoint: then the newest is an earlier run's."""
    with pytest.raises(
        ConfigError, match=r"another command: .* \(\d+ in the .* give resume=run to"
    ):
        check({**ABOUT, **changes}, resume="last")
    check(changed("optim", max_steps=200), resume="last")  # a longer run of the same


def test_a_table_of_learned_positions_fixes_seq_len():
    was = changed("model", positions="learned")
    now = changed("model", positions="learned", seq_len=512)
    with pytest.raises(ConfigError, match=r"model\.seq_len"):
        check(now, was)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"run": {"step": 1}, "state_dict": {"w": torch.ones(1000)}}, path)
    assert read_header(path).step == 1
    data = bytearray(path.read_bytes())
    at = data.index(torch.ones(1000).numpy().tobytes())
    data[at + 100] ^= 1  # one bit of the weights
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        read_header(path)
