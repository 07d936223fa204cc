"""The IO experiment: the model without a GPU, and counters set beside it from ncu's table."""

import csv
import json

import pytest
import torch
from rich.console import Console

from flash_attention import gpus, naive_attention, tiling
from flash_attention.v2 import tables
from scripts import io_complexity
from scripts.common import io_plots, ncu
from scripts.io_complexity import Case
from tests.flash_attention.parity import make_inputs


@pytest.mark.parametrize("part", io_complexity.PARTS)
def test_without_a_gpu_each_part_writes_the_model_alone(part, tmp_path, capsys):
    argv = [part, "--gpu=h200", "--no-measure", f"--out={tmp_path / 'io'}"]
    assert io_complexity.main(argv) == 0
    with open(tmp_path / f"io_{part}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"model"}
    assert all(int(row["model_read"]) > 0 for row in rows)
    assert {"flash_v1", "flash_v2"} <= {row["attention"] for row in rows}
    assert {row["dram_read"] for row in rows} == {""}
    assert (tmp_path / f"io_{part}.png").read_bytes().startswith(b"\x89PNG")
    assert "H200" in capsys.readouterr().out


def test_figure_2_twice_the_block_that_stays_is_half_the_passes():
    args = io_complexity.parse(
        ["blocks", "--gpu=h200", "--no-measure", "--block-sizes", "64", "128"]
    )
    v1_64, v1_128, v2_64, v2_128 = (
        io_complexity.modelled(case, args.gpu)[0] for case in io_complexity.cases(args)
    )
    # O, m, l written once per pass over the rows: N / Bc times 32 heads of 8,192 rows.
    assert v1_64.model_written == 128 * 32 * 8192 * (64 * 4 + 2 * 4)
    assert v1_128.model_written == v1_64.model_written // 2
    assert v1_64.intensity == pytest.approx(v1_64.flops / (v1_64.model_read + v1_64.model_written))
    # K and V read once per Q block, N / Br times; O, m, l written once.
    q = 32 * 8192 * 64 * 2
    assert (v2_64.model_read - q, v2_128.model_read - q) == (128 * 2 * q, 64 * 2 * q)
    assert v2_64.model_written == v2_128.model_written == q + 32 * 8192 * 2 * 4


def test_a_whole_call_of_flash_v1_moves_o_twice_more_than_its_kernel(capsys):
    """Before: O, m and l are set, in float32. After: O is read and written in 16 bits."""
    argv = ["--gpu=h200", "--no-measure", "--attentions=flash_v1", "--seq-lens=8192"]
    rows = []
    for part in (["lengths"], ["blocks", "--block-sizes=256"]):
        args = io_complexity.parse([*part, *argv])
        rows.append(io_complexity.modelled(io_complexity.cases(args)[0], args.gpu)[0])
        assert io_complexity.main([*part, *argv]) == 0
        assert "sets O, m, l" in capsys.readouterr().out
    whole, alone = rows
    assert (whole.block_q, whole.block_kv) == (alone.block_q, alone.block_kv) == (64, 256)
    # 32 heads of 128 row blocks, two programs on each of 132 processors: 8 x 32 = 256 of 264.
    assert whole.q_splits == alone.q_splits == 8
    o, row = 32 * 8192 * 64 * 4, 32 * 8192 * 4
    assert whole.model_read - alone.model_read == o
    assert whole.model_written - alone.model_written == (o + 2 * row) + o // 2


def test_backward_of_flash_v2_has_the_blocks_of_both_its_kernels(monkeypatch):
    monkeypatch.setitem(tables.FORWARD, (64, 2), tiling.Blocks(32, 16))
    monkeypatch.setitem(tables.DK_DV, (64, 2), tiling.Blocks(16, 64))
    monkeypatch.setitem(tables.DQ, (64, 2), tiling.Blocks(128, 32))
    gpu = gpus.known("h200")
    forward, backward = io_complexity.modelled(Case("flash_v2", 1, 2, 512, 64, False), gpu)
    assert (forward.block_q, forward.block_kv, forward.dq_block_q) == (32, 16, None)
    sizes = (backward.block_q, backward.block_kv, backward.dq_block_q, backward.dq_block_kv)
    assert sizes == (16, 64, 128, 32)
    # Q and O; K and V, which pass 512 / 32 times; m and l.
    q, row = 2 * 512 * 64 * 2, 2 * 512 * 4
    assert (forward.model_read, forward.model_written) == (q + 16 * 2 * q, q + 2 * row)
    # O, dO, m, l; K, V once, the rows 512 / 64 times; the rows once, K and V 512 / 128 times.
    assert backward.model_read == (2 * q + 2 * row) + (2 * q + 8 * (2 * q + 2 * row)) + (
        2 * q + 2 * row + 4 * 2 * q
    )
    # dO, L, D; dK and dV; dQ.
    assert backward.model_written == (q + 2 * row) + 2 * q + q
    # Without a mask every tile is whole: 2 products and 7.
    assert (forward.flops, backward.flops) == (2 * 2 * 2 * 512**2 * 64, 7 * 2 * 2 * 512**2 * 64)


def kernel(name: str, size: float, seconds: float = 1e-3) -> ncu.Kernel:
    return ncu.Kernel(name, seconds, size, 2 * size, 3 * size, 4 * size, 5 * size)


BOUNDARY = kernel("_boundary", 7)
FORWARD = [kernel("fill", 1), kernel("_forward_kernel", 10, 2e-3)]
BACKWARD = [kernel("_delta_kernel", 100), kernel("_backward_kernel", 1000)]


def test_a_boundary_ends_each_direction_of_each_case():
    counted = [*FORWARD, BOUNDARY, *BACKWARD, BOUNDARY, *FORWARD[1:], BOUNDARY, BOUNDARY]
    assert io_complexity.directions(counted, 2) == [[FORWARD, BACKWARD], [FORWARD[1:], []]]
    for bad in (counted[:-1], [*counted, BOUNDARY], [*counted, FORWARD[0]], FORWARD):
        with pytest.raises(ncu.NcuError, match="2 cases between boundaries"):
            io_complexity.directions(bad, 2)


def test_counters_are_summed_over_the_kernels_of_a_direction():
    case = Case("flash_v1", 1, 2, 64, 64, False)
    forward, backward = rows = io_complexity.modelled(case, gpus.known("h200"))
    io_complexity.fill(rows, [FORWARD, BACKWARD], None)
    assert (forward.dram, forward.l2, forward.spilled) == (11 * 3, 11 * 7, 11 * 5)
    assert forward.ncu_ms == pytest.approx(3.0)
    assert (backward.dram, backward.l2) == (1100 * 3, 1100 * 7)


def test_one_kernel_is_looked_at_alone():
    case = Case("flash_v1", 1, 2, 64, 64, False, 16, 16, "_forward_kernel")
    (row,) = io_complexity.modelled(case, gpus.known("h200"))
    io_complexity.fill([row], [FORWARD, []], "_forward_kernel")
    assert row.dram_read == 10
    # 4 x 4 tiles: each loads Q, O and stores O; K and V once for each of 4 splits (8 programs).
    assert row.model_written == 2 * 4 * 64 * (64 * 4 + 8)
    assert row.model_read == 2 * (4 * 64 * (64 * 2 + 64 * 4 + 8) + 4 * 2 * 64 * 64 * 2)
    with pytest.raises(ncu.NcuError, match="no kernel _forward_kernel"):
        io_complexity.fill([row], [FORWARD[:1], []], "_forward_kernel")


def test_what_fails_leaves_the_other_cases_measured(tmp_path, monkeypatch):
    """One length is too large, and of one attention ncu counts nothing."""
    argv = ["lengths", "--gpu=h200", "--no-measure", "--seq-lens", "64", "128"]
    args = io_complexity.parse([*argv, f"--out={tmp_path / 'io'}"])

    def timed(case: Case, rounds: int) -> list[float]:
        if (case.attention, case.seq_len) == ("naive", 128):
            raise torch.OutOfMemoryError("too large")
        return [1.0, 2.0]

    def profile(program: list[str], *limits) -> list[ncu.Kernel]:
        given = [json.loads(text) for text in program[3:]]
        if given[0]["attention"] == "flash_v1":
            raise ncu.NcuError("no counters")
        return [*FORWARD, BOUNDARY, *BACKWARD, BOUNDARY] * len(given)

    monkeypatch.setattr(io_complexity, "timed", timed)
    monkeypatch.setattr(ncu, "profile", profile)
    todo = [(case, io_complexity.modelled(case, args.gpu)) for case in io_complexity.cases(args)]
    io_complexity.measure(todo, [row for _, rows in todo for row in rows], args)
    with open(tmp_path / "io_lengths.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    got = {(r["attention"], r["seq_len"], r["direction"]): r for r in rows}
    for direction, ms, dram in (("forward", "1.0", "11"), ("backward", "2.0", "1100")):
        ok = got["naive", "64", direction], got["flash_v2", "128", direction]
        assert {(r["ms"], r["dram_read"], r["status"]) for r in ok} == {(ms, dram, "ok")}
        large, uncounted = got["naive", "128", direction], got["flash_v1", "128", direction]
        assert (large["ms"], large["dram_read"], large["status"]) == ("", "", "too large")
        assert (uncounted["ms"], uncounted["dram_read"]) == (ms, "")
        assert uncounted["status"] == "no counters"


def test_the_probe_is_given_every_case_of_an_attention():
    todo = [
        Case("flash_v2", 1, 2, 64, 32, False),
        Case("flash_v2", 1, 2, 64, 32, True, 16, 32, "_forward_kernel"),
    ]
    _, *module, first, second = io_complexity.probe(todo)
    assert module == ["-m", "scripts.common.io_probe"]
    same = {"attention": "flash_v2", "batch": 1, "heads": 2, "seq_len": 64, "head_dim": 32}
    assert json.loads(first) == same | {"causal": False, "forward_only": False}
    blocks = {"block_q": 16, "block_kv": 32}
    assert json.loads(second) == same | blocks | {"causal": True, "forward_only": True}


@pytest.mark.parametrize("name", io_complexity.ATTENTIONS)
def test_the_probe_attends_by_name_with_the_blocks_it_is_given(name):
    pytest.importorskip("triton")
    from scripts.common import io_probe

    q, k, v, _ = make_inputs(1, 2, 2, 40, 40, 16, torch.float32, torch.device("cpu"))
    want = naive_attention(q, k, v, causal=True)
    torch.testing.assert_close(io_probe.attend(name, 16, 32)(q, k, v, True), want)
    if name != "naive":
        with pytest.raises(ValueError, match="block_q must be"):
            io_probe.attend(name, 3, 16)(q, k, v, True)
        with pytest.raises(ValueError, match="block_kv must be"):
            io_probe.attend(name, 16, 3)(q, k, v, True)


@pytest.mark.parametrize("part", io_complexity.PARTS)
def test_measured_rows_are_drawn(part, tmp_path):
    args = io_complexity.parse([part, "--gpu=h200", "--no-measure"])
    rows = []
    for case in io_complexity.cases(args):
        these = io_complexity.modelled(case, args.gpu)
        io_complexity.fill(these, [[kernel(case.kernel or "a", 1e10)], BACKWARD], case.kernel)
        for row in these:
            row.ms = 27.5
        rows += these
    io_plots.PLOTS[part](rows, args.gpu, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    table = io_complexity.table(rows, part)
    assert len(table.rows) == len(rows)
    assert Console(width=300).measure(table).maximum <= 100  # of a terminal: nothing is cut off
    # The time is of what the bytes are of: a whole call, or one kernel.
    shown = {float(ms) for ms in table.columns[-1].cells}
    assert shown == {27.5} if part == "lengths" else shown.isdisjoint({27.5})


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (["lengths", "--gpu=tpu"], "--gpu: no GPU 'tpu' in the table"),
        (["lengths", "--seq-lens", "64", "100000000"], "give an integer from 1 to 1048576"),
        (["blocks", "--block-sizes", "48"], "--block-sizes: 48; give some of"),
        (["blocks", "--heads", "1", "2"], "--heads: blocks takes one number; got 1 2"),
        (["l2", "--seq-lens", "64", "128"], "--seq-lens: l2 takes one length; got 64 128"),
        (
            ["l2", "--attentions", "naive", "flash_v1"],
            "--attentions: l2 takes flash_v1, flash_v2; got naive flash_v1",
        ),
    ],
)
def test_a_bad_argument_is_refused(bad, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        io_complexity.parse(bad)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
