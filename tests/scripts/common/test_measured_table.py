"""The printed table: columns without a value are left out, and no others."""

from scripts.common.measured_table import measured_table


def cells(table) -> dict[str, list[str]]:
    return {column.header: list(column.cells) for column in table.columns}


def test_a_column_that_is_empty_everywhere_is_left_out():
    lines = [["a", "1", "", ""], ["b", "2", "", "3"]]
    table = measured_table("times", ["name", "N", "ms", "MiB"], lines, left=["name"])
    assert cells(table) == {"name": ["a", "b"], "N": ["1", "2"], "MiB": ["", "3"]}
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
