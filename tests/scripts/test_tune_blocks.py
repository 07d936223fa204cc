"""Tuning launch configurations: what is tried, what counts as right, which one is best."""

import csv
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from flash_attention import launch
from flash_attention.tiling import Blocks

if launch.triton is None:
    pytest.skip("no Triton here", allow_module_level=True)

from scripts import tune_blocks
from scripts.tune_blocks import Row

# One sequence of 64 tokens and one head, in Triton's interpreter.
SMALL = [
    *("--head-dims", "16", "--seq-lens", "32", "64", "--tokens", "64", "--width", "16"),
    *("--dtype", "fp32", "--rounds", "1"),
]
ONE = ["block_q=16", "block_kv=32", "num_warps=4", "num_stages=1", "descriptors=0"]


@pytest.fixture
def settings(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here; it interprets where there is no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return tune_blocks.parse([*SMALL, "--grid", *ONE])


def row(blocks, status="ok", **ms):
    return Row("v2_dq", 64, blocks, status, ms={int(n[1:]): t for n, t in ms.items()})


def test_the_best_has_the_least_geometric_mean_of_those_that_are_right():
    steady, spread = Blocks(16, 16), Blocks(16, 32)
    rows = [
        row(steady, n1=4.0, n2=4.0),
        row(spread, n1=1.0, n2=9.0),  # geometric mean 3, arithmetic 5
        row(Blocks(32, 32), "wrong", n1=0.1, n2=0.1),
        row(Blocks(64, 64), "OutOfResources"),
    ]
    assert [r.blocks for r in tune_blocks.ranked(rows, "v2_dq", 64)] == [spread, steady]
    assert tune_blocks.best(rows, "v2_dq", 64).blocks == spread
    assert tune_blocks.best(rows, "v2_dq", 128) is None


def test_a_candidate_that_computes_something_else_is_wrong(settings):
    x = tune_blocks.inputs(16, 32, settings, torch.device("cpu"))
    kernel = tune_blocks.kernels()["v2_forward"]

    def off(blocks, x):
        o = x.right["o"].clone()
        o[..., -1, :] *= 1.001 if blocks.block_q == 16 else 1.0
        return o, x.right["lse"] + (0.01 if blocks.block_q == 64 else 0.0)

    rows = [Row("v2_forward", 16, Blocks(rows, 16)) for rows in (16, 32, 64)]
    tune_blocks.measure(rows, replace(kernel, run=off), x, 32, settings)
    assert [r.status for r in rows] == ["wrong", "ok", "wrong"]
    assert not rows[0].ms
    assert rows[1].ms[32] > 0


def test_a_candidate_that_fails_is_left_out(settings):
    def fails(blocks, x):
        raise ValueError("too large")

    x = tune_blocks.inputs(16, 32, settings, torch.device("cpu"))
    kernel = replace(tune_blocks.kernels()["v2_dq"], run=fails)
    rows = [Row("v2_dq", 16, Blocks(16, 16))]
    tune_blocks.measure(rows, kernel, x, 32, settings)
    assert (rows[0].status, rows[0].ms) == ("ValueError", {})


def test_a_candidate_that_fails_while_it_is_timed_ends_nothing(settings):
    x = tune_blocks.inputs(16, 32, settings, torch.device("cpu"))
    calls = []

    def fails_later(blocks, x):
        calls.append(blocks)
        if calls.count(blocks) == 2 and blocks.block_q == 16:
            raise RuntimeError("illegal memory access")
        return (x.right["dq"],)

    rows = [Row("v2_dq", 16, Blocks(rows, 16)) for rows in (16, 32)]
    kernel = replace(tune_blocks.kernels()["v2_dq"], run=fails_later)
    tune_blocks.measure(rows, kernel, x, 32, settings)
    assert [r.status for r in rows] == ["RuntimeError", "ok"]
    assert (rows[0].ms, list(rows[1].ms)) == ({}, [32])


@pytest.mark.parametrize(("size", "dtype"), [(2, "bf16"), (4, "fp32")])
@pytest.mark.parametrize("name", ["v1_forward", "v1_backward", "v2_forward", "v2_dk_dv", "v2_dq"])
def test_a_line_reads_as_the_entry_of_the_table(name, size, dtype):
    for (head_dim, bytes_each), blocks in tune_blocks.kernels()[name].table.items():
        if bytes_each == size:
            line = tune_blocks.line(Row(name, head_dim, blocks), Namespace(dtype=dtype))
            assert eval(f"{{{line}}}", {"Blocks": Blocks}) == {(head_dim, size): blocks}


def test_the_grid_has_every_combination_and_the_table_s_own(settings):
    kernel = tune_blocks.kernels()["v2_dq"]
    settings.grid = {"block_q": [16, 32], "block_kv": [16], "num_warps": [4, 8], "num_stages": [1]}
    found = tune_blocks.candidates("v2_dq", kernel, 64, settings)
    assert found[0] == kernel.table[64, 4]
    assert {(b.block_q, b.num_warps, b.descriptors) for b in found[1:]} == {
        (q, w, d) for q in (16, 32) for w in (4, 8) for d in (False, True)
    }
    assert {b.heads_at_a_time for b in found[1:]} == {4}  # the grid's own where none is given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "rows=16",
            "rows=16; give FIELD=NUMBER,NUMBER with a field of block_q, block_kv, num_warps",
        ),
        ("num_warps=4,x", "num_warps=4,x; give FIELD=NUMBER"),
        ("num_warps", "num_warps; give FIELD=NUMBER"),
        ("per_processor=2", "per_processor is no choice of v2_dq"),
        ("block_q=48", "block_q=48; blocks have 16, 32, 64, 128, 256 rows"),
    ],
)
def test_a_bad_grid_is_refused_in_a_sentence(given, said, settings, capsys):
    with pytest.raises(SystemExit):
        tune_blocks.parse(["v2_dq", "--grid", given])
    assert f"--grid: {said}" in capsys.readouterr().err


def test_an_unknown_kernel_is_refused(settings, capsys):
    with pytest.raises(SystemExit):
        tune_blocks.parse(["v3_forward"])
    assert "v3_forward is no kernel; give some of v1_forward" in capsys.readouterr().err


def test_without_a_gpu_or_the_interpreter_there_is_nothing_to_tune(settings, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit):
        tune_blocks.parse([])
    assert "needs Triton and a CUDA GPU (or TRITON_INTERPRET=1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--dtype=bf16"], "--dtype: bf16 is wrong in Triton's interpreter; give fp16 or fp32"),
        (["--dtype=fp16", "--seq-lens", "64", "1"], "--seq-lens: 1 token has dq and dk of 0; give"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, said, settings, capsys):
    with pytest.raises(SystemExit):
        tune_blocks.parse(given)
    assert said in capsys.readouterr().err


def test_the_status_says_that_no_candidate_is_right(settings, monkeypatch, capsys):
    monkeypatch.setitem(tune_blocks.BOUNDS, "fp32", -1.0)
    given = [*SMALL, "--seq-lens", "32", "--grid", *ONE[:2]]
    assert tune_blocks.main(["v2_dq", *given]) == 1
    assert "v2_dq, 16: none is right" in capsys.readouterr().out


def test_every_kernel_is_tuned_and_written(settings, tmp_path, capsys):
    given = [*SMALL, "--grid", *ONE, "per_processor=1", f"--out={tmp_path / 'blocks'}"]
    assert tune_blocks.main(given) == 0
    with open(tmp_path / "blocks.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ["v1_forward", "v1_backward", "v2_forward", "v2_dk_dv", "v2_dq"]
    assert [r["kernel"] for r in rows] == [name for name in names for _ in range(2)]
    assert {r["status"] for r in rows} == {"ok"}
    assert all(float(r["ms_32"]) > 0 and float(r["ms_64"]) > 0 for r in rows)
    printed = capsys.readouterr().out
    assert all(f"{name}: (64, 4): Blocks(" in printed for name in names)


@pytest.mark.gpu
def test_on_a_gpu_what_does_not_fit_is_left_out(tmp_path):
    given = ["v2_dq", "--head-dims", "128", "--seq-lens", "1024", "2048", "--tokens", "2048"]
    given += ["--width", "512", "--rounds", "2", "--processes", "2", f"--out={tmp_path / 'blocks'}"]
    grid = ["block_q=64,256", "block_kv=64", "num_warps=8", "num_stages=4", "descriptors=1"]
    assert tune_blocks.main([*given, "--grid", *grid]) == 0
    with open(tmp_path / "blocks.csv", encoding="utf-8") as file:
        own, small, large = csv.DictReader(file)
    assert (own["status"], small["status"], large["status"]) == ("ok", "ok", "OutOfResources")
    assert float(small["ms_1024"]) > 0
    assert float(small["ms_2048"]) > 0
    assert not large["ms_1024"]
