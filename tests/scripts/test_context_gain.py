"""The figures of context gain: which runs they draw, and what they draw."""

import json

import pytest
from matplotlib.figure import Figure

from scripts import context_gain


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder in a sweep's; return the sweep's."""

    def make(name, overrides=(), **summary):
        folder = tmp_path / "sweep" / name
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)))
        values = {"status": "ok", "attention": "naive", **summary}
        (folder / "summary.json").write_text(json.dumps(values))
        return tmp_path / "sweep"

    return make


def recall_run(make_run, seq_len, accuracy, lag=72, **more):
    return make_run(
        f"{seq_len}_{lag}_{accuracy}",
        [f"seq_len={seq_len}"],
        seq_len=seq_len,
        recall_accuracy=accuracy,
        recall_chance=0.0625,
        recall_symbols=1234,
        recall_lag=lag,
        **more,
    )


def bucket(first, last, loss, loss_own):
    return {
        "first": first,
        "last": last,
        "loss": loss,
        "tokens": 1000,
        "loss_own": loss_own,
        "tokens_own": 100,
        "documents_longer": 7,
    }


@pytest.fixture
def axes(monkeypatch):
    """The axes of every figure that is written, by its file's name."""
    drawn = {}
    save = Figure.savefig

    def keep(self, path, **settings):
        drawn[path.name.removesuffix(".partial")] = self.axes[0]
        save(self, path, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def lines(axes):
    """Label -> points."""
    return {line.get_label(): list(map(tuple, line.get_xydata())) for line in axes.lines}


def test_accuracy_is_drawn_over_length_with_lag_and_chance(make_run, tmp_path, axes, capsys):
    for seq_len, accuracy in ((256, 0.99), (64, 0.06), (128, 0.97), (128, 0.99)):
        folder = recall_run(make_run, seq_len, accuracy)
    assert context_gain.main([str(folder), f"--out={tmp_path / 'new' / 'gain'}"]) == 0
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["gain_recall.png"]
    found = lines(axes["gain_recall.png"])
    assert found["recalled, lag 72"] == [(64, 0.06), (128, pytest.approx(0.98)), (256, 0.99)]
    assert [x for x, _ in found["lag 72"]] == [72, 72]
    assert [y for _, y in found["by chance 0.0625"]] == [0.0625, 0.0625]
    out = capsys.readouterr().out
    assert "0.9700" in out
    assert "1,234" in out


def test_each_run_is_a_curve_of_its_loss_over_position(make_run, tmp_path, axes, capsys):
    near = [bucket(0, 127, 2.0, 2.0), bucket(128, 255, 1.5, 1.4)]
    far = [*near, bucket(256, 511, 1.2, None)]
    make_run("0", ["seq_len=256", "seed=1"], seq_len=256, loss_by_position=near)
    folder = make_run("1", ["seq_len=512", "seed=1"], seq_len=512, loss_by_position=far)
    assert context_gain.main([str(folder), f"--out={tmp_path / 'gain'}"]) == 0
    found = lines(axes["gain_positions.png"])
    assert found["seq_len=256"] == [(64, 2.0), (128, 2.0), (128, 1.5), (256, 1.5)]
    assert found["seq_len=512"][-2:] == [(256, 1.2), (512, 1.2)]
    assert sorted(map(len, found.values())) == [4, 4, 4, 6]  # dashed: where it is known
    assert "256-511" in capsys.readouterr().out


def test_runs_of_one_length_are_told_apart(make_run, tmp_path, axes):
    rows = [bucket(0, 127, 2.0, 2.0), bucket(128, 255, 1.5, 1.4)]
    for seed in (0, 1):
        overrides = ["seq_len=256", f"seed={seed}"]
        folder = make_run(str(seed), overrides, seq_len=256, loss_by_position=rows)
    context_gain.main([str(folder), f"--out={tmp_path / 'gain'}"])
    assert {"seq_len=256 seed=0", "seq_len=256 seed=1"} <= set(lines(axes["gain_positions.png"]))


def test_a_run_alone_needs_no_more_than_its_length_for_a_name(make_run, tmp_path, axes):
    rows = [bucket(0, 127, 2.0, 2.0), bucket(128, 255, 1.5, 1.4)]
    folder = make_run("0", ["seq_len=256", "seed=1"], seq_len=256, loss_by_position=rows)
    context_gain.main([str(folder), f"--out={tmp_path / 'gain'}"])
    assert "seq_len=256" in axes["gain_positions.png"].get_title()
    assert "all tokens" in lines(axes["gain_positions.png"])


def test_a_long_name_leaves_room_for_the_curves(make_run, tmp_path, axes):
    rows = [bucket(0, 127, 2.0, 2.0), bucket(128, 255, 1.5, 1.4)]
    for seed in (0, 1):
        overrides = [f"seed={seed}", *(f"a.key.number_{i}={seed}" for i in range(20))]
        folder = make_run(str(seed), overrides, seq_len=256, loss_by_position=rows)
    context_gain.main([str(folder), f"--out={tmp_path / 'gain'}"])
    assert max(map(len, lines(axes["gain_positions.png"]))) <= 50
    assert {"seq_len=256 seed=0", "seq_len=256 seed=1"} <= {
        name[:18] for name in lines(axes["gain_positions.png"])
    }


def test_a_run_named_twice_counts_once_and_a_failed_one_not(make_run, tmp_path, axes):
    recall_run(make_run, 64, 0.5, status="error")
    folder = recall_run(make_run, 128, 0.97)
    folders = [str(folder), str(folder / "128_72_0.97")]
    assert context_gain.main([*folders, f"--out={tmp_path / 'gain'}"]) == 0
    assert lines(axes["gain_recall.png"])["recalled, lag 72"] == [(128, 0.97)]
    assert len(context_gain.run_folders([folder, folder])) == 2


def test_folders_without_such_a_run_are_one_sentence(make_run, tmp_path, capsys):
    folder = make_run("0", seq_len=8)
    assert context_gain.main([str(folder), f"--out={tmp_path / 'gain'}"]) == 1
    assert capsys.readouterr().err.startswith("error: none of the 1 runs found has recall_accuracy")
    assert not list(tmp_path.glob("gain*"))


def test_what_is_no_folder_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        context_gain.parse(["/nowhere"])
    assert stop.value.code == 2
    assert "/nowhere is no folder" in capsys.readouterr().err
