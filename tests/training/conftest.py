"""Run folders as a sweep leaves them."""

import json

import pytest

from training.report import read_rows
from training.units import GIB


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder; return its path."""

    def make(number: int, overrides: list[str] = (), **summary):
        folder = tmp_path / f"{number}_{','.join(overrides)}"
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)))
        values = {"status": "ok", "attention": "naive", "model": "tiny", **summary}
        (folder / "summary.json").write_text(json.dumps(values))
        return folder

    return make


@pytest.fixture
def sweep(make_run):
    """Two backends at three lengths; naive runs out of memory at the longest."""
    folders = []
    for backend, power in (("flash_v1", 1), ("naive", 2)):
        for n in (1024, 2048, 4096):
            saved = n**power * GIB // 1024
            values = {
                "attention": backend,
                "seq_len": n,
                "micro_batch_size": 4,
                "saved_attention_bytes": 4 * saved,
                "saved_total_bytes": 5 * saved,
                "peak_rss_bytes": 8 * saved,
                "tokens_per_s": 1234.5,
            }
            if (backend, n) == ("naive", 4096):
                values |= {"status": "oom", "error": "no room\nadvice", "peak_rss_bytes": None}
            overrides = [f"attention={backend}", f"seq_len={n}", "max_steps=2"]
            folders.append(make_run(len(folders), overrides, **values))
    return read_rows(folders)
