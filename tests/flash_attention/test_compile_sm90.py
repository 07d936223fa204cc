"""Every kernel compiles for Hopper, fits its shared memory, keeps its matrix products apart and its
numbers in registers, but for a few, and sums alike in every thread.

No GPU is needed: Triton compiles for a target it is told. The interpreter accepts programs that the
compiler refuses, so this is what a machine without a GPU knows about one with.
"""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 232_448  # bytes a program may have on sm_90
SPILLED = 4_096  # bytes of a thread; float32 beside tensor maps had 9 to 40 KB

# In a process of its own: the test session has imported the kernels for the interpreter.
COMPILE = '''
import os, re, subprocess, sys, tempfile
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flash_attention import delta, segments, tiling, v1, v2
from flash_attention.v1 import tables as v1_tables
from flash_attention.v2 import tables as v2_tables

KERNELS = {
    "forward": v1.forward._forward_kernel,
    "backward": v1.backward._backward_kernel,
    "v2_forward": v2.forward._forward_kernel,
    "v2_dk_dv": v2.backward._dk_dv_kernel,
    "v2_dq": v2.backward._dq_kernel,
    "delta": delta._delta_kernel,
    "spans": segments._spans_kernel,
}
FLOAT32 = {"m_ptr", "l_ptr", "lse_ptr", "delta_ptr"}
SUMS = {"forward": "o_ptr", "backward": "dq_ptr"}  # in memory, in float32
TABLES = {
    "forward": v1_tables.FORWARD,
    "v2_forward": v2_tables.FORWARD,
    "v2_dk_dv": v2_tables.DK_DV,
    "v2_dq": v2_tables.DQ,
}
OPTIONS = {"delta": delta.OPTIONS}
INTEGERS = {"segment_ptr": "*i64", "span_ptr": "*i32", "seed_ptr": "*i64"}


def fused_shuffles(ptx):
    """How many values of another thread go into a fused multiply-add."""
    theirs, fused = set(), 0
    for line in ptx.splitlines():
        words = re.findall("[%.A-Za-z0-9_]+", line) or [""]
        if words[0].startswith("shfl") or words[0].startswith("mov") and words[2] in theirs:
            theirs.add(words[1])
        elif words[0].startswith("fma"):
            fused += not theirs.isdisjoint(words[2:])
    return fused


def compile_kernel(name, head_dim, size, variant):
    """What the launchers pass: aligned pointers and, but for one variant, strides, the last 1."""
    everything, strides_aligned = variant == "all", variant != "unaligned"
    kernel, element = KERNELS[name], "*bf16" if size == 2 else "*fp32"
    blocks = tiling.tuned(TABLES.get(name, v1_tables.BACKWARD), head_dim, size)
    block_d = tiling.padded_head_dim(head_dim)
    values = dict(
        CAUSAL=True, SEGMENTS=everything, DROPOUT=everything, ATOMIC=not everything,
        HEAD_DIM=head_dim,
        DESCRIPTORS=blocks.descriptors, BLOCK_D=block_d, BLOCK_Q=blocks.block_q,
        BLOCK_KV=blocks.block_kv, ACC=tl.float32, PRECISION="ieee", BLOCK=64, CHUNK=segments.CHUNK,
    )
    signature, constants, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        aligned = True
        if argument in values or argument.startswith("stride") and argument.endswith("d"):
            kind, aligned = "constexpr", False
            constants[argument] = values.get(argument, 1)
        elif argument.endswith("_src") and blocks.descriptors:  # a tensor map
            rows = blocks.block_kv if argument in ("k_src", "v_src") else blocks.block_q
            kind, aligned = f"tensordesc<{element[1:]}[1, 1, {rows}, {block_d}]>", False
        elif argument.endswith(("_ptr", "_src")):
            float32 = argument in FLOAT32 or argument == SUMS.get(name)
            kind = INTEGERS.get(argument, "*fp32" if float32 else element)
        elif argument in ("scale", "keep_scale"):
            kind, aligned = "fp32", False
        else:
            stride = argument.startswith("stride")
            kind, aligned = "i32", strides_aligned if stride else argument in ("nq", "nk")
        signature[argument] = kind
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=dict(
            num_warps=blocks.num_warps, num_stages=blocks.num_stages, **OPTIONS.get(name, {})
        ),
    )
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    serialized = "C7510" in words or "C7512" in words
    spilled = max(int(n) for n in re.findall("([0-9]+) bytes spill stores", words))
    print(compiled.metadata.shared, serialized, spilled, fused_shuffles(compiled.asm["ptx"]))


for case in sys.argv[1:]:
    name, head_dim, size, variant = case.split()
    compile_kernel(name, int(head_dim), int(size), variant)
'''


# Kernel, head dim, bytes of an element, and "all" (segments and dropout) or "plain" (neither); with
# "unaligned" strides a thread holds single numbers.
CASES = [
    *("forward 64 2 all", "forward 128 2 plain", "spans 64 2 plain"),
    *("backward 64 2 all", "backward 128 2 plain", "delta 80 2 plain"),
    *("v2_forward 128 2 all", "v2_dk_dv 128 2 plain", "v2_dq 128 2 plain", "v2_dq 64 4 plain"),
    *("delta 24 4 unaligned", "forward 24 4 unaligned", "v2_forward 24 4 unaligned"),
]


def test_the_kernels_compile_and_fit():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *CASES], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for case, line in zip(CASES, lines, strict=True):
        shared, serialized, spilled, fused_shuffles = line.split()
        assert int(shared) <= SHARED_MEMORY, case
        assert serialized == "False", case  # ptxas says where products wait for each other
        assert int(spilled) <= SPILLED, case
        assert int(fused_shuffles) == 0, case  # or threads would sum a row to different last bits
