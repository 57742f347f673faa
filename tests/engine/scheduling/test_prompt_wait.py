"""The number of steps until a prompt ends is bounded by its need and that of older prompts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.common.prefill_order import OVERDUE_SHARE, PATIENCE
from libs.engine.scheduling.scheduler import DRAFTS_LEAVE, Limits, Slice, StepCandidate, schedule

limits = st.builds(Limits, step_tokens=st.integers(8, 64), max_batch=st.integers(2, 8))


def prompt(number: int, tokens: int) -> StepCandidate:
    return StepCandidate(f"p{number}", number, last_slice=0, pending_tokens=tokens, decoding=False)


def after_step(prompts: list[StepCandidate], plan: list[Slice]) -> list[StepCandidate]:
    """Return the unfinished prompts with their counts after the step."""
    own = {piece.seq_id: piece.n_tokens for piece in plan}
    total = sum(own.get(each.seq_id, 0) for each in prompts)
    moved = [
        replace(
            each,
            pending_tokens=each.pending_tokens - own.get(each.seq_id, 0),
            waited_tokens=each.waited_tokens + total - own.get(each.seq_id, 0),
        )
        for each in prompts
    ]
    return [each for each in moved if each.pending_tokens]


@given(
    limits,
    st.lists(st.integers(1, 60), max_size=3),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), max_size=8),
    st.data(),
)
def test_a_prompt_ends_in_a_bounded_number_of_steps(
    limits: Limits, older: list[int], need: int, batches: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The bound holds for any newer prompts and any number of decoding sequences, with and without drafts.

    A prompt is overdue when PATIENCE times its need was computed for others. From then on it, or an
    older one, gets a share of each step.
    """
    limits = replace(limits, step_tokens=max(limits.step_tokens, limits.max_batch))
    prompts = [prompt(number, tokens) for number, tokens in enumerate([*older, need])]
    ours, arrival = prompts[-1].seq_id, len(prompts)
    n_decoding, n_drafts = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8)))
    decoding = [
        StepCandidate(f"d{i}", -1 - i, last_slice=0, pending_tokens=1, decoding=True, n_drafts=n_drafts)
        for i in range(n_decoding)
    ]
    n_decode = min(n_decoding, limits.max_batch - 1)
    left = limits.step_tokens - n_decode
    # The tokens of a step for prompts with any number of drafts, and those that other prompts get of it.
    guaranteed = max(left - n_decode * n_drafts, -(-left // DRAFTS_LEAVE))
    share = max(1, guaranteed // OVERDUE_SHARE)
    least_for_others = min(guaranteed, limits.max_batch - n_decode)
    bound = -(-PATIENCE * need // least_for_others) + sum(-(-tokens // share) for tokens in [*older, need])
    for step in range(bound):
        n_new, tokens = batches[step % len(batches)] if batches else (limits.step_tokens, 1)
        prompts += [prompt(arrival + i, tokens) for i in range(n_new) if tokens]
        arrival += n_new
        prompts = after_step(prompts, schedule([*decoding, *prompts], limits))
        if all(each.seq_id != ours for each in prompts):
            return
        prompts = prompts[: len(older) + 20]  # enough to fill a step
    raise AssertionError(f"{need} tokens were not computed within {bound} steps")
