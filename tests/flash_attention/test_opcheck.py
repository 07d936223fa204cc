"""torch.library.opcheck on both ops: schema, autograd registration, fake tensors, AOT dispatch."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flash_attention.dropout import draw_seed
from tests.flash_attention.parity import make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _fused(q, k, v):
    """Views of one [B, N, 3 D] projection of one head."""
    b, h, n, d = q.shape
    qkv = torch.randn(b, n, 3, h, d, dtype=q.dtype, device=q.device)
    return [t.transpose(1, 2).requires_grad_() for t in qkv.unbind(2)]


def _expanded(q, k, v):
    """Stride 0 over the batch in q, columns first in k, every second column in v."""
    k = k.detach().transpose(2, 3).contiguous().transpose(2, 3)
    v = torch.cat((v.detach(), v.detach()), dim=3)[..., ::2]
    return [q.detach()[:1].expand_as(q), k.requires_grad_(), v.requires_grad_()]


# name: (sizes B, H, Hkv, Nq, Nk, D; segments; dropout_p; knobs; layout)
CASES = {
    "grouped heads, Nq != Nk": ((2, 4, 2, 19, 33, 16), False, 0.0, {}, None),
    "everything": ((2, 4, 2, 33, 33, 16), True, 0.2, dict(splits=2, block_q=16), None),
    "fused projection": ((2, 2, 2, 33, 33, 16), False, 0.2, dict(deterministic=True), _fused),
    "other strides": ((2, 2, 2, 33, 33, 16), True, 0.0, {}, _expanded),
    "no batch": ((0, 2, 2, 8, 8, 16), False, 0.0, {}, None),
    "no queries": ((2, 4, 2, 0, 8, 16), False, 0.2, {}, None),
    "no keys": ((2, 4, 2, 8, 0, 16), False, 0.0, {}, None),
}


def _arguments(case: str, dtype: torch.dtype, device: torch.device):
    """q, k, v that require gradients, dO, and the ops' further arguments."""
    sizes, segmented, dropout_p, knobs, layout = CASES[case]
    *qkv, do = make_inputs(*sizes, dtype, device)
    if layout is not None:
        qkv = layout(*qkv)
    batch, n = sizes[0], sizes[3]
    segment_ids = torch.arange(n, device=device).expand(batch, n).contiguous() // 10
    seed = draw_seed(device) if dropout_p else None
    knobs = dict(deterministic=False, splits=None, block_q=None, block_kv=None) | knobs
    extras = (segment_ids if segmented else None, seed, True, 0.25, dropout_p, *knobs.values())
    return qkv, do, extras


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_forward_op_passes(flash, case, where):
    qkv, _, extras = _arguments(case, torch.float32, torch.device(where))
    opcheck(flash.forward_op, (*qkv, *extras))


@pytest.mark.v2_on_gpu
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_the_backward_op_passes(flash, case, where):
    qkv, do, extras = _arguments(case, torch.float16, torch.device(where))
    arguments = (do, *_saved(flash, qkv, extras), *extras)
    opcheck(flash.backward_op, arguments)
    do.requires_grad_()  # its own gradient is an error: the registration is checked, not run
    opcheck(flash.backward_op, arguments, test_utils="test_autograd_registration")


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
def test_the_kernels_write_to_no_input_and_give_the_fake_strides(flash, device):
    qkv, do, extras = _arguments("other strides", torch.float32, device)
    what = ("test_schema", "test_faketensor")
    saved = _saved(flash, qkv, extras)
    opcheck(flash.forward_op, (*saved[:3], *extras), test_utils=what)
    opcheck(flash.backward_op, (do, *saved, *extras), test_utils=what)


def _saved(flash, qkv, extras) -> list[Tensor]:
    """What forward keeps for backward: q, k, v, o, m, l."""
    qkv = [t.detach() for t in qkv]
    return [*qkv, *flash.forward_op(*qkv, *extras)]
