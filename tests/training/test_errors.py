"""How programs end whose output nobody reads any more."""

import subprocess
import sys

import pytest

TALK = "for _ in range(100_000): print('a line of output')"
PROGRAMS = {
    "script": f"""
import sys
from scripts.common.ending import ended
def main():
    {TALK}
    return 0
sys.exit(ended(main))
""",
    "train": f"""
from training.cli import launch
def main():
    {TALK}
launch(main)
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_closed_pipe_ends_a_program_without_a_complaint(program):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAMS[program]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), said) == (1, b"")
