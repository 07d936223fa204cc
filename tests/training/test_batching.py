import pytest

from training.batching import plan_batch
from training.errors import ConfigError


@pytest.mark.parametrize(
    ("seq_len", "in_step", "in_pass", "size", "accumulate"),
    [
        (256, 16384, 16384, 64, 1),
        (256, 16384, 4096, 16, 4),
        (256, 16384, 5000, 16, 4),  # 19 sequences fit, 16 divide 64
        (256, 1792, 1024, 1, 7),  # 7 sequences, 4 fit: only 1 divides
        (8192, 16384, 1024, 1, 2),  # not even one fits: one is taken
        (300, 1000, 1000, 3, 1),  # not a multiple: rounded down
    ],
)
def test_the_micro_batch_is_the_largest_that_fits_and_divides(
    seq_len, in_step, in_pass, size, accumulate
):
    plan = plan_batch(seq_len, in_step, in_pass)
    assert (plan.micro_batch_size, plan.accumulate) == (size, accumulate)
    assert plan.sequences_per_step == in_step // seq_len
    assert plan.tokens_per_step == in_step // seq_len * seq_len


def test_a_step_without_a_whole_sequence_is_refused():
    sentence = "global_batch_tokens=16384 holds no sequence of seq_len=32768; give at least 32768"
    with pytest.raises(ConfigError, match=sentence):
        plan_batch(32768, 16384, 16384)


@pytest.mark.parametrize(("seq_len", "sequences"), [(256, 8), (1024, 2), (2048, 1), (16384, 1)])
def test_auto_is_2048_tokens_or_one_sequence(seq_len, sequences):
    assert plan_batch(seq_len, "auto", 16384).sequences_per_step == sequences
