"""The totals of a step: what its message says, what became of it, and how a run counts it."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanochat.steps import Outcome, Progress, StepMessage, StepTotals

WHOLE = {
    "digest": "0" * 16,
    "dry": False,
    "stop": False,
    "unsaved": False,
    "save": False,
    "dropped": [0],
    "nats": [6.0, 3.0],
    "live": [2, 1],
    "bucket_ids": [0, 0],
}


def totals(**changed):
    return StepTotals(**{**WHOLE, **changed})


def says(digest=0, *flags):
    """A rank's message, of numbers that are added exactly in float32 for up to 256 ranks."""
    return StepMessage(digest, *(flags or [0, 0, 0, 0]), [])


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
@example([2**63])
@example([2**64 - 1, 1])
def test_law_the_digest_of_a_message_is_the_sum_over_all_ranks(digests):
    messages = [says(digest).numbers() for digest in digests]
    assert all(max(numbers) < 2**16 for numbers in messages)
    added = [sum(parts) for parts in zip(*messages)]
    assert StepTotals.read(added, num_buckets=0).digest == f"{sum(digests) % 2**64:016x}"


@given(st.integers(0, 2**64 - 1), st.tuples(*[st.integers(0, 1)] * 4), st.lists(st.integers(0, 99)))
def test_law_a_message_is_read_as_it_was_written(digest, flags, dropped):
    message = StepMessage(digest, *flags, dropped)
    numbers = message.numbers()
    assert StepMessage.read(numbers) == message
    assert len(numbers) == StepMessage.rows_at(len(dropped))
    assert numbers[StepMessage.DRY] == message.dry


def test_golden_a_message_is_flags_then_dropped_lanes_then_three_numbers_per_row():
    flags = [0, 1, 0, 2]  # of the ranks, how many are dry, stop, have not saved, want to save
    message = [7, 0, 0, 0, *flags, 3, 0, 6.0, 2, 1, 3.0, 1, 0]
    assert StepTotals.read(message, num_buckets=2) == totals(
        digest=f"{7:016x}", stop=True, save=True, dropped=[3, 0], bucket_ids=[1, 0]
    )


def test_the_loss_is_the_mean_over_live_targets_and_not_over_rows():
    assert totals(nats=[6.0, 3.0], live=[2, 1]).loss == 3.0


def test_the_losses_of_rows_are_added_without_rounding_in_any_order():
    for nats in ([2.0**53, 1.0, 1.0, -(2.0**53)], [1.0, 2.0**53, -(2.0**53), 1.0]):
        assert totals(nats=nats, live=[1, 1, 1, 1], bucket_ids=[0] * 4).loss == 0.5


def test_the_loss_of_a_step_without_live_targets_is_nan():
    assert math.isnan(totals(live=[0, 0]).loss)


def test_a_bucket_has_the_loss_of_its_own_rows():
    step = totals(nats=[6.0, 3.0], live=[2, 4], bucket_ids=[1, 0])
    assert [step.of_bucket(i) for i in (0, 1)] == [(0.75, 4), (3.0, 2)]


@pytest.mark.parametrize(
    "changed, outcome",
    [
        ({}, Outcome.APPLIED),
        ({"grad_norm": 2.0, "norm_limit": 2.0}, Outcome.APPLIED),
        ({"grad_norm": 2.1, "norm_limit": 2.0, "can_spike": True}, Outcome.SPIKE),
        ({"grad_norm": math.nan, "can_spike": True}, Outcome.SPIKE),
        ({"grad_norm": math.inf, "norm_limit": math.inf}, Outcome.VOID),
        ({"grad_norm": 1.0, "norm_limit": -1.0}, Outcome.VOID),
        ({"dry": True, "can_spike": True}, Outcome.VOID),
        ({"live": [0, 0], "grad_norm": math.nan, "norm_limit": -1.0}, Outcome.EMPTY),
        ({"live": [0, 0], "grad_norm": math.nan, "can_spike": True}, Outcome.EMPTY),
        ({"live": [0, 0], "dry": True}, Outcome.VOID),
    ],
)
def test_a_step_is_applied_or_a_spike_or_empty_or_void(changed, outcome):
    assert totals(**changed).outcome is outcome


@given(st.floats(0.5, 9), st.integers(1, 50))
def test_law_the_smoothed_loss_of_equal_losses_is_that_loss(loss, steps):
    progress = Progress()
    for _ in range(steps):
        smooth = progress.count_step(totals(nats=[loss], live=[1], bucket_ids=[0]), 8, 1.0)
    assert smooth == pytest.approx(loss)
    assert (progress.step, progress.tokens, progress.train_time_s) == (steps, 8 * steps, steps)


def test_a_spike_counts_as_a_step_and_leaves_the_smoothed_loss():
    progress = Progress()
    before = progress.count_step(totals(), 8, 1.0)
    progress.skipped += 1
    spike = totals(nats=[900.0, 900.0], grad_norm=math.nan, can_spike=True)
    assert progress.count_step(spike, 8, 1.0) == before and progress.step == 2


def test_without_an_applied_step_there_is_no_smoothed_loss():
    progress = Progress(skipped=1)
    assert math.isnan(progress.count_step(totals(live=[0, 0]), 8, 1.0))


def test_the_first_and_the_best_validation_result_are_kept():
    progress = Progress()
    for bpb in (1.5, 1.1, 1.3):
        progress.record_val(bpb)
    assert (progress.first_val_bpb, progress.min_val_bpb, progress.val_bpb) == (1.5, 1.1, 1.3)
