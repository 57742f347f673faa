"""The gate finds the cheaper way, bounds what trials cost, and judges batches and lengths apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.draft_gate import (
    AHEAD_FEATURE_FACTOR,
    DraftGate,
    DraftMode,
    GateLimits,
    _TrialPhase,
)
from tests.support.examples import examples

LIMITS = GateLimits()
N_DRAFTS = 3


@dataclass
class Machine:
    """Synthetic steps: their time by rows, the drafter's latency, acceptance, noise."""

    base_ms: float = 1.5
    row_ms: float = 0.3  # of each row beyond the first
    drafter_ms: float = 1.0
    accepted: float = 2.0  # drafts of a sequence and step, on average
    features: float = 1.05  # of a plain step
    stall_share: float = 0.0  # steps that another process delays, tenfold
    seed: int = 1

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)

    def step(self, mode: DraftMode, n_sequences: int = 1) -> tuple[float, int]:
        """(elapsed_ms, n_tokens)."""
        rows, tokens, wait_ms = n_sequences, n_sequences, 0.0
        if mode is DraftMode.ON:
            rows *= 1 + N_DRAFTS
            chance = self.accepted / N_DRAFTS
            tokens += sum(self.rng.random() < chance for _ in range(n_sequences * N_DRAFTS))
            wait_ms = self.drafter_ms
        compute_ms = self.base_ms + self.row_ms * (rows - 1)
        compute_ms *= 1.0 if mode is DraftMode.OFF else self.features
        noise = self.rng.uniform(0.9, 1.1) * (10 if self.rng.random() < self.stall_share else 1)
        return (compute_ms + wait_ms) * noise, tokens

    def cost_ms(self, mode: DraftMode, n_sequences: int = 1) -> float:
        """Of a token of each sequence in the long run."""
        rows = n_sequences * (1 + N_DRAFTS if mode is DraftMode.ON else 1)
        compute_ms = (self.base_ms + self.row_ms * (rows - 1)) * (
            1 if mode is DraftMode.OFF else self.features
        )
        return (compute_ms + self.drafter_ms) / (1 + self.accepted) if mode is DraftMode.ON else compute_ms


@dataclass
class Ran:
    modes: list[DraftMode]
    elapsed_ms: float
    tokens: float  # of each sequence

    @property
    def cost_ms(self) -> float:
        return self.elapsed_ms / self.tokens


def run(gate: DraftGate, machine: Machine, steps: int, *, sequences: int = 1, context: int = 500) -> Ran:
    ran = Ran([], 0.0, 0.0)
    for _ in range(steps):
        mode = gate.choose(sequences, context)
        elapsed_ms, n_tokens = machine.step(mode, sequences)
        gate.record(
            mode, sequences, context, elapsed_ms=elapsed_ms, n_tokens=n_tokens, n_drafts=N_DRAFTS * sequences
        )
        ran.modes.append(mode)
        ran.elapsed_ms += elapsed_ms
        ran.tokens += n_tokens / sequences
    return ran


def test_a_forced_gate_never_tries_the_other_way_and_still_measures() -> None:
    gate = DraftGate(is_forced=True)
    ran = run(gate, Machine(drafter_ms=50.0), 2000)
    assert set(ran.modes) == {DraftMode.ON}
    costs = gate.draft_costs(1, 500)
    assert costs is not None and costs.cost_ms == pytest.approx(ran.cost_ms, rel=0.1)


def test_contexts_are_wanted_while_drafts_are_on_or_due_to_be_tried() -> None:
    gate, worse = DraftGate(), Machine(drafter_ms=12.0)
    assert not gate.wants_contexts(1, 500), "nothing is known of plain steps yet"
    run(gate, worse, LIMITS.baseline_steps)
    assert gate.wants_contexts(1, 500), "a trial is due"
    run(gate, worse, 1)
    assert gate.wants_contexts(1, 500), "it runs"
    run(gate, worse, 200)
    assert not gate.wants_contexts(1, 500), "drafts lost"
    better = DraftGate()
    run(better, Machine(), 200)
    assert better.wants_contexts(1, 500)


def test_drafts_that_cost_more_than_they_save_are_left_out() -> None:
    gate = DraftGate()
    run(gate, Machine(drafter_ms=12.0), 200)
    ran = run(gate, Machine(drafter_ms=12.0), 5000)
    assert ran.modes.count(DraftMode.OFF) > 4950


def test_drafts_that_pay_stay() -> None:
    gate = DraftGate()
    run(gate, Machine(base_ms=20.0), 100)
    ran = run(gate, Machine(base_ms=20.0), 2000)
    assert ran.modes.count(DraftMode.ON) > 1950


@pytest.mark.parametrize(("before", "after"), [(12.0, 0.2), (0.2, 12.0)])
def test_a_change_is_found(before: float, after: float) -> None:
    gate = DraftGate()
    run(gate, Machine(drafter_ms=before), 3000)
    run(gate, Machine(drafter_ms=after), 8000)
    modes = run(gate, Machine(drafter_ms=after), 200).modes
    assert modes.count(DraftMode.ON if after < 1 else DraftMode.OFF) > 180


def test_drafts_that_stop_paying_are_left_out_within_a_few_steps() -> None:
    gate = DraftGate()
    run(gate, Machine(), 3000)
    ran = run(gate, Machine(accepted=0.1), 300)
    assert ran.modes[-100:].count(DraftMode.OFF) > 60


def test_drafts_that_one_moment_began_are_checked_soon() -> None:
    """Plain steps were slow, and those of the trial quick. By what was measured then, drafts still pay."""
    gate, machine = DraftGate(), Machine(base_ms=10.0, drafter_ms=0.0)
    modes = run(gate, machine, 200).modes
    assert modes[-1] is not DraftMode.OFF and modes.count(DraftMode.ON) > 100
    machine.base_ms, machine.drafter_ms = 4.0, 12.0
    assert machine.cost_ms(DraftMode.OFF) < machine.cost_ms(DraftMode.ON) < 10.0
    assert run(gate, machine, 100).modes[-1] is not DraftMode.ON


def test_a_trial_that_wins_goes_on_longer_than_one_that_loses() -> None:
    for base_ms, drafter_ms, n_steps in ((10.0, 0.0, LIMITS.winning_steps), (4.0, 30.0, LIMITS.least_steps)):
        gate, machine = DraftGate(), Machine(base_ms=base_ms, drafter_ms=drafter_ms)
        trial = 0
        while gate.choose(1, 500) is not DraftMode.ON:
            run(gate, machine, 1)
        while gate._trial is not _TrialPhase.NONE:
            run(gate, machine, 1)
            trial += gate._trial is _TrialPhase.DRAFTS
        assert n_steps <= trial + 1 <= n_steps + 1


def test_plain_steps_that_run_ahead_are_judged_by_what_they_cost_without_features() -> None:
    """A trial of plain steps keeps contexts whole: it computes features, and so runs no step ahead."""
    limits = GateLimits(most_feature_factor=AHEAD_FEATURE_FACTOR)
    paying, losing = (
        Machine(base_ms=5.0, row_ms=0.1, drafter_ms=0.2, features=1.9, accepted=accepted)
        for accepted in (2.0, 0.6)
    )
    assert losing.cost_ms(DraftMode.OFF) < losing.cost_ms(DraftMode.ON) < losing.cost_ms(DraftMode.FEATURES)
    gate = DraftGate(limits)
    assert run(gate, paying, 3000).modes[-200:].count(DraftMode.ON) > 150
    run(gate, losing, 3000)
    assert run(gate, losing, 400).modes.count(DraftMode.OFF) > 350


def test_batches_and_lengths_are_judged_apart() -> None:
    gate = DraftGate()
    run(gate, Machine(drafter_ms=0.2), 200)
    run(gate, Machine(drafter_ms=100.0), 400, sequences=8)
    run(gate, Machine(drafter_ms=100.0), 400, context=100_000)
    found = [gate.choose(1, 500), gate.choose(8, 500), gate.choose(1, 100_000)]
    assert found == [DraftMode.ON, DraftMode.OFF, DraftMode.OFF]


def test_a_new_bucket_begins_with_its_neighbours_verdict() -> None:
    gate = DraftGate()
    run(gate, Machine(base_ms=20.0), 200)
    assert gate.choose(2, 500) is DraftMode.ON


def test_a_new_bucket_does_not_begin_with_a_trial_where_drafts_lost_next_to_it() -> None:
    gate, machine = DraftGate(), Machine(drafter_ms=12.0)
    run(gate, machine, 100)
    modes = [mode for n in (2, 4, 8, 16) for mode in run(gate, machine, 100, sequences=n).modes]
    assert set(modes) == {DraftMode.OFF}
    assert DraftMode.ON in run(gate, machine, 4000, sequences=4).modes, "it is tried in the end"


def test_a_large_batch_in_its_pause_has_no_part_in_the_trial_of_a_small_one() -> None:
    gate, machine = DraftGate(), Machine(drafter_ms=90.0)
    run(gate, machine, 100, sequences=16)
    run(gate, machine, LIMITS.baseline_steps + 1)
    modes = run(gate, machine, 1000, sequences=16).modes
    assert set(modes[:50]) == {DraftMode.FEATURES}, "the trial waits"
    assert DraftMode.ON not in modes and modes[-1] is DraftMode.OFF, "and is given up"


def test_a_trial_that_took_in_long_contexts_waits_as_long() -> None:
    pauses = []
    for setup_ms in (0.0, 5000.0):
        gate, machine = DraftGate(), Machine(drafter_ms=12.0)
        for _ in range(100):
            mode = gate.choose(1, 500)
            elapsed_ms, n_tokens = machine.step(mode)
            setup = setup_ms if mode is DraftMode.ON else 0.0
            gate.record(
                mode, 1, 500, elapsed_ms=elapsed_ms, n_tokens=n_tokens, n_drafts=N_DRAFTS, setup_ms=setup
            )
        pauses.append(gate._bucket(1, 500).due_ms)
    assert pauses[1] == LIMITS.longest_pause_ms > pauses[0]


def test_a_followed_verdict_that_costs_is_left_soon() -> None:
    """Drafts are tried at one sequence, and lose at 16, where only plain steps are known."""
    gate = DraftGate()
    run(gate, Machine(base_ms=20.0), LIMITS.baseline_steps, sequences=16)
    run(gate, Machine(base_ms=20.0), 200)
    assert gate.choose(16, 500) is DraftMode.ON
    modes = run(gate, Machine(base_ms=20.0, drafter_ms=90.0), 100, sequences=16).modes
    assert modes.count(DraftMode.ON) <= 2 * LIMITS.checked_steps


def test_a_small_batch_does_not_wait_because_drafts_lost_in_a_larger_one() -> None:
    gate = DraftGate()
    run(gate, Machine(drafter_ms=5000.0), 100, sequences=16)
    assert DraftMode.ON in run(gate, Machine(), 100).modes


@dataclass
class Contexts:
    """Sequences of a batch whose size changes, and how many rows in a row the head has of each."""

    rows: list[int]

    def step(self, gate: DraftGate, machine: Machine) -> DraftMode:
        """Drafts of a sequence with few rows are hardly ever right."""
        n = len(self.rows)
        mode = gate.choose(n, 500, is_whole=min(self.rows) >= 128)
        whole = replace(
            machine,
            accepted=machine.accepted * min(min(self.rows) / 128, 1),
            seed=machine.rng.randrange(1 << 30),
        )
        elapsed_ms, n_tokens = whole.step(mode, n)
        gate.record(mode, n, 500, elapsed_ms=elapsed_ms, n_tokens=n_tokens, n_drafts=N_DRAFTS * n)
        self.rows = [0 if mode is DraftMode.OFF else rows + 1 for rows in self.rows]
        return mode


def test_a_trial_waits_for_whole_contexts() -> None:
    """Judged by sequences of which the head has nothing, drafts that halve the cost would lose."""
    gate, machine = DraftGate(), Machine(base_ms=4.0)
    contexts = Contexts([0])
    assert {contexts.step(gate, machine) for _ in range(16)} == {DraftMode.OFF}
    assert {contexts.step(gate, machine) for _ in range(100)} == {DraftMode.FEATURES}
    assert {contexts.step(gate, machine) for _ in range(100)} >= {DraftMode.ON}
    modes = [contexts.step(gate, machine) for _ in range(100)]
    assert modes.count(DraftMode.ON) > 80 and DraftMode.OFF not in modes


def test_a_trial_goes_on_after_a_dip_of_the_batch() -> None:
    """A sequence ends every 40 steps, and the next one begins 10 steps later, with the rows of its prompt."""
    gate, machine = DraftGate(), Machine(base_ms=8.0)
    contexts = Contexts([0, 0, 0, 0])
    modes = []
    for _ in range(20):
        modes += [contexts.step(gate, machine) for _ in range(40)]
        contexts.rows.pop(0)
        modes += [contexts.step(gate, machine) for _ in range(10)]
        contexts.rows.append(500 if gate.wants_contexts(4, 500) else 0)
    last = modes[-500:]
    assert last.count(DraftMode.ON) > 450 and DraftMode.OFF not in last


def test_a_trial_goes_on_where_the_batch_became_another_one() -> None:
    gate, machine = DraftGate(), Machine(base_ms=20.0)
    modes = run(gate, machine, LIMITS.baseline_steps + 1, sequences=4).modes
    assert modes[-1] is DraftMode.FEATURES
    modes = run(gate, machine, 100).modes
    assert set(modes[: LIMITS.baseline_steps]) == {DraftMode.FEATURES}, "its plain steps are not known"
    assert set(modes[-50:]) == {DraftMode.ON}
    assert gate.choose(4, 500) is DraftMode.ON, "it had no step of the trial, and follows"


def test_a_clear_verdict_takes_fewer_steps_of_more_sequences() -> None:
    tried = []
    for sequences in (1, 16):
        modes = run(DraftGate(), Machine(drafter_ms=12.0), 300, sequences=sequences).modes
        tried.append(modes.count(DraftMode.ON))
    assert tried[1] == LIMITS.least_steps + 1 <= tried[0] <= LIMITS.trial_steps + 1


def test_drafts_that_cost_a_little_more_are_not_tried_again_and_again() -> None:
    """Within the margin the way stays, and so does the pause between trials. No noise ends a tie."""
    steps = {DraftMode.ON: (30.0, 3), DraftMode.FEATURES: (10.9, 1), DraftMode.OFF: (9.9, 1)}
    gate = DraftGate()
    run(gate, Machine(base_ms=20.0), 100)
    gate.feature_factor = 1.1
    modes = []
    for _ in range(20_000):
        mode = gate.choose(1, 500)
        elapsed_ms, n_tokens = steps[mode]
        gate.record(mode, 1, 500, elapsed_ms=elapsed_ms, n_tokens=n_tokens, n_drafts=N_DRAFTS)
        modes.append(mode)
    assert modes.count(DraftMode.FEATURES) < modes.count(DraftMode.ON)


def test_one_slow_setup_does_not_decide() -> None:
    gate = DraftGate()
    gate.record_setup(500.0, 20)
    for _ in range(3):
        gate.record_setup(3.0, 150)
    assert gate.setup.ms_per_token == pytest.approx(0.02)


def test_steps_that_went_otherwise_are_not_counted() -> None:
    gate = DraftGate()
    for _ in range(1000):
        gate.record(DraftMode.ON, 1, 500, elapsed_ms=0.001, n_tokens=4)
    assert gate.choose(1, 500) is DraftMode.OFF


@settings(max_examples=examples(12), deadline=None)
@given(
    base_ms=st.floats(0.5, 30),
    row_ms=st.floats(0, 1),
    drafter_ms=st.floats(0, 30),
    accepted=st.floats(0.1, 2.9),
    sequences=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1000),
)
def test_the_gate_is_within_three_percent_of_the_better_way(
    base_ms: float, row_ms: float, drafter_ms: float, accepted: float, sequences: int, seed: int
) -> None:
    """Regret: the trials' share, the first trial, and a verdict within the noise of a trial."""
    machine = Machine(base_ms, row_ms, drafter_ms, accepted, seed=seed)
    on_ms, off_ms = (machine.cost_ms(mode, sequences) for mode in (DraftMode.ON, DraftMode.OFF))
    ran = run(DraftGate(), machine, 8000, sequences=sequences)
    first_ms = (LIMITS.trial_steps + LIMITS.skipped_steps) * max(on_ms * 4 - off_ms, off_ms)
    assert ran.elapsed_ms <= 1.03 * min(on_ms, off_ms) * ran.tokens + first_ms


def test_stalls_of_single_steps_do_not_decide() -> None:
    """A machine that others use too; drafts save a third."""
    ratios = []
    for seed in range(10):
        machine = Machine(drafter_ms=0.5, stall_share=0.02, seed=seed)
        ran = run(DraftGate(), machine, 6000)
        ratios.append(ran.modes.count(DraftMode.ON) / 6000)
    assert sorted(ratios)[1] > 0.9
