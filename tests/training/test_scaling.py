"""Fits of a sweep's rows, in words."""

import pytest

from training.scaling import scaling_of_peak


def runs(*peaks: float) -> list[dict]:
    """Rows of runs at 256, 512, ... tokens, without memory before forward."""
    return [
        {
            "seq_len": 256 * 2**i,
            "status": "ok",
            "peak_bytes": peak,
            "memory_before_forward_bytes": 1,
        }
        for i, peak in enumerate(peaks)
    ]


def test_values_that_scatter_have_no_exponent():
    """Resident memory of short runs on a CPU, which falls and rises."""
    found = scaling_of_peak(runs(0.655e9, 0.678e9, 0.645e9))
    assert found.legend().startswith("N^-0.0")  # flat, and near enough to a line
    found = scaling_of_peak(runs(0.1e9, 0.9e9, 0.3e9))
    assert found.legend() == "not fitted"
    assert "the values scatter: N^0.8 ±" in found.note("naive")
    assert found.note("naive").endswith("says nothing)")


def test_values_on_a_line_have_one():
    assert scaling_of_peak(runs(1e9, 2e9, 4e9)).power.exponent.value == pytest.approx(1.0)
