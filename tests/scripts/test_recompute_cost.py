"""What recompute costs: the two forms of one kernel, and the count of what each spends."""

import csv
from contextlib import contextmanager

import pytest
import torch

from flash_attention import io_model, launch, naive_attention, tiling
from scripts import recompute_cost
from tests.flash_attention.parity import make_inputs, results, upcast


def compare_with_naive(device: torch.device, dtype: torch.dtype, n: int, head_dim: int) -> None:
    from scripts import kept_probabilities as kp

    q, k, v, do = make_inputs(1, 1, 1, n, n, head_dim, dtype, device)
    with torch.no_grad():  # later keys have larger scores: the maximum rises from block to block
        k *= torch.linspace(0.2, 2.0, n, device=device)[:, None].to(dtype)
    tolerance = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.05)
    for causal in (False, True):
        want = results(naive_attention, *upcast(q, k, v, do), causal=causal)
        for form in (kp.kept_p_attention, kp.recomputed_p_attention):
            o = form(q, k, v, causal)
            got = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
            for name, t in zip(want, got, strict=True):
                torch.testing.assert_close(
                    t.double(), want[name], **tolerance, msg=f"{form.__name__}, {causal=}: {name}"
                )


def test_both_forms_are_attention_with_its_gradients(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles here; it interprets where there is no GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tiling, "forward_blocks", lambda *_: tiling.Blocks(16, 32))
    monkeypatch.setattr(tiling, "backward_blocks", lambda *_: tiling.Blocks(16, 16))
    compare_with_naive(torch.device("cpu"), torch.float32, n=40, head_dim=16)


def test_both_forms_are_launched_on_the_device_of_the_tensors(monkeypatch):
    pytest.importorskip("triton")
    from scripts import kept_probabilities as kp

    current, launched_on = [], []

    @contextmanager
    def on_device(t):
        current.append(t.device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: launched_on.append(list(current))

    monkeypatch.setattr(launch, "on_device", on_device)
    monkeypatch.setattr(kp, "_kept_forward", Kernel())
    monkeypatch.setattr(kp, "_kept_backward", Kernel())
    q, k, v, do = make_inputs(1, 1, 1, 32, 32, 16, torch.float32, torch.device("cpu"))
    torch.autograd.grad(kp.kept_p_attention(q, k, v, False), (q, k, v), do)
    assert launched_on == [[q.device]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_forms_are_attention_on_the_gpu(head_dim):
    compare_with_naive(torch.device("cuda"), torch.bfloat16, n=700, head_dim=head_dim)


def test_keeping_p_spends_a_product_less_and_moves_p_twice():
    n = 1024
    shape = io_model.Shape(1, 2, n, n, 64)
    again_flops, again_bytes = recompute_cost.spent("flash_v1", shape, 132)
    flops, moved = recompute_cost.spent("kept_p", shape, 132)
    assert again_flops - flops == 2 * (2 * n * n * 64)
    # P, two bytes an entry, written and read; a maximum per row and block of 256 keys written, and
    # read by each block of 128.
    maxima = 2 * n * 4 * (n // 256 + n // 128)
    assert moved - again_bytes == 2 * (2 * n * n) * 2 + maxima
    # 2 + 4 products of naive attention, 2 + 5 of flash.
    naive_flops, naive_bytes = recompute_cost.spent("naive", shape, 132)
    assert again_flops / naive_flops == pytest.approx(7 / 6)
    assert naive_bytes > moved > again_bytes


def test_it_writes_a_row_for_each_backend(tmp_path, capsys):
    argv = ["--device=cpu", "--seq-lens", "16", "32", "--tokens=32", "--width=32", "--head-dim=16"]
    assert recompute_cost.main([*argv, "--rounds=1", f"--out={tmp_path / 'cost'}"]) == 0
    with open(tmp_path / "cost.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["backend"], r["seq_len"]) for r in rows] == [
        ("naive", "16"), ("flash_v1", "16"), ("naive", "32"), ("flash_v1", "32"),
    ]  # fmt: skip
    assert all(r["status"] == "ok" and float(r["backward_ms"]) > 0 for r in rows)
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "flash_v1" in capsys.readouterr().out
