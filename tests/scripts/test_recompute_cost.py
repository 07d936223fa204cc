"""What recompute costs: the two forms of one kernel, and the count of what each spends."""

import csv
from contextlib import contextmanager

import pytest
import torch

from flash_attention import io_model, launch, naive_attention, tiling
from flash_attention.v1 import tables
from scripts import recompute_cost
from tests.flash_attention.parity import make_inputs, results, upcast


def compare_with_naive(device: torch.device, dtype: torch.dtype, n: int, head_dim: int) -> None:
    from scripts.common import kept_probabilities as kp

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
    monkeypatch.setitem(tables.FORWARD, (64, 4), tiling.Blocks(16, 32))
    monkeypatch.setitem(tables.BACKWARD, (64, 4), tiling.Blocks(16, 16))
    compare_with_naive(torch.device("cpu"), torch.float32, n=40, head_dim=16)


def test_both_forms_are_launched_on_the_device_of_the_tensors(monkeypatch):
    pytest.importorskip("triton")
    from scripts.common import kept_probabilities as kp

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


SMALL = ["--seq-lens", "16", "32", "--tokens=32", "--width=32", "--head-dim=16"]


def table(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_what_runs_on_the_device_is_timed_and_the_rest_is_the_model(tmp_path, capsys):
    argv = ["--device=cpu", "--measure", "--gpu=h200", *SMALL, "--rounds=1"]
    assert recompute_cost.main([*argv, f"--out={tmp_path / 'cost'}"]) == 0
    rows = table(tmp_path / "cost.csv")
    assert [(r["backend"], r["seq_len"]) for r in rows] == [
        (name, n) for n in ("16", "32") for name in ("naive", "flash_v1", "kept_p", "recomputed_p")
    ]
    for row in rows:
        timed = row["backend"] in ("naive", "flash_v1")
        assert row["status"] == ("ok" if timed else "model")
        assert bool(row["backward_ms"]) == timed
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "flash_v1" in capsys.readouterr().out


def test_without_a_gpu_the_model_of_every_backend_is_written(tmp_path, monkeypatch):
    def measured(*_):
        pytest.fail("measured")

    monkeypatch.setattr(recompute_cost, "measured", measured)
    argv = ["--gpu=h200", "--no-measure", f"--out={tmp_path / 'cost'}"]
    assert recompute_cost.main(argv) == 0
    rows = table(tmp_path / "cost.csv")
    assert {(r["status"], r["gpu"], r["device"], r["forward_ms"]) for r in rows} == {
        ("model", "H200", "", "")
    }
    last = {r["backend"]: r for r in rows if r["seq_len"] == "8192"}
    # 32 heads, whole tiles: products of 2 N^2 D FLOPs, 2 forward and 4 or 5 backward.
    product = 32 * 2 * 8192**2 * 64 / 1e9
    for name, products in (("naive", 6), ("flash_v1", 7), ("kept_p", 6), ("recomputed_p", 7)):
        assert float(last[name]["gflop"]) == pytest.approx(products * product)
    assert last["recomputed_p"]["gbyte"] == last["flash_v1"]["gbyte"]
    assert float(last["kept_p"]["gbyte"]) > float(last["recomputed_p"]["gbyte"])
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "dtype"),
    [
        (["--no-measure"], "bf16"),
        (["--measure", "--device=cpu"], "fp32"),
        (["--measure", "--device=cpu", "--dtype=bf16"], "bf16"),
    ],
)
def test_the_model_is_of_16_bits_where_no_cpu_is_timed(argv, dtype):
    assert recompute_cost.parse(["--gpu=h200", *argv]).dtype == dtype


def test_a_length_beyond_a_million_is_refused(capsys):
    with pytest.raises(SystemExit):
        recompute_cost.parse(["--gpu=h200", "--seq-lens", "100000000"])
    assert "'100000000' is not accepted; give an integer from 1 to" in capsys.readouterr().err


def test_a_bad_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        recompute_cost.parse(["--gpu=tpu"])
    assert "--gpu: no GPU 'tpu' in the table" in capsys.readouterr().err


def test_a_cpu_times_less_than_a_gpu_unless_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timed = recompute_cost.parse(["--measure", "--device", "cpu", "--rounds", "7"])
    assert (timed.seq_lens, timed.tokens, timed.dtype) == ([256, 512, 1024], 1024, "fp32")
    assert timed.rounds == 7
    counted = recompute_cost.parse(["--dtype", "fp16"])
    assert (counted.seq_lens[-1], counted.tokens, counted.dtype) == (8192, 8192, "fp16")
