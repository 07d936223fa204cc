"""The versions of FlashAttention, each a value of the fixture ``flash``, and their three
executions, each a value of the fixture ``device``."""

import pytest
import torch

from tests.flash_attention.versions import V1, V2, Version


@pytest.fixture(params=[pytest.param(V1, id="v1"), pytest.param(V2, id="v2")])
def flash(request) -> Version:
    return request.param


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


def pytest_collection_modifyitems(config, items) -> None:
    """What V2 shares with V1 is tested with V1 on a CPU. Through the interpreter, which is slow, V2
    takes the tests marked v2_interpreted: those of what its kernels do in their own way. On a GPU
    it takes them all."""
    left_out = [item for item in items if _shared(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _shared(item: pytest.Item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("flash") is not V2 or item.get_closest_marker("gpu"):
        return False
    if params.get("device") == "interpreter":
        return item.get_closest_marker("v2_interpreted") is None
    return item.get_closest_marker("v2_on_gpu") is not None
