"""The launch configurations of V2's kernels.

Those for 2 bytes at head dims 64 and 128 were decided by measurements on an H200
(results/flash_v2_tuning.md); the others are untuned.

Float32, whose products are the threads' own, is loaded by pointers: beside tensor maps ptxas gave
most such kernels 32 registers and kept the rest in memory, up to 40 KB a thread.

Keys: the padded head dim, at least 64, and the bytes of an element: 2, or 4 for more.
"""

from flash_attention.tiling import Blocks

FORWARD = {
    (64, 2): Blocks(64, 128, num_warps=4, num_stages=2, heads_at_a_time=4),
    (128, 2): Blocks(64, 64, num_warps=4, num_stages=3, heads_at_a_time=4),
    (256, 2): Blocks(128, 64, num_warps=8, num_stages=2),
    (64, 4): Blocks(64, 64, num_warps=8, num_stages=1, descriptors=False),
    (128, 4): Blocks(32, 64, num_warps=8, num_stages=1, descriptors=False),
    (256, 4): Blocks(32, 32, num_warps=4, num_stages=1, descriptors=False),
}
DK_DV = {
    (64, 2): Blocks(128, 64, num_warps=4, num_stages=2, heads_at_a_time=4),
    (128, 2): Blocks(64, 64, num_warps=4, num_stages=2, heads_at_a_time=4),
    (256, 2): Blocks(64, 64, num_warps=8, num_stages=1),
    (64, 4): Blocks(32, 32, num_warps=4, num_stages=1, descriptors=False),
    (128, 4): Blocks(32, 32, num_warps=4, num_stages=1, descriptors=False),
    (256, 4): Blocks(16, 32, num_warps=4, num_stages=1, descriptors=False),
}
DQ = {
    (64, 2): Blocks(64, 64, num_warps=4, num_stages=3, heads_at_a_time=4),
    (128, 2): Blocks(128, 64, num_warps=8, num_stages=3, heads_at_a_time=4),
    (256, 2): Blocks(64, 64, num_warps=8, num_stages=1),
    (64, 4): Blocks(32, 32, num_warps=4, num_stages=1, descriptors=False),
    (128, 4): Blocks(32, 32, num_warps=4, num_stages=1, descriptors=False),
    (256, 4): Blocks(32, 16, num_warps=4, num_stages=1, descriptors=False),
}
