"""Peaks measured point by point: what shares the GPU, what is written, what a failure becomes."""

import csv
import threading
import time

import pytest

from scripts import measure_memory
from scripts.check_prediction import of_table
from scripts.measure_memory import Room
from training.units import GIB


@pytest.fixture
def trials(monkeypatch):
    """Stands in for the processes: 1 GiB at 32 tokens, 2 GiB at 64, more is out of memory."""

    class Runner:
        def __init__(self, folder):
            assert folder.is_dir()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Nothing is left behind."""

        def run(self, job, log):
            if job["seq_len"] > 64:
                return {"status": "oom", "message": "no room"}
            peak = job["seq_len"] // 32 * GIB
            return {"status": "ok", "allocated_bytes": peak, "reserved_bytes": 2 * peak}

    monkeypatch.setattr(measure_memory, "ProbeRunner", Runner)


def test_every_combination_is_a_row_that_the_comparison_reads(trials, tmp_path):
    out = tmp_path / "new" / "memory.csv"
    overrides = ["seq_len=32,64,96", "attention=naive"]
    assert measure_memory.main([*overrides, f"--out={out}"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [row["status"] for row in rows] == ["ok", "ok", "oom"]
    assert [row["peak_reserved_bytes"] for row in rows] == [str(2 * GIB), str(4 * GIB), ""]
    found = [(cfg.seq_len, cfg.attention["_target_"], peak) for _, cfg, peak in of_table(out)]
    naive = "flash_attention.NaiveAttention"
    assert found == [(32, naive, GIB), (64, naive, 2 * GIB)]


def test_a_step_that_is_predicted_has_one_sequence_as_the_measured_one_has():
    point = measure_memory.point(["seq_len=32"], predicted=True)
    assert point.cfg.global_batch_tokens == 32  # else 2048 tokens, in micro-batches of as many
    assert point.cfg.micro_batch_tokens == 1
    alone = measure_memory.point(["seq_len=2048"], predicted=True)
    assert 0 < point.predicted < alone.predicted


def test_a_bad_setting_is_refused_before_anything_is_measured(trials, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        measure_memory.main(["seq_len=32,-1", f"--out={tmp_path / 'memory.csv'}"])
    assert stop.value.code == 2
    assert "seq_len=-1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shares_of_a_room_never_exceed_it():
    room, lock = Room(10.0), threading.Lock()
    held, most = 0.0, 0.0

    def work(size: float) -> None:
        nonlocal held, most
        for _ in range(20):
            with room.share(size):
                with lock:
                    held += min(size, 10.0)
                    most = max(most, held)
                time.sleep(0.001)  # for the others to come in
                with lock:
                    held -= min(size, 10.0)

    threads = [
        threading.Thread(target=work, args=(size,), daemon=True) for size in (3.0, 4.0, 6.0, 25.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert 0 < most <= 10.0
    assert room.free == 10.0


def test_a_failure_gives_its_share_back():
    room = Room(10.0)
    with pytest.raises(RuntimeError), room.share(4.0):
        raise RuntimeError
    assert room.free == 10.0
