"""What each plot shows: lines, crosses, bars and their names."""

import math

import pytest

from training import plots
from training.plots import (
    PLOTS,
    plot_losses,
    plot_memory,
    plot_parts,
    plot_speed,
    save_plots,
)
from training.report import read_rows
from training.units import GIB


@pytest.fixture
def drawn():
    """The lines of a plot's panels as {legend text: points}."""

    def draw(plot, rows):
        return [
            {
                line.get_label(): list(map(tuple, line.get_xydata()))
                for line in axes.get_lines()
                if line.get_label() != "_"
            }
            for axes in plot(rows).axes
        ]

    return draw


def test_every_plot_is_written_as_png(sweep, tmp_path):
    paths = save_plots(sweep, tmp_path)
    assert [path.name for path in paths] == list(PLOTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_plot_shows_what_one_sequence_saves_with_exponents(sweep, drawn):
    saved, _ = drawn(plot_memory, sweep)
    assert saved["flash_v1: N^1.00 ± 0.01 (last two: 1.00)"] == [(1024, 1), (2048, 2), (4096, 4)]
    assert saved["naive: N^2.00 ± 0.01 (last two: 2.00)"] == [(1024, 1024), (2048, 4096)]


def test_plot_marks_runs_out_of_memory(sweep, drawn):
    saved, peak = drawn(plot_memory, sweep)
    assert saved["naive: out of memory"] == [(4096, 16 * 1024)]
    assert peak["naive: would save for backward (out of memory)"] == [(4096, 5 * 16 * 1024)]
    assert "naive: out of memory" not in peak


def test_a_dotted_line_leads_to_what_ran_out_of_memory(sweep):
    saved = plot_memory(sweep).axes[0]
    (dotted,) = [line for line in saved.get_lines() if line.get_label() == "_"]
    assert list(map(tuple, dotted.get_xydata())) == [(2048, 4096), (4096, 16 * 1024)]


def test_plot_shows_the_peak(sweep, drawn):
    _, peak = drawn(plot_memory, sweep)
    assert peak["flash_v1"] == [(1024, 8), (2048, 16), (4096, 32)]


def test_plot_keeps_models_apart(make_run, drawn):
    common = {"seq_len": 64, "micro_batch_size": 1, "saved_attention_bytes": GIB}
    rows = read_rows([make_run(i, model=m, **common) for i, m in enumerate(("tiny", "big"))])
    assert set(drawn(plot_memory, rows)[0]) == {
        "naive, tiny: not fitted",
        "naive, big: not fitted",
    }


def test_plot_of_a_sweep_where_all_crashed_is_empty(make_run, drawn):
    rows = read_rows([make_run(0, status="crashed", seq_len=None, error="gone")])
    for plot in PLOTS.values():
        assert not any(drawn(plot, rows))


def test_plot_gives_the_exponent_of_the_peak_above_what_there_was_before_forward(make_run, drawn):
    rows = read_rows(
        make_run(
            n,
            seq_len=n,
            micro_batch_size=2,
            peak_rss_bytes=5 * GIB + 2 * 24 * n**2,
            memory_before_forward_bytes=5 * GIB,
        )
        for n in (1024, 2048, 4096)
    )
    _, peak = drawn(plot_memory, rows)
    assert list(peak) == ["naive: N^2.00 ± 0.01 (last two: 2.00) above the constant part"]


def test_speed_is_drawn_over_length_with_what_ran_out_of_memory_at_the_edge(sweep, drawn):
    (speed,) = drawn(plot_speed, sweep)
    assert speed["flash_v1"] == [(n, 1234.5) for n in (1024, 2048, 4096)]
    assert speed["naive"] == [(n, 1234.5) for n in (1024, 2048)]
    ((n, height),) = speed["naive: out of memory"]
    assert n == 4096
    assert 0 < height < 0.1  # of the plot's height


def test_losses_are_those_of_each_runs_metrics(make_run, drawn):
    folders = [make_run(i, [f"seq_len={n}"], seq_len=n) for i, n in enumerate((64, 1024))]
    (folders[0] / "metrics.csv").write_text("step,train/loss,val/loss\n1,5.5,\n1,,4\n2,4.25,\n3,4")
    (losses,) = drawn(plot_losses, read_rows(folders))
    # The last line was cut off; the second has a validation's loss only; the other run wrote none.
    assert losses == {"naive, N = 64": [(1, 5.5), (2, 4.25)]}


@pytest.fixture
def parts(make_run):
    """The plot of a short run and of one at which memory ran out."""
    short = {"parameters": GIB // 64, "gradients": GIB // 64, "optimizer": GIB // 32}
    long = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "attention": 508 * GIB}
    rows = read_rows(
        [
            make_run(0, seq_len=64, memory_parts_bytes=short, peak_rss_bytes=GIB // 8),
            make_run(1, seq_len=4096, memory_parts_bytes=long, status="oom"),
        ]
    )
    return plot_parts(rows)


def test_every_part_is_a_point_at_its_bytes(parts):
    axes = parts.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "naive, N = 64: 0.0625 GiB",
        "naive, N = 4,096: 512.000 GiB",
    ]
    assert list(lines["parameters"].get_xdata()) == [1 / 64, 1]
    assert list(lines["optimizer"].get_xdata()) == [1 / 32, 2]
    assert lines["saved by attention"].get_xdata()[1] == 508
    assert list(lines["peak of the process (measured)"].get_xydata()[0]) == [1 / 8, 0]
    assert list(lines["out of memory"].get_xydata()[0]) == [512, 1]
    names = {text.get_text() for text in parts.legends[0].get_texts()}
    assert {"parameters", "saved by attention", "saved by the rest"} <= names


def test_parts_of_a_short_run_are_told_apart_beside_a_long_one(parts):
    """Points a marker's width apart, though equal parts are, and a short run is small."""
    parts.draw_without_rendering()
    axes = parts.axes[0]
    names = ("parameters", "gradients", "optimizer", "peak of the process (measured)")
    points = [
        axes.transData.transform(line.get_xydata()[0])
        for line in axes.get_lines()
        if line.get_label() in names
    ]
    assert len(points) == 4
    distances = [math.dist(a, b) for i, a in enumerate(points) for b in points[:i]]
    assert min(distances) > 3  # pixels at 100 dpi


def test_shares_are_stacked_to_100_percent(parts):
    bars = [part[1] for part in parts.axes[1].containers]  # of the second run
    sizes = (1, 1, 2, 508, 0, 0, 0)
    assert [bar.get_width() for bar in bars] == [x * 100 / 512 for x in sizes]
    assert [bar.get_x() for bar in bars] == [x * 100 / 512 for x in (0, 1, 2, 4, 512, 512, 512)]


@pytest.mark.parametrize("plot", [plot_memory, plot_speed])
def test_no_legend_hides_a_point(plot, sweep):
    figure = plot(sweep)
    figure.draw_without_rendering()
    boxes = [legend.get_window_extent() for legend in figure.legends]
    boxes += [axes.legend_.get_window_extent() for axes in figure.axes if axes.legend_]
    assert len(boxes) == len(figure.axes)
    assert not any(axes.bbox.overlaps(box) for axes in figure.axes for box in boxes)


@pytest.mark.parametrize(
    ("limits", "widened"),
    [((0.63, 0.95), (0.5, 1)), ((2, 50), (2, 50)), ((0.0011, 7), (0.001, 10))],
)
def test_the_memory_axis_ends_at_labelled_steps(limits, widened):
    assert plots._whole_steps(limits) == pytest.approx(widened)
