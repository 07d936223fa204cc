"""Reading Nsight Compute's table: units, thousands separators, lines that are not of the table."""

import sys

import pytest

from scripts.common import ncu

HEADER = ["ID", "Kernel Name", *ncu.METRICS]


def page(units: list[str], *rows: list[str]) -> str:
    lines = [HEADER, ["", "", *units], *rows]
    table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 1195\n{table}\n"


BASE = ["byte", "byte", *["sector"] * 6, "nsecond"]


def test_base_units_become_bytes_and_seconds():
    text = page(
        BASE,
        ["0", "_forward_kernel", "6,792,415,232", "4330689024", "10", "20", "3", "1", "5", "2",
         "5,026,880"],
    )  # fmt: skip
    (kernel,) = ncu.parse(text)
    assert kernel == ncu.Kernel(
        name="_forward_kernel",
        seconds=pytest.approx(5.02688e-3),
        dram_read=6_792_415_232,
        dram_written=4_330_689_024,
        l2_read=32 * (10 + 3 + 1),  # an atomic addition reads and writes
        l2_written=32 * (20 + 3 + 1),
        spilled=32 * 7,
    )


def test_units_of_ncu_s_own_choice_are_taken_too():
    text = page(
        ["Gbyte", "Mbyte", *["sector"] * 6, "ms"],
        ["0", "a", "6.5", "2.5", *["0"] * 6, "5"],
        ["1", "b", "0.1", "1", *["0"] * 6, "1.5"],
    )
    a, b = ncu.parse(text)
    assert (a.dram_read, a.dram_written, a.seconds) == (6.5e9, 2.5e6, 5e-3)
    assert (b.name, b.dram_read, b.seconds) == ("b", 1e8, 1.5e-3)


def test_no_kernels_are_no_rows():
    assert ncu.parse("==WARNING== No kernels were profiled.\n") == []


def test_an_unknown_unit_a_missing_metric_and_a_missing_value_are_named():
    row = ["0", "a", "1", "1", *["0"] * 6, "1"]
    with pytest.raises(ncu.NcuError, match=r"dram__bytes_read.sum has the unit 'Kibyte'"):
        ncu.parse(page(["Kibyte", *BASE[1:]], row))
    with pytest.raises(ncu.NcuError, match=r"lacks gpu__time_duration.sum"):
        ncu.parse(page(BASE, row).replace("gpu__time", "gpu_time"))
    with pytest.raises(ncu.NcuError, match=r"is 'n/a'"):
        ncu.parse(page(BASE, [*row[:-1], "n/a"]))


def test_a_program_is_profiled_into_a_report_that_is_then_read(tmp_path, monkeypatch):
    shown = page(BASE, ["0", "_forward_kernel", "1", "2", *["0"] * 6, "3"])
    fake = tmp_path / "ncu"
    fake.write_text(
        f"""#!{sys.executable}
import pathlib, sys
a = sys.argv
if "-i" in a:
    assert pathlib.Path(a[a.index("-i") + 1]).read_text() == "python -m x"
    assert a[a.index("--page") + 1] == "raw" and a[a.index("--print-units") + 1] == "base"
    print({shown!r})
else:
    assert a[a.index("--cache-control") + 1] == "none"
    at = a.index("-o") + 1
    pathlib.Path(a[at] + ".ncu-rep").write_text(" ".join(a[at + 1:]))
"""
    )
    fake.chmod(0o755)
    monkeypatch.setattr(ncu, "find", lambda: str(fake))
    (kernel,) = ncu.profile(["python", "-m", "x"], cache_control="none")
    assert (kernel.name, kernel.dram_read, kernel.dram_written) == ("_forward_kernel", 1, 2)


def test_what_ncu_says_when_it_fails_is_passed_on(tmp_path, monkeypatch):
    fake = tmp_path / "ncu"
    fake.write_text(f"#!{sys.executable}\nprint('==ERROR== ERR_NVGPUCTRPERM'); raise SystemExit(1)")
    fake.chmod(0o755)
    monkeypatch.setattr(ncu, "find", lambda: str(fake))
    with pytest.raises(ncu.NcuError, match="ERR_NVGPUCTRPERM"):
        ncu.profile(["python", "-c", ""])
