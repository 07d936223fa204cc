import pytest
import torch

from training.devices import check_offload, resolve_hardware
from training.errors import ConfigError


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, with or without bfloat16."""

    def make(*, bf16: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        # PyTorch says yes by default where bfloat16 is only emulated.
        supported = lambda including_emulation=True: bf16 or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")

    return make


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_is_float32_on_a_cpu(no_gpu):
    hardware = resolve_hardware("auto", "auto")
    assert (hardware.device, hardware.precision) == ("cpu", "32-true")
    assert hardware.name


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_is_the_gpu_with_bfloat16_where_it_has_it(gpu, bf16, precision):
    gpu(bf16=bf16)
    hardware = resolve_hardware("auto", "auto")
    assert (hardware.device, hardware.precision) == ("cuda", precision)
    assert hardware.name == "some GPU"


def test_cpu_is_taken_beside_a_gpu(gpu):
    gpu(bf16=True)
    assert resolve_hardware("cpu", "auto").precision == "32-true"


@pytest.mark.parametrize(
    ("device", "precision", "sentence"),
    [
        ("tpu", "auto", "device=tpu is not accepted; give one of auto, cpu, cuda"),
        ("cuda", "auto", "device=cuda, but PyTorch sees no CUDA GPU here"),
        ("cpu", "fp8", "precision=fp8 is not accepted; give one of auto, 32-true, bf16-mixed"),
        ("cpu", "16-mixed", "precision=16-mixed needs a GPU"),
    ],
)
def test_what_a_cpu_lacks_is_refused(no_gpu, device, precision, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resolve_hardware(device, precision)


def test_bfloat16_on_a_gpu_without_it_is_refused(gpu):
    gpu(bf16=False)
    with pytest.raises(ConfigError, match="some GPU has no bfloat16; give 16-mixed or 32-true"):
        resolve_hardware("cuda", "bf16-mixed")


def test_offloading_is_refused_on_a_cpu_alone(gpu):
    gpu(bf16=True)
    check_offload(True, resolve_hardware("cuda", "auto"))
    check_offload(False, resolve_hardware("cpu", "auto"))
    with pytest.raises(ConfigError, match=r"offload_checkpoints=true .* this run is on the cpu"):
        check_offload(True, resolve_hardware("cpu", "auto"))
