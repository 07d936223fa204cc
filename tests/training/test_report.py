"""Tables and plot from run folders."""

import csv
import io

import pytest
from rich.console import Console

from training import report
from training.report import longest_lengths, read_rows, to_csv, to_markdown, to_rich
from training.units import GIB


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
    assert any(
        line.startswith(
            "- saved for backward by attention of flash_v1: N^1.000 (95% interval 1.000"
        )
        and line.endswith(": 0 within error")
        for line in lines
    )
    assert any(
        line.startswith("- saved for backward by attention of naive: N^2.000")
        and "c = 1.05e+06 ±" in line  # GiB / 1024 bytes
        and line.endswith(": greater than 0")
        for line in lines
    )
    assert "- peak memory of naive: not fitted (2 lengths; 3 unknowns and their" in to_markdown(
        sweep
    )


def test_an_out_of_memory_is_noted_with_what_was_being_allocated(make_run):
    row = make_run(
        0,
        status="oom",
        error="CUDA out of memory. Tried to allocate 3.00 GiB. And advice",
        oom_tried_bytes=3 * GIB,
        oom_where="blocks.3.attention.kernel",
        oom_frame="flash_attention/naive.py:45 in naive_attention",
        oom_allocated_bytes=GIB // 2,
    )
    expected = (
        "- run 0 (oom): no room for 3.000 GiB in blocks.3.attention.kernel "
        "(flash_attention/naive.py:45 in naive_attention) beside 0.5 GiB"
    )
    assert expected in to_markdown(read_rows([row])).splitlines()


def test_series_keep_apart_what_differs_beside_the_length(make_run):
    rows = read_rows(
        make_run(2 * i + j, [f"seq_len={n}", f"loss={loss}"], seq_len=n)
        for i, n in enumerate((64, 128))
        for j, loss in enumerate(("full", "chunked"))
    )
    found = {name: [row["seq_len"] for row in runs] for name, runs in report.series(rows).items()}
    assert found == {"naive, loss=chunked": [64, 128], "naive, loss=full": [64, 128]}


def test_runs_of_one_number_in_two_sweeps_are_told_apart_by_their_folders(make_run, tmp_path):
    first = make_run(0)
    (tmp_path / "other").mkdir()
    second = first.rename(tmp_path / "other" / first.name)
    first = make_run(0)
    text = to_markdown(read_rows([first, second]))
    assert "| other/0 | ok |" in text
    assert f"| {tmp_path.name}/0 | ok |" in text


@pytest.fixture
def steps(make_run):
    """Rows of runs of the given (sequence length, tokens per step)."""

    def make(*runs):
        return read_rows(
            make_run(i, seq_len=n, tokens_per_step=tokens, train_loss_last=1.0)
            for i, (n, tokens) in enumerate(runs)
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
    crashed = make_run(8, status="crashed", error="gone")
    refused = make_run(9, status="error", error="no", seq_len=10**8, tokens_per_step=10**8)
    rows = [*steps((1024, 4096)), *read_rows([crashed, refused])]
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


def test_a_file_is_never_half_written(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        report.write_text(path, "new \ud800")
    assert path.read_text() == "old"


def test_the_table_has_the_accuracy_of_recall(make_run):
    rows = read_rows([make_run(0, seq_len=64, recall_accuracy=0.98765, recall_chance=1 / 32)])
    heading, _, cells = (line.split(" | ") for line in to_markdown(rows).splitlines()[:3])
    shown = dict(zip(heading, cells, strict=True))
    assert (shown["recall"], shown["by chance |"]) == ("0.9877", "0.0312 |")


def test_where_memory_ran_out_in_words():
    assert report.place("loss", "models/loss.py:3 in f") == "loss (models/loss.py:3 in f)"
    assert report.place("backward", None) == "backward"  # autograd's own: no line of ours
    assert report.place(None, None) == "the step"
