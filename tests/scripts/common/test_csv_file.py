"""Tables as CSV: what is in them, and that no half of one is left."""

from dataclasses import dataclass

import pytest

from scripts.common import csv_file


@dataclass
class Row:
    n: int
    ms: float | None = None


def test_rows_and_what_they_share_are_written_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "x.csv"
    csv_file.write(path, [Row(1, 0.5), Row(2)], {"gpu": "H200, a"})
    assert path.read_bytes() == b'n,ms,gpu\n1,0.5,"H200, a"\n2,,"H200, a"\n'
    csv_file.write(path, [{"a": 1}])
    assert path.read_text() == "a\n1\n"


def test_a_table_without_rows_has_its_columns(tmp_path):
    csv_file.write(tmp_path / "x.csv", [], {"gpu": ""}, columns=["n"])
    assert (tmp_path / "x.csv").read_text() == "n,gpu\n"


def test_a_row_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    csv_file.write(tmp_path / "x.csv", [Row(1)])
    with pytest.raises(ValueError, match="not in fieldnames"):
        csv_file.write(tmp_path / "x.csv", [{"n": 2}, {"m": 3}])
    assert (tmp_path / "x.csv").read_text() == "n,ms\n1,\n"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
