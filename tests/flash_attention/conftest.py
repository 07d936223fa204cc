"""The three executions of FlashAttention V1, each a value of the fixture ``device``."""

import pytest
import torch


@pytest.fixture(
    params=["tiles", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request, monkeypatch) -> torch.device:
    """The device to put tensors on, with the execution of that name in force there."""
    if request.param == "cuda":
        return torch.device("cuda")
    if request.param == "interpreter":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("Triton compiles here; it interprets where there is no GPU")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture
def interpreted(request) -> bool:
    """True where a test should keep its sizes small: the interpreter is slow."""
    return "interpreter" in request.node.name
