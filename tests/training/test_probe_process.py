"""Trials as processes: how they end, how much time they have, what is kept of them."""

import sys
from pathlib import Path

import psutil
import pytest

from training import probe_process
from training.probe_process import ProbeRunner, ProbeStore

# Stands for training/probe.py: does what its job's config says.
TRIAL = """
import ctypes, os, signal, sys, time
from training.probe_process import take_job
job, tell = take_job()
act = job["config"]
print("no line of JSON")
os.system("echo nor this")
print("careful now", file=sys.stderr, flush=True)
if act == "segv":
    ctypes.string_at(0)
if act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "exit":
    sys.exit(7)
if act == "hang":
    time.sleep(60)
tell(event="step", number=1)
if act == "slow":
    time.sleep(60)
tell(status="ok", device=act, seq_len=job["seq_len"], seconds_per_step=0.5, pid=os.getpid())
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "trial.py").write_text(TRIAL)
    return (sys.executable, str(tmp_path / "trial.py"))


@pytest.fixture
def children():
    """Asks which processes this test started that still run; other tests may have left some."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: set(psutil.Process().children(recursive=True)) - before


def job(act: str, **values) -> dict:
    return {"config": act, "seq_len": 64, "steps": 1, "cap_bytes": None, "limit_s": 30.0, **values}


def run(command, tmp_path: Path, act: str, **values) -> dict:
    with ProbeRunner(tmp_path, command) as runner:
        return runner.run(job(act, **values), tmp_path / "trial.log")


def test_a_result_is_what_the_process_tells_and_its_prints_are_the_log(command, tmp_path):
    result = run(command, tmp_path, "cpu")
    assert (result["status"], result["seconds_per_step"], result["seq_len"]) == ("ok", 0.5, 64)
    log = (tmp_path / "trial.log").read_text()
    assert {"no line of JSON", "nor this", "careful now"} <= set(log.splitlines())
    assert not psutil.pid_exists(result["pid"])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("segv", "killed by SIGSEGV; last line: careful now"),
        ("kill", "killed by SIGKILL (often the system's answer to memory running out); last"),
        ("exit", "ended with exit code 7; last line: "),
    ],
)
def test_a_process_that_dies_is_an_error_that_says_how(command, tmp_path, act, message):
    result = run(command, tmp_path, act, cap_bytes=5)
    assert result["status"] == "error"
    assert result["message"].startswith(message)
    assert (result["seq_len"], result["cap_bytes"], result["limit_s"]) == (64, 5, 30.0)


def test_a_step_over_the_limit_is_a_timeout_and_its_process_is_killed(
    command, tmp_path, monkeypatch, children
):
    monkeypatch.setattr(probe_process, "FIRST_STEP_S", 0.1)
    result = run(command, tmp_path, "slow", limit_s=0.2)
    assert (result["status"], result["message"]) == ("timeout", "a step took over 0.2 s")
    assert not children()


def test_a_process_that_begins_no_step_is_an_error(command, tmp_path, monkeypatch, children):
    monkeypatch.setattr(probe_process, "START_S", 1.0)
    result = run(command, tmp_path, "hang", limit_s=0.1)
    assert (result["status"], result["message"]) == ("error", "no step began in 1 s")
    assert not children()


def test_on_a_gpu_the_next_process_is_started_ahead_and_none_is_left(command, tmp_path, children):
    with ProbeRunner(tmp_path, command) as runner:
        pids = []
        for act in ("cuda", "cuda", "cpu"):
            pids.append(runner.run(job(act), tmp_path / "trial.log")["pid"])
            waiting = children()
            # The first result says that there is a GPU; from the second trial on one waits.
            assert len(waiting) == (len(pids) > 1)
        assert len(set(pids)) == 3
    assert not children()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trial.log", "trial.py"]


def test_what_failed_is_not_kept(tmp_path):
    store = ProbeStore(tmp_path / "new")
    for n, status in enumerate(("ok", "oom", "timeout", "error", "refused"), start=1):
        store.save({"seq_len": n, "cap_bytes": None, "status": status, "device": "cpu"})
    store.save({"seq_len": 1, "cap_bytes": 2**30, "status": "oom"})
    found = sorted((p.seq_len, p.cap_bytes or 0, p.status) for p in store.load())
    assert found == [(1, 0, "ok"), (1, 2**30, "oom"), (2, 0, "oom"), (3, 0, "timeout")]


def test_a_trial_of_the_same_length_replaces_the_one_before(tmp_path):
    store = ProbeStore(tmp_path)
    store.save({"seq_len": 1, "cap_bytes": None, "status": "timeout", "limit_s": 1.0})
    store.save({"seq_len": 1, "cap_bytes": None, "status": "ok"})
    assert [p.status for p in store.load()] == ["ok"]
    assert len(list(tmp_path.glob("*.json"))) == 1
