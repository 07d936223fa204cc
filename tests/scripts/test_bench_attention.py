"""The attention benchmark: what it writes, and that a wrong backend is not timed."""

import csv
import io
import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from flash_attention import naive_attention
from scripts import bench_attention

SMALL = ["--device=cpu", "--tokens=64", "--width=32", "--head-dims", "16", "--seq-lens", "32", "64"]


def test_it_writes_a_row_for_every_backend_and_shape(tmp_path, capsys):
    assert bench_attention.main([*SMALL, "--rounds=2", f"--out={tmp_path / 'bench'}"]) == 0
    with open(tmp_path / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["backend"], r["seq_len"], r["causal"], r["status"]) for r in rows}
    assert found == {
        (backend, n, causal, "ok")
        for backend in ("naive", "flash_v1", "flash_v2", "sdpa")
        for n in ("32", "64")
        for causal in ("True", "False")
    }
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "flash_v1" in capsys.readouterr().out


def test_flops_are_those_of_two_products_and_half_of_them_when_causal():
    args = bench_attention.parse([*SMALL, "--rounds=1"])
    backends = {"naive": lambda q, k, v, causal: naive_attention(q, k, v, causal=causal)}
    (full,) = bench_attention.bench_shape(backends, 16, 64, False, args, torch.device("cpu"))
    (half,) = bench_attention.bench_shape(backends, 16, 64, True, args, torch.device("cpu"))
    # batch 1, 2 heads, N = 64, D = 16: two N x N x D products of 2 FLOPs an entry and head.
    assert full.forward_tflops * full.forward_ms * 1e9 == pytest.approx(2 * 2 * 2 * 64 * 64 * 16)
    assert half.forward_tflops * half.forward_ms * 1e9 == pytest.approx(2 * 2 * 64 * 64 * 16)
    assert half.backward_tflops * half.backward_ms == pytest.approx(
        2.5 * half.forward_tflops * half.forward_ms
    )


def test_a_wrong_backend_is_named_and_not_timed():
    args = bench_attention.parse([*SMALL, "--rounds=1"])
    backends = {"wrong": lambda q, k, v, causal: naive_attention(q, k, v, causal=not causal)}
    (row,) = bench_attention.bench_shape(backends, 16, 64, True, args, torch.device("cpu"))
    assert row.status == "wrong"
    assert row.forward_ms is None


def test_without_a_gpu_the_defaults_are_small_and_what_is_given_stays(monkeypatch):
    monkeypatch.setattr(bench_attention, "present_device", str)
    gpu, cpu = (bench_attention.parse([f"--device={name}"]) for name in ("cuda", "cpu"))
    assert (gpu.seq_lens[-1], gpu.tokens, gpu.dtype, gpu.q_splits) == (
        16384, 16384, "bf16", ["auto", 1],
    )  # fmt: skip
    assert (cpu.seq_lens[-1], cpu.tokens, cpu.dtype, cpu.q_splits) == (1024, 1024, "fp32", ["auto"])
    assert bench_attention.parse(["--device=cpu", "--tokens=64"]).tokens == 64


@pytest.mark.parametrize("bad", [["--seq-lens", "0"], ["--q-splits", "none"]])
def test_a_bad_argument_is_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_attention.parse(bad)
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_a_backend_that_is_not_here_is_refused_beside_those_that_are(capsys):
    with pytest.raises(SystemExit) as stop:
        bench_attention.main([*SMALL, "--backends", "naive", "sdpa_flash"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said == (
        "error: --backends: sdpa_flash is not here; give some of naive, flash_v1, flash_v2, sdpa\n"
    )


def test_each_number_of_splits_is_a_backend_of_its_own():
    args = bench_attention.parse([*SMALL, "--q-splits", "auto", "1", "3"])
    found = bench_attention.available(args)
    flash = [name for name in found if name.startswith("flash")]
    assert flash == ["flash_v1", "flash_v1_q1", "flash_v1_q3", "flash_v2"]


def test_speed_is_compared_with_naive_at_the_same_shape():
    args = bench_attention.parse([*SMALL, "--rounds=3", "--backends", "naive", "flash_v1"])
    found = bench_attention.available(args)
    naive, flash = bench_attention.bench_shape(found, 16, 64, True, args, torch.device("cpu"))
    assert naive.forward_vs_naive == naive.total_vs_naive == 1.0
    assert flash.forward_vs_naive == pytest.approx(naive.forward_ms / flash.forward_ms)
    both = (naive.forward_ms + naive.backward_ms) / (flash.forward_ms + flash.backward_ms)
    assert flash.total_vs_naive == pytest.approx(both)


def test_running_out_of_memory_is_a_row_and_the_others_are_timed():
    args = bench_attention.parse([*SMALL, "--rounds=2"])
    calls = []

    def greedy(q, k, v, causal):
        calls.append(q)
        if len(calls) > 2:  # the check passes, the timing does not
            raise torch.OutOfMemoryError("CUDA out of memory")
        return naive_attention(q, k, v, causal=causal)

    def modest(q, k, v, causal):
        return naive_attention(q, k, v, causal=causal)

    backends = {"greedy": greedy, "modest": modest}
    device = torch.device("cpu")
    first, second = bench_attention.bench_shape(backends, 16, 64, True, args, device)
    assert (first.status, first.forward_ms, first.forward_tflops) == ("out of memory", None, None)
    assert second.status == "ok"
    assert second.forward_ms > 0


def test_a_shape_whose_inputs_have_no_room_is_a_row_for_every_backend(monkeypatch):
    args = bench_attention.parse([*SMALL, "--rounds=1"])

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    found = bench_attention.available(args)
    rows = bench_attention.bench_shape(found, 16, 64, True, args, torch.device("cpu"))
    assert [row.backend for row in rows] == [*found]
    assert {row.status for row in rows} == {"out of memory"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (
            RuntimeError("CUDA error: out of memory"),
            "out of memory",
        ),
        (NotImplementedError("no backward"), "refused: NotImplementedError"),
    ],
)
def test_a_backend_that_fails_in_backward_is_a_row(error, status):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise error

    def attention(q, k, v, causal):
        return Fails.apply(naive_attention(q, k, v, causal=causal))

    args = bench_attention.parse([*SMALL, "--rounds=1"])
    device = torch.device("cpu")
    (row,) = bench_attention.bench_shape({"fails": attention}, 16, 64, True, args, device)
    assert (row.status, row.forward_ms) == (status, None)


def test_everything_runs_on_the_device_of_the_tensors(monkeypatch):
    current = []

    @contextmanager
    def on_device(t):
        current.append(t.device)
        yield
        current.pop()

    def attention(q, k, v, causal):
        assert current == [q.device]
        return naive_attention(q, k, v, causal=causal)

    monkeypatch.setattr(bench_attention.launch, "on_device", on_device)
    args = bench_attention.parse([*SMALL, "--rounds=1"])
    device = torch.device("cpu")
    (row,) = bench_attention.bench_shape({"x": attention}, 16, 64, True, args, device)
    assert row.status == "ok"


def test_on_a_gpu_flash_v2_is_timed_beside_pytorch_s_flash_attention():
    args = bench_attention.parse([*SMALL])
    args.device = "cuda"
    assert {"naive", "flash_v1", "flash_v2", "sdpa_flash"} <= {*bench_attention.available(args)}


def test_speed_is_compared_with_pytorch_s_flash_attention_too(monkeypatch):
    """Backends whose forward and backward take as many ms as is said here."""
    takes = {"flash_v2": (4.0, 30.0), "sdpa_flash": (2.0, 10.0), "fails": (1.0, 1.0)}

    def interleave(pairs, *_):
        for row, _ in pairs:
            row.forward_ms, row.backward_ms = takes[row.backend]
            row.forward_launch_ms, row.backward_launch_ms = 0.25, 0.5

    def fails(q, k, v, causal):
        raise NotImplementedError

    monkeypatch.setattr(bench_attention, "interleave", interleave)
    args = bench_attention.parse([*SMALL])
    attention = partial(bench_attention._call, naive_attention)
    backends = {"flash_v2": attention, "sdpa_flash": attention, "fails": fails}
    rows = bench_attention.bench_shape(backends, 16, 64, True, args, torch.device("cpu"))
    flash_v2, sdpa_flash, refused = rows
    assert flash_v2.forward_vs_sdpa_flash == pytest.approx(2 / 4)
    assert flash_v2.backward_vs_sdpa_flash == pytest.approx(10 / 30)
    assert (sdpa_flash.forward_vs_sdpa_flash, sdpa_flash.backward_vs_sdpa_flash) == (1.0, 1.0)
    assert refused.forward_vs_sdpa_flash is None
    assert flash_v2.forward_vs_naive is None  # which was not run
    console = Console(width=140, file=io.StringIO())
    console.print(bench_attention.table(rows))
    (line,) = [s for s in console.file.getvalue().splitlines() if "flash_v2" in s]
    assert [cell.strip() for cell in line.strip("│").split("│")][-3:] == [
        "0.5", "0.333", "0.75",
    ]  # fmt: skip


def test_rows_are_on_disk_before_a_later_shape_fails(tmp_path, monkeypatch):
    real = bench_attention.bench_shape

    def fails_at_64(backends, head_dim, n, *rest):
        if n == 64:
            raise RuntimeError("illegal memory access")
        return real(backends, head_dim, n, *rest)

    monkeypatch.setattr(bench_attention, "bench_shape", fails_at_64)
    with pytest.raises(RuntimeError):
        bench_attention.main([*SMALL, "--rounds=1", "--causal", f"--out={tmp_path / 'bench'}"])
    with open(tmp_path / "bench.csv", newline="") as file:
        assert {row["seq_len"] for row in csv.DictReader(file)} == {"32"}


def test_the_plot_shows_every_point_of_every_panel(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    rows = [
        bench_attention.Row("naive", head_dim, n, True, 1, 1, "bf16", total_tflops=tflops)
        for head_dim, tflops in ((64, 10.0), (128, 500.0))
        for n in (1024, 2048)
    ]
    bench_attention.plot(rows, tmp_path / "bench.png", "a device")
    for axis in plt.gcf().axes:
        low, high = axis.get_ylim()
        assert all(low <= y <= high for line in axis.lines for y in line.get_ydata())
    monkeypatch.undo()
    plt.close("all")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Backend -> (colour, dashes, marker) of its line in a plot of these backends."""
    import matplotlib.pyplot as plt

    def draw(names):
        rows = [
            bench_attention.Row(name, 64, n, True, 1, 1, "bf16", total_tflops=1.0)
            for name in names
            for n in (1024, 2048)
        ]
        bench_attention.plot(rows, tmp_path / "bench.png", "a device")
        lines = plt.gcf().axes[0].lines
        return {s.get_label(): (s.get_color(), s.get_linestyle(), s.get_marker()) for s in lines}

    monkeypatch.setattr(plt, "close", lambda figure: None)
    yield draw
    monkeypatch.undo()
    plt.close("all")


def test_no_two_backends_of_a_plot_look_alike(drawn, monkeypatch):
    for module in ("flash_attn_interface", "flash_attn.cute"):  # as if they were installed
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_func=naive_attention))
    args = bench_attention.parse([*SMALL, "--q-splits", "auto", "1", "2", "16"])
    args.device = "cuda"
    looks = drawn(bench_attention.available(args))
    assert {"fa3", "fa4", "flash_v1_q16"} <= looks.keys()
    assert len({*looks.values()}) == len(looks) == 13
    colors = {color for name, (color, *_) in looks.items() if "_q" not in name}
    assert len(colors) == 10


def test_a_backend_looks_the_same_whatever_it_is_drawn_beside(drawn):
    many = drawn(["naive", "flash_v1", "flash_v1_q1", "flash_v2", "sdpa_flash", "flex"])
    few = drawn(["flex", "flash_v1_q1", "naive"])
    assert few == {name: many[name] for name in few}
