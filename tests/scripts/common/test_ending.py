"""The last words of a script."""

import errno
from pathlib import Path

import pytest

from scripts.common.ending import ended

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
COMMANDS = sorted(SCRIPTS.glob("*.py"))


def raising(error: BaseException):
    def main():
        raise error

    return main


def test_a_script_that_ends_well_has_its_own_exit_code(capsys):
    assert ended(lambda: 3) == 3
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_ends_in_a_sentence(capsys):
    assert ended(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\ninterrupted; what was written before stays\n"


def test_a_full_disk_ends_in_a_sentence(capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "table.csv")
    assert ended(raising(full)) == 1
    said = "error: no room for table.csv (No space left on device); make some and run again\n"
    assert capsys.readouterr().err == said


def test_any_other_error_keeps_its_traceback():
    with pytest.raises(FileNotFoundError):
        ended(raising(FileNotFoundError(errno.ENOENT, "No such file", "x")))
    with pytest.raises(ValueError, match="y"):
        ended(raising(ValueError("y")))


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.stem)
def test_every_command_ends_so(script):
    assert script.read_text(encoding="utf-8").endswith("    sys.exit(ended(main))\n")


def test_all_commands_are_known():
    assert len(COMMANDS) >= 12
