"""Real Lightning runs, stopped and resumed: which sequences does the model see?"""

import contextlib

import lightning.pytorch as L
import pytest
import torch

from data.errors import DataError

# Lightning looks for a stateful loader; here the data module holds the state.
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming", "ignore:.*LeafSpec")


class Stop(Exception):
    """Ends a run early."""


class Recorder(L.LightningModule):
    """A tiny linear model that notes what it is given at each optimizer step."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.steps = {}  # optimizer step -> sequences of its micro-batches
        self.batch_indices = []  # Lightning's numbers of the micro-batches
        self.validated_at = []  # optimizer steps

    def training_step(self, batch, batch_idx):
        rows = batch["tokens"]
        self.batch_indices.append(batch_idx)
        self.steps.setdefault(self.global_step, []).extend(map(tuple, rows.tolist()))
        return self.linear(rows[:, :1].float() / 256).square().mean()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.validated_at.append(self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def seen(self):
        return [row for step in sorted(self.steps) for row in self.steps[step]]


class SaveAfter(L.Callback):
    """Saves a checkpoint after so many micro-batches, and may stop the run there."""

    def __init__(self, path, micro_batches, stop=False):
        self.path, self.micro_batches, self.stop = path, micro_batches, stop
        self.count = 0

    def on_train_batch_end(self, trainer, *args):
        self.count += 1
        if self.count == self.micro_batches:
            trainer.save_checkpoint(self.path)
            if self.stop:
                raise Stop


def fit(data, *, callbacks=(), resume=None):
    """Trains as train.py does, and returns the model with its notes."""
    accumulate = data.sequences_per_step // data.micro_batch_size
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=data.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=2 * accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    torch.manual_seed(0)
    model = Recorder()
    with contextlib.suppress(Stop):
        trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    # What Lightning's own logging counts by: private, but wrong after a wrong resume.
    model.logged_steps = trainer.fit_loop.epoch_loop._batches_that_stepped
    return model


@pytest.fixture
def whole(ready):
    """An uninterrupted run of 40 steps: 160 sequences, through more than one epoch of 113."""
    return fit(ready(max_steps=40))


def stopped_at(ready, path, micro_batches, **changes):
    return fit(
        ready(max_steps=40, **changes), callbacks=[SaveAfter(path, micro_batches, stop=True)]
    )


def test_a_run_sees_every_sequence_of_an_epoch_once_and_goes_on(whole):
    assert len(whole.seen) == 160
    assert [len(rows) for rows in whole.steps.values()] == [4] * 40


@pytest.mark.parametrize(("step", "num_workers"), [(1, 0), (4, 2), (30, 0), (39, 0)])
def test_a_resumed_run_sees_what_the_whole_run_would(ready, whole, tmp_path, step, num_workers):
    before = stopped_at(ready, tmp_path / "c.ckpt", 2 * step, num_workers=num_workers)
    after = fit(ready(max_steps=40, num_workers=num_workers), resume=tmp_path / "c.ckpt")
    assert before.seen == whole.seen[: 4 * step]
    assert sorted(after.steps) == list(range(step, 40))
    assert after.seen == whole.seen[4 * step :]
    assert torch.equal(after.linear.weight, whole.linear.weight)
    assert after.batch_indices == list(range(2 * step, 80))
    assert after.logged_steps == 40


def test_a_resumed_run_on_the_recall_stream_sees_what_the_whole_run_would(recall_data, tmp_path):
    whole = fit(recall_data())
    fit(recall_data(), callbacks=[SaveAfter(tmp_path / "c.ckpt", 2 * 2, stop=True)])
    after = fit(recall_data(), resume=tmp_path / "c.ckpt")
    assert len(set(whole.seen)) == 20
    assert after.seen == whole.seen[8:]
    with pytest.raises(DataError, match="tokens_sha256 was"):
        fit(recall_data(stream_seed=1), resume=tmp_path / "c.ckpt")


def test_a_run_may_be_resumed_twice(ready, whole, tmp_path):
    stopped_at(ready, tmp_path / "a.ckpt", 2 * 5)
    fit(
        ready(max_steps=40),
        resume=tmp_path / "a.ckpt",
        callbacks=[SaveAfter(tmp_path / "b.ckpt", 2 * 7, stop=True)],
    )
    last = fit(ready(max_steps=40), resume=tmp_path / "b.ckpt")
    assert last.seen == whole.seen[4 * 12 :]


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_resume_with_another_micro_batch_size_sees_the_same(
    ready, whole, tmp_path, micro_batch_size
):
    stopped_at(ready, tmp_path / "c.ckpt", 2 * 7)
    after = fit(ready(max_steps=40, micro_batch_size=micro_batch_size), resume=tmp_path / "c.ckpt")
    assert after.seen == whole.seen[4 * 7 :]
    assert [len(rows) for rows in after.steps.values()] == [4] * 33
    assert after.validated_at == list(range(8, 41, 2))


def test_a_resume_with_other_steps_goes_on_with_the_next_sequence(ready, whole, tmp_path):
    stopped_at(ready, tmp_path / "a.ckpt", 2 * 5)  # 5 steps of 4: 20 sequences
    longer = {"sequences_per_step": 6, "max_steps": 40}
    middle = fit(
        ready(**longer),
        resume=tmp_path / "a.ckpt",
        callbacks=[SaveAfter(tmp_path / "b.ckpt", 3 * 3, stop=True)],
    )
    assert middle.seen == whole.seen[20:38]
    last = fit(ready(**longer), resume=tmp_path / "b.ckpt")
    assert last.seen[:100] == whole.seen[38:138]
    assert [len(rows) for rows in last.steps.values()] == [6] * 32


def test_asking_for_a_loader_amid_a_run_changes_nothing(ready, whole):
    class Ask(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.datamodule.train_dataloader()

    model = fit(ready(max_steps=40), callbacks=[Ask()])
    assert model.seen == whole.seen
    assert torch.equal(model.linear.weight, whole.linear.weight)


def test_a_checkpoint_amid_an_accumulation_repeats_that_step_whole(ready, whole, tmp_path):
    stopped_at(ready, tmp_path / "c.ckpt", 2 * 7 + 1)
    after = fit(ready(max_steps=40), resume=tmp_path / "c.ckpt")
    assert after.seen == whole.seen[4 * 7 :]
    assert [len(rows) for rows in after.steps.values()] == [4] * 33
    assert torch.equal(after.linear.weight, whole.linear.weight)


def test_a_finished_run_goes_on_with_more_steps(ready, whole, tmp_path):
    fit(ready(max_steps=10), callbacks=[SaveAfter(tmp_path / "c.ckpt", 2 * 10)])
    after = fit(ready(max_steps=40), resume=tmp_path / "c.ckpt")
    assert after.seen == whole.seen[40:]
    assert after.batch_indices == list(range(20, 80))


def test_a_finished_run_resumed_as_it_was_trains_no_more(ready, tmp_path):
    fit(ready(max_steps=10), callbacks=[SaveAfter(tmp_path / "c.ckpt", 2 * 10)])
    assert fit(ready(max_steps=10), resume=tmp_path / "c.ckpt").seen == []


def test_a_resume_with_another_seq_len_goes_on_after_as_many_tokens(ready, tmp_path):
    stopped_at(ready, tmp_path / "c.ckpt", 2 * 7)  # 28 sequences of 16 tokens: 14 of 32
    after = fit(ready(max_steps=40, seq_len=32), resume=tmp_path / "c.ckpt")
    assert after.seen == fit(ready(max_steps=40, seq_len=32)).seen[14 : 14 + 33 * 4]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"seed": 1}, "seed was 0 and is 1"), ({"val_fraction": 0.2}, "tokens_sha256 was")],
)
def test_a_resume_on_other_data_is_refused(ready, tmp_path, changes, says):
    stopped_at(ready, tmp_path / "c.ckpt", 2)
    with pytest.raises(DataError, match=says):
        fit(ready(max_steps=40, **changes), resume=tmp_path / "c.ckpt")
