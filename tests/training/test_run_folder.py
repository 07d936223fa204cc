"""The run folder: one process at a time, and no half-written file under its own name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.errors import ConfigError
from training.run_folder import held, replacing
from training.signals import sigterm_interrupts

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from training.run_folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_made_and_left_without_a_trace(tmp_path):
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_folder_in_use_is_refused_until_its_process_is_gone_even_when_killed(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is in use by another run"), held(tmp_path):
            pass
    finally:
        other.kill()
        other.wait()
    with held(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_names_the_keys(tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with (
        pytest.raises(ConfigError, match="give another output_dir"),
        held(folder),
    ):
        pass


def test_a_replaced_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"


def test_sigterm_acts_like_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
