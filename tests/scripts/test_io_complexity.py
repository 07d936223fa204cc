"""The IO experiment: the model without a GPU, and counters set beside it from ncu's table."""

import csv

import pytest

from flash_attention import gpus
from scripts import io_complexity, io_plots, ncu
from scripts.io_complexity import Case


@pytest.mark.parametrize("part", io_complexity.PARTS)
def test_without_a_gpu_each_part_writes_the_model_alone(part, tmp_path, capsys):
    argv = [part, "--gpu=h200", "--no-measure", f"--out={tmp_path / 'io'}"]
    assert io_complexity.main(argv) == 0
    with open(tmp_path / f"io_{part}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"model"}
    assert all(int(row["model_read"]) > 0 for row in rows if row["attention"] != "flash_v2")
    assert {row["dram_read"] for row in rows} == {""}
    assert (tmp_path / f"io_{part}.png").read_bytes().startswith(b"\x89PNG")
    assert "H200" in capsys.readouterr().out


def test_figure_2_twice_the_block_is_half_the_passes():
    args = io_complexity.parse(
        ["blocks", "--gpu=h200", "--no-measure", "--block-sizes", "64", "128"]
    )
    small, large = (io_complexity.modelled(case, args.gpu)[0] for case in io_complexity.cases(args))
    # O, m, l written once per pass over the rows: N / Bc times 32 heads of 8,192 rows.
    assert small.model_written == 128 * 32 * 8192 * (64 * 4 + 2 * 4)
    assert large.model_written == small.model_written // 2
    assert small.intensity == pytest.approx(small.flops / (small.model_read + small.model_written))


def kernel(name: str, size: float, seconds: float = 1e-3) -> ncu.Kernel:
    return ncu.Kernel(name, seconds, size, 2 * size, 3 * size, 4 * size, 5 * size)


KERNELS = [
    kernel("fill", 1),
    kernel("_forward_kernel", 10, 2e-3),
    kernel("_boundary", 7),
    kernel("_delta_kernel", 100),
    kernel("_backward_kernel", 1000),
]


def test_counters_before_the_boundary_are_forward_s_and_those_after_it_backward_s():
    case = Case("flash_v1", 1, 2, 64, 64, False)
    forward, backward = rows = io_complexity.modelled(case, gpus.known("h200"))
    io_complexity.fill(rows, KERNELS, None)
    assert (forward.dram, forward.l2, forward.spilled) == (11 * 3, 11 * 7, 11 * 5)
    assert forward.ncu_ms == pytest.approx(3.0)
    assert (backward.dram, backward.l2) == (1100 * 3, 1100 * 7)


def test_one_kernel_is_looked_at_alone():
    case = Case("flash_v1", 1, 2, 64, 64, False, 16, 16, "_forward_kernel")
    (row,) = io_complexity.modelled(case, gpus.known("h200"))
    io_complexity.fill([row], KERNELS[:3], "_forward_kernel")
    assert row.dram_read == 10
    # 4 x 4 tiles: each loads Q, O and stores O; K and V once for each of 4 splits (8 programs).
    assert row.model_written == 2 * 4 * 64 * (64 * 4 + 8)
    assert row.model_read == 2 * (4 * 64 * (64 * 2 + 64 * 4 + 8) + 4 * 2 * 64 * 64 * 2)
    with pytest.raises(ncu.NcuError, match="no kernel _forward_kernel"):
        io_complexity.fill([row], [KERNELS[0], KERNELS[2]], "_forward_kernel")
    with pytest.raises(ncu.NcuError, match="no boundary"):
        io_complexity.fill([row], KERNELS[:2], "_forward_kernel")


def test_the_probe_runs_the_case():
    assert io_complexity.probe(Case("naive", 1, 2, 64, 32, False))[3:] == [
        "--attention=naive", "--batch=1", "--heads=2", "--seq-len=64", "--head-dim=32",
    ]  # fmt: skip
    case = Case("flash_v1", 1, 2, 64, 32, True, 16, 32, "_forward_kernel")
    *_, module = io_complexity.probe(case)[:3]
    assert module == "scripts.io_probe"
    assert io_complexity.probe(case)[3:] == [
        "--attention=flash_v1", "--batch=1", "--heads=2", "--seq-len=64", "--head-dim=32",
        "--block-q=16", "--block-kv=32", "--causal", "--forward-only",
    ]  # fmt: skip


@pytest.mark.parametrize("part", io_complexity.PARTS)
def test_measured_rows_are_drawn(part, tmp_path):
    args = io_complexity.parse([part, "--gpu=h200", "--no-measure"])
    rows = []
    for case in io_complexity.cases(args):
        these = io_complexity.modelled(case, args.gpu)
        kernels = [kernel(case.kernel or "a", 1e9), *KERNELS[2:]]
        io_complexity.fill(these, kernels, case.kernel)
        for row in these:
            row.ms, row.status = 1.5, "ok"
        rows += these
    io_plots.PLOTS[part](rows, args.gpu, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert len(io_complexity.table(rows, part).rows) == len(rows)


@pytest.mark.parametrize(
    "bad",
    [
        ["lengths", "--gpu=tpu"],
        ["blocks", "--block-sizes", "48"],
        ["blocks", "--heads", "1", "2"],
        ["l2", "--seq-lens", "64", "128"],
    ],
)
def test_a_bad_argument_is_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        io_complexity.parse(bad)
    assert stop.value.code == 2
    assert bad[1].split("=")[0] in capsys.readouterr().err
