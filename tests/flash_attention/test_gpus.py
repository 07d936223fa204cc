"""The table of GPUs, and that a GPU which is there is asked rather than looked up."""

from types import SimpleNamespace

import pytest
import torch

from flash_attention import gpus


def test_the_table_is_the_driver_s_where_the_driver_was_asked():
    # An H200's attributes as Nsight Compute reports them: device__attribute_*.
    h200 = gpus.known("H200")
    assert h200.shared_memory == 232_448
    assert h200.l2 == 62_914_560
    assert h200.processors == 132


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"no GPU 'tpu'.* t4, v100"):
        gpus.known("tpu")


def asked(monkeypatch, name: str) -> gpus.Gpu:
    properties = SimpleNamespace(
        name=name,
        multi_processor_count=7,
        shared_memory_per_block_optin=11,
        regs_per_multiprocessor=13,
        L2_cache_size=17,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return gpus.query(torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("GeForce RTX 3090", "rtx3090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_capacities_are_asked_and_rates_are_the_model_s(monkeypatch, name, model):
    got, listed = asked(monkeypatch, name), gpus.known(model)
    assert (got.name, got.processors, got.shared_memory, got.l2) == (name, 7, 11, 17)
    assert got.registers == 4 * 13  # a register is four bytes
    assert (got.bandwidth, got.flops) == (listed.bandwidth, listed.flops)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA XYZ",
        "NVIDIA H100 PCIe",  # the data sheets: 2.0 TB/s, not 3.35
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-PCIE-40GB",  # 1.6 TB/s, not 2.0
        "NVIDIA A100-SXM4-40GB",
        "Tesla V100-PCIE-16GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
def test_a_gpu_whose_rates_are_unknown_is_refused(monkeypatch, name):
    with pytest.raises(ValueError, match=f"rates of {name} are not in the table; give one of t4"):
        asked(monkeypatch, name)


@pytest.mark.gpu
def test_the_gpu_that_is_here_can_be_asked():
    here = gpus.query(torch.device("cuda"))
    assert here.shared_memory >= 48 * gpus.KIB
    assert here.l2 > here.shared_memory
