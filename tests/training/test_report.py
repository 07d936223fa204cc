"""Tables and plot from run folders."""

import csv
import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from training import report
from training.report import exponent, longest_lengths, read_rows, to_csv, to_markdown, to_rich
from training.units import GIB


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder; return its path."""

    def make(number: int, overrides: list[str] = (), **summary):
        folder = tmp_path / f"{number}_{','.join(overrides)}"
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)))
        values = {"status": "ok", "attention": "naive", "model": "tiny", **summary}
        (folder / "summary.json").write_text(json.dumps(values))
        return folder

    return make


@pytest.fixture
def sweep(make_run):
    """Two backends at three lengths; naive runs out of memory at the longest."""
    folders = []
    for backend, power in (("flash_v1", 1), ("naive", 2)):
        for n in (1024, 2048, 4096):
            saved = n**power * GIB // 1024
            values = {
                "attention": backend,
                "seq_len": n,
                "micro_batch_size": 4,
                "saved_attention_bytes": 4 * saved,
                "saved_total_bytes": 5 * saved,
                "peak_rss_bytes": 8 * saved,
                "tokens_per_s": 1234.5,
            }
            if (backend, n) == ("naive", 4096):
                values |= {"status": "oom", "error": "no room\nadvice", "peak_rss_bytes": None}
            overrides = [f"attention={backend}", f"seq_len={n}", "max_steps=2"]
            folders.append(make_run(len(folders), overrides, **values))
    return read_rows(folders)


def test_rows_keep_the_summary_and_add_what_is_derived(make_run):
    folder = make_run(
        3, ["seq_len=8"], seq_len=8, micro_batch_size=4, saved_attention_bytes=100, peak_rss_bytes=7
    )
    (row,) = read_rows([folder])
    assert row["seq_len"] == 8
    assert row["overrides"] == ["seq_len=8"]
    assert row["folder"] == folder.name
    assert row["saved_attention_bytes_per_sequence"] == 25
    assert row["peak_bytes"] == 7


def test_the_peak_of_a_gpu_run_is_what_was_allocated_there(make_run):
    (row,) = read_rows([make_run(0, peak_allocated_bytes=5, peak_rss_bytes=None)])
    assert row["peak_bytes"] == 5


def test_a_run_that_died_early_has_a_row_too(make_run):
    (row,) = read_rows([make_run(0, status="crashed", error="killed by SIGKILL")])
    assert row["peak_bytes"] is None
    assert row["saved_attention_bytes_per_sequence"] is None
    assert "crashed" in to_markdown([row])
    assert "crashed" in to_csv([row])


def test_csv_has_a_line_per_run_and_unrounded_numbers(sweep):
    lines = list(csv.DictReader(io.StringIO(to_csv(sweep))))
    assert len(lines) == 6
    assert lines[0]["tokens_per_s"] == "1234.5"
    assert int(lines[1]["saved_attention_bytes"]) == 4 * 2048 * GIB // 1024
    assert lines[5]["status"] == "oom"
    assert lines[5]["peak_rss_bytes"] == ""
    assert lines[5]["error"] == "no room advice"
    assert lines[0]["overrides"] == "attention=flash_v1 seq_len=1024 max_steps=2"


def test_markdown_shows_three_digits_of_small_sizes(make_run):
    (row,) = read_rows([make_run(0, saved_attention_bytes=364544)])
    assert "| 0.00034 |" in to_markdown([row])


def test_csv_leaves_nested_values_out(make_run):
    (row,) = read_rows([make_run(0, versions={"torch": "2"})])
    assert "versions" not in to_csv([row])


def test_markdown_shows_gib_and_the_longest_length_of_each_backend(sweep):
    lines = to_markdown(sweep).splitlines()
    assert lines[0].startswith("| run | status | attention | seq_len | saved by attention (GiB)")
    assert lines[3] == "| 1 | ok | flash_v1 | 2,048 | 8.000 | 10.000 | 16.000 | 1,234 |"
    assert "- longest seq_len that trained with flash_v1: 4,096" in lines
    assert "- longest seq_len that trained with naive: 2,048" in lines
    assert "- run 5 (oom): no room" in lines


@pytest.fixture
def steps(make_run):
    """Rows of runs of the given (sequence length, tokens per step)."""

    def make(*runs):
        return read_rows(
            make_run(i, seq_len=n, tokens_per_step=tokens) for i, (n, tokens) in enumerate(runs)
        )

    return make


def test_every_table_shows_the_tokens_per_step(steps):
    rows = steps((1024, 4096), (8192, 8192))
    assert "| run | status | attention | seq_len | tokens per step |" in to_markdown(rows)
    assert "| 1 | ok | naive | 8,192 | 8,192 |" in to_markdown(rows)
    assert "tokens per step" in [column.header for column in to_rich(rows).columns]
    assert [row["tokens_per_step"] for row in csv.DictReader(io.StringIO(to_csv(rows)))] == [
        "4096",
        "8192",
    ]


def test_steps_of_different_tokens_are_noted_with_the_step_that_makes_them_equal(steps):
    note = "- losses do not compare: tokens per step differ; give global_batch_tokens=8192"
    assert note in to_markdown(steps((1024, 4096), (8192, 8192), (2048, 4096))).splitlines()


def test_the_step_noted_is_whole_sequences_of_every_length(steps):
    note = "give global_batch_tokens=6000"  # 5000 holds no whole number of 1500
    assert note in to_markdown(steps((1500, 4500), (1000, 5000)))


def test_steps_of_as_many_tokens_are_not_noted(steps):
    assert "compare" not in to_markdown(steps((1024, 4096), (2048, 4096)))


def test_a_run_that_never_had_a_step_is_not_noted(steps, make_run):
    rows = [*steps((1024, 4096)), *read_rows([make_run(9, status="crashed", error="gone")])]
    assert "compare" not in to_markdown(rows)


def test_markdown_shows_the_overrides_that_differ_and_escapes_bars(make_run):
    rows = read_rows(
        [make_run(i, [f"optim.lr={i}", "name=a|b", "seed=0"][: 3 - i]) for i in (0, 1)]
    )
    lines = to_markdown(rows).splitlines()
    assert lines[2].startswith("| 0 optim.lr=0 seed=0 |")
    assert lines[3].startswith("| 1 optim.lr=1 |")
    assert r"a\|b" in to_markdown(read_rows([make_run(2, ["name=a|b"]), make_run(3)]))


def test_terminal_table_shows_overrides_as_they_are(make_run):
    rows = read_rows([make_run(0, ["optim.betas=[red,0.9]"]), make_run(1)])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(to_rich(rows))
    assert "optim.betas=[red,0.9]" in captured.get()


def test_a_failed_run_is_not_a_length_that_trained(sweep):
    assert longest_lengths(sweep) == {"flash_v1": 4096, "naive": 2048}


@pytest.mark.parametrize("power", [1, 2])
def test_exponent_of_a_power_law(power):
    assert exponent([(n, 3.0 * n**power) for n in (64, 128, 512)]) == pytest.approx(power)


def test_exponent_is_that_of_the_longest_lengths():
    points = [(n, n**2 + 1000 * n) for n in (10, 100, 10**5, 10**6)]
    assert exponent(points) == pytest.approx(2, abs=0.01)


def test_one_length_has_no_exponent():
    assert exponent([(64, 3.0)]) is None


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw the plot of rows; return the lines of its two panels as {legend text: points}."""

    def draw(rows):
        panels = []
        original = Figure.savefig

        def savefig(figure, *args, **kwargs):
            for axes in figure.axes:
                lines = axes.get_lines()
                panels.append({s.get_label(): list(map(tuple, s.get_xydata())) for s in lines})
            original(figure, *args, **kwargs)

        monkeypatch.setattr(Figure, "savefig", savefig)
        report.plot_memory(rows, tmp_path / "memory.png")
        assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
        return panels

    return draw


def test_plot_shows_what_one_sequence_saves_with_exponents(sweep, drawn):
    saved, _ = drawn(sweep)
    assert saved["flash_v1: N^1.00"] == [(1024, 1), (2048, 2), (4096, 4)]
    assert saved["naive: N^2.00"] == [(1024, 1024), (2048, 4096)]


def test_plot_marks_runs_out_of_memory(sweep, drawn):
    saved, peak = drawn(sweep)
    assert saved["naive: out of memory"] == [(4096, 16 * 1024)]
    assert peak["naive: would save for backward (out of memory)"] == [(4096, 5 * 16 * 1024)]
    assert "naive: out of memory" not in peak


def test_plot_shows_the_peak(sweep, drawn):
    _, peak = drawn(sweep)
    assert peak["flash_v1"] == [(1024, 8), (2048, 16), (4096, 32)]


def test_plot_keeps_models_apart(make_run, drawn):
    common = {"seq_len": 64, "micro_batch_size": 1, "saved_attention_bytes": GIB}
    rows = read_rows([make_run(i, model=m, **common) for i, m in enumerate(("tiny", "big"))])
    assert set(drawn(rows)[0]) == {"naive, tiny", "naive, big"}


def test_plot_of_a_sweep_where_all_crashed_is_empty(make_run, drawn):
    rows = read_rows([make_run(0, status="crashed", seq_len=None, error="gone")])
    assert drawn(rows) == [{}, {}]


def test_a_file_is_never_half_written(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        report.write_text(path, "new \ud800")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("limits", "widened"),
    [((0.63, 0.95), (0.5, 1)), ((2, 50), (2, 50)), ((0.0011, 7), (0.001, 10))],
)
def test_the_memory_axis_ends_at_labelled_steps(limits, widened):
    assert report._whole_steps(limits) == pytest.approx(widened)


def test_the_table_has_the_accuracy_of_recall(make_run):
    rows = read_rows([make_run(0, seq_len=64, recall_accuracy=0.98765, recall_chance=1 / 32)])
    heading, _, cells = (line.split(" | ") for line in to_markdown(rows).splitlines()[:3])
    shown = dict(zip(heading, cells, strict=True))
    assert (shown["recall"], shown["by chance |"]) == ("0.9877", "0.0312 |")
