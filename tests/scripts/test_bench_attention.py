"""The attention benchmark: what it writes, and that a wrong backend is not timed."""

import csv

import pytest
import torch

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
        for backend in ("naive", "flash_v1", "sdpa")
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


@pytest.mark.parametrize("bad", [["--seq-lens", "0"], ["--q-splits", "none"]])
def test_a_bad_argument_is_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_attention.parse(bad)
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_each_number_of_splits_is_a_backend_of_its_own():
    args = bench_attention.parse([*SMALL, "--q-splits", "auto", "1", "3"])
    found = bench_attention.available(args)
    assert [n for n in found if n.startswith("flash")] == ["flash_v1", "flash_v1_q1", "flash_v1_q3"]


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
