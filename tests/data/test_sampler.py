from itertools import islice

from data.sampler import EndlessBatches, epoch_order


def stream(n_sequences, batch_size, count, start=0, seed=0):
    """The first `count` sequence numbers."""
    sampler = EndlessBatches(n_sequences, batch_size, 1, seed, lambda: start)
    return [i for batch in islice(sampler, count // batch_size) for i in batch]


def test_an_epoch_holds_every_sequence_once():
    assert sorted(stream(10, 1, 10)) == list(range(10))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(epoch, 30, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_batches_run_on_into_the_next_epoch():
    numbers = stream(10, 4, 40)
    assert [sorted(numbers[i : i + 10]) for i in range(0, 40, 10)] == [list(range(10))] * 4


def test_batch_size_does_not_change_the_order():
    assert stream(10, 4, 24) == stream(10, 3, 24) == stream(10, 1, 24)


def test_any_start_goes_on_as_the_whole_run_would():
    whole = stream(7, 1, 60)
    for start in (0, 3, 7, 20):
        assert stream(7, 4, 40, start=start) == whole[start : start + 40]


def test_the_start_is_asked_for_at_each_iteration():
    start = 0
    sampler = EndlessBatches(10, 1, 5, 0, lambda: start)
    first = next(iter(sampler))
    start = 4
    assert next(iter(sampler)) == [epoch_order(0, 10, 0)[4]] != first


def test_the_length_is_that_of_the_whole_run():
    assert len(EndlessBatches(10, 2, 123, 0, lambda: 60)) == 123
