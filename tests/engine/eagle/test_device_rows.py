"""Features that stay on a device reach its head as those that pass through the host do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine.kernels.gpu.interpreted  # noqa: F401  (before the programs)
from libs.engine.core.build import EngineOptions, build_engine, build_local_drafter
from libs.engine.core.engine import PagedEngine
from libs.engine.core.torch_model import TorchModel
from libs.engine.kv.sequence import FeatureRows
from libs.engine.step.device_rows import DeviceRows, FeatureArray, host_rows, join_rows
from libs.engine.step.draft_head import ContextRows, HeadRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, SamplingParams, SequenceSpec, StepOutput
from services.decode.local_speculation import LocalSpeculation
from services.decode.local_speculation import join_rows as join_pieces
from tests.engine.random_latent_head import RandomLatentHead, write_random_latent_head
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint

SHAPE = {"num_hidden_layers": 2, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1}
N_STEPS = 5


class Unread(DeviceRows):
    """Rows whose device must not be waited for."""

    __slots__ = ()

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        raise AssertionError("the host waits for features")


def test_local_drafts_do_not_depend_on_where_features_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of two chunks, then steps with drafts. On the device no row of them is read by the host."""
    monkeypatch.setattr("services.decode.draft_control.DEFAULT_CONFIDENCE", 0.0)  # a random head is unsure
    # 512 rows, a minute in the interpreter, which leave no context behind.
    monkeypatch.setattr("services.decode.local_speculation.warm_up_head", lambda head: None)
    (tmp_path / "head").mkdir()
    write_random_checkpoint(tmp_path, RandomCheckpoint(TINY_CONFIG | SHAPE, quantization="int4"))
    write_random_latent_head(tmp_path / "head", RandomLatentHead())
    wanted = run(build(tmp_path, on_device=False), tmp_path)
    assert any(output.proposed_drafts for output in wanted)
    assert kinds_of(wanted) == {False}
    monkeypatch.setattr("libs.engine.core.torch_model.DeviceRows", Unread)
    found = run(build(tmp_path, on_device=True), tmp_path)
    assert [(o.tokens, o.proposed_drafts, o.accepted_drafts) for o in found] == [
        (o.tokens, o.proposed_drafts, o.accepted_drafts) for o in wanted
    ]
    assert kinds_of(found) == {True}


def kinds_of(outputs: Sequence[StepOutput]) -> set[bool]:
    """Whether features of these outputs are on a device."""
    return {isinstance(output.features, DeviceRows) for output in outputs if output.features is not None}


def build(model_dir: Path, *, on_device: bool) -> PagedEngine:
    return build_engine(
        model_dir,
        EngineOptions(
            n_pages=8,
            kernels="triton",
            compute_dtype="float32",
            kv_dtype="float32",
            draft_model_dir=model_dir / "head",
            features_on_device=on_device,
            step_tokens=24,
            max_batch=4,
            max_draft_tokens=3,
        ),
    )


def run(engine: PagedEngine, model_dir: Path) -> list[StepOutput]:
    head = build_local_drafter(engine, model_dir / "head", model_dir)
    assert isinstance(engine.model, TorchModel) and head._head.device == engine.model.kernels.device
    speculation = LocalSpeculation(draft_tokens=3)
    speculation.load(head)
    prompt = np.random.default_rng(1).integers(0, 256, 40).astype(np.uint32)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.reserve(SequenceSpec(seq_id="s", prompt=prompt, sampling=sampling))
    engine.start("s")
    speculation.open("s")
    outputs = []
    for _ in range(N_STEPS):
        drafts = speculation.drafts()
        found = engine.step(drafts, features=True)
        speculation.stepped(found)
        outputs += found
    return outputs


class TestRows:
    @given(
        pieces=st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.booleans()), min_size=1, max_size=6)
    )
    def test_they_join_and_end_as_arrays_do(self, pieces: list[tuple[int, bool, bool]]) -> None:
        """Also beside rows of the host, which a reused prefix has; a gap begins again."""
        arrays, mixed, start = FeatureRows(), FeatureRows(), 0
        random = np.random.default_rng(0)
        for n, is_there, has_gap in pieces:
            rows = random.normal(size=(n, 3)).astype(np.float32)
            start += 7 * has_gap
            arrays.append(start, rows)
            mixed.append(start, DeviceRows(torch.from_numpy(rows)) if is_there else rows)
            start += n
        (first, wanted), (found_first, found) = arrays.pop(), mixed.pop()
        assert wanted is not None and found is not None and first == found_first
        assert len(wanted) == len(found) <= FEATURE_WINDOW_TOKENS and wanted.shape == found.shape
        assert wanted.nbytes == found.nbytes
        np.testing.assert_array_equal(host_rows(found), host_rows(wanted))

    def test_pieces_of_a_sequence_join_on_a_device_without_values(self) -> None:
        """The meta device has none: reading them, or a copy to the host, would raise."""

        def piece(start: int, n: int) -> HeadRows:
            rows = DeviceRows(torch.empty(n, 4, dtype=torch.bfloat16, device="meta"))
            return ContextRows("s", start, np.zeros(n, np.uint32), rows)

        joined = join_pieces([piece(0, 400), piece(400, 300)])
        assert len(joined.features) == FEATURE_WINDOW_TOKENS and joined.start_position == 188
        with pytest.raises((NotImplementedError, RuntimeError)):
            host_rows(joined.features)

    def test_one_part_is_not_copied(self) -> None:
        parts: Sequence[FeatureArray] = [DeviceRows(torch.zeros(2, 3)), np.zeros((2, 3), np.float32)]
        for part in parts:
            assert join_rows([part]) is part


def test_kept_rows_hold_no_memory_of_the_rows_before_them() -> None:
    kept = FeatureRows()
    kept.append(0, DeviceRows(torch.zeros(8_192, 3)))
    assert isinstance(kept.rows, DeviceRows)
    assert kept.rows.tensor.untyped_storage().nbytes() == kept.rows.nbytes == FEATURE_WINDOW_TOKENS * 3 * 4
