"""Which device a call runs on: the tensors' own, from any thread, and one device only."""

import threading

import pytest
import torch

from flash_attention import (
    flash_attention_v1,
    flash_attention_v2,
    naive_attention,
    sdpa_attention,
)
from tests.flash_attention.parity import assert_as_exact_as_naive, make_inputs, results

BACKENDS = [naive_attention, sdpa_attention, flash_attention_v1, flash_attention_v2]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def in_a_thread(function) -> None:
    """Run ``function`` in a thread that has touched no device, and raise what it raised."""
    caught = []

    def run():
        try:
            function()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("name", ["k", "v", "segment_ids"])
@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("cpu", "meta"),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "cuda:1", marks=[pytest.mark.gpu, two_gpus]),
    ],
)
def test_tensors_on_two_devices_are_refused(attention, name, where, other):
    arguments = {n: torch.zeros(1, 2, 8, 16, device=where) for n in "qkv"}
    arguments["segment_ids"] = torch.zeros(1, 8, dtype=torch.int64, device=where)
    arguments[name] = arguments[name].to(other)
    with pytest.raises(ValueError, match=f"device.*{where}.*{other}"):
        attention(**arguments)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_device_that_is_not_current_is_used_and_the_current_one_kept(flash, dropout_p):
    with torch.cuda.device(0):
        inputs = make_inputs(2, 4, 2, 200, 200, 64, torch.bfloat16, torch.device("cuda:1"))
        got = results(flash, *inputs, causal=True, dropout_p=dropout_p)
        assert torch.cuda.current_device() == 0
        assert {t.device for t in got.values()} == {torch.device("cuda:1")}
        if dropout_p == 0.0:
            assert_as_exact_as_naive(flash, *inputs, causal=True)


@pytest.mark.gpu
@two_gpus
def test_two_devices_take_turns(flash):
    """The same call here and there: what is remembered for one device is not used on another."""
    outputs = []
    for where in ("cuda:0", "cuda:1", "cuda:0"):
        inputs = make_inputs(1, 2, 2, 200, 200, 64, torch.float16, torch.device(where))
        got = results(flash, *inputs, causal=True, deterministic=True)
        outputs.append([t.cpu() for t in got.values()])
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
def test_a_fresh_thread_runs_forward_and_backward(flash, where):
    inputs = make_inputs(1, 2, 2, 100, 100, 64, torch.bfloat16, torch.device(where))
    in_a_thread(lambda: assert_as_exact_as_naive(flash, *inputs, causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
def test_a_fresh_thread_runs_the_backward_of_a_forward_elsewhere(flash, where):
    q, k, v, do = make_inputs(1, 2, 2, 100, 100, 64, torch.bfloat16, torch.device(where))
    o = flash(q, k, v, causal=True, deterministic=True)
    want = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    in_a_thread(lambda: o.backward(do))
    assert all(torch.equal(t.grad, w) for t, w in zip((q, k, v), want, strict=True))
