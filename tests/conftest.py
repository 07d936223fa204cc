"""The Triton kernels run through Triton's interpreter where there is no GPU.

Triton decides at import whether it interprets. The variable is set for the imports only: a test
that wants the interpreter asks for it (tests/flash_attention/conftest.py), and every other test
runs the PyTorch tiles, as a user's CPU run does.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import flash_attention  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

# Each worker, and each run that a test starts, takes its share of the processors: more threads than
# processors only wait for each other.
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(min(2, THREADS))
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, THREADS)))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def no_full_tracebacks(monkeypatch):
    """The command line's launch() sets these for its process; a test must not pass them on."""
    for name in ("HYDRA_FULL_ERROR", "TRAIN_SET_HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_tf32():
    """A run, too, sets this for its process. The older name first: it sets the newer one."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"
