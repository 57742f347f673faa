"""YaRN against transformers, against a reference in plain Python, and the configurations it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from libs.engine.model_spec.config import ModelConfig, parse_config
from libs.engine.model_spec.rope import Rope
from slipstream.errors import InvalidArgument
from tests.engine.model.release_configs import KIMI_K25, MOONLIGHT, YARN

DIM, THETA = 64, 50000.0


def config_with(yarn: dict[str, Any], key: str = "rope_scaling") -> ModelConfig:
    return parse_config({name: v for name, v in MOONLIGHT.items() if name != "rope_scaling"} | {key: yarn})


def reference_frequencies(yarn: dict[str, Any]) -> list[float]:
    """The paper's formula (Peng et al. 2023, section 3.2), one frequency at a time."""

    def pair(rotations: float) -> float:
        length = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return DIM * math.log(length) / (2 * math.log(THETA))

    low, high = pair(yarn.get("beta_fast", 32)), pair(yarn.get("beta_slow", 1))
    if yarn.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    high = high + 0.001 if low == high else high
    result = []
    for i in range(DIM // 2):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        plain = THETA ** (-2 * i / DIM)
        result.append(plain / yarn["factor"] * ramp + plain * (1 - ramp))
    return result


YARNS = st.fixed_dictionaries(
    {
        "type": st.just("yarn"),
        "factor": st.floats(1.0, 200.0),
        "original_max_position_embeddings": st.integers(64, 65536),
    },
    optional={
        "beta_fast": st.floats(1.0, 64.0),
        "beta_slow": st.floats(0.1, 1.0),
        "mscale": st.sampled_from([0.0, 0.5, 0.707, 1.0]),
        "mscale_all_dim": st.sampled_from([0.0, 0.5, 0.707, 1.0]),
        "attention_factor": st.one_of(st.none(), st.floats(0.1, 4.0)),
        "truncate": st.booleans(),
    },
)


@given(YARNS)
def test_frequencies_and_temperatures_are_those_of_transformers(yarn: dict[str, Any]) -> None:
    # Loaded where it is used: each process that collects the tests would load it, for seconds.
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = config_with(yarn)
    except InvalidArgument as error:
        assume(error.field != "rope_scaling.mscale")  # ambiguous; see below
        raise
    rope = Rope(config)
    torch.testing.assert_close(rope.inv_freq, torch.tensor(reference_frequencies(yarn)), rtol=1e-4, atol=0)
    stated = {key: value for key, value in yarn.items() if key != "type"}
    peer = DeepseekV3Config(
        qk_rope_head_dim=DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "yarn", "rope_theta": THETA, **stated},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](peer, torch.device("cpu"))
    torch.testing.assert_close(rope.inv_freq, frequencies, rtol=1e-5, atol=0)
    cosines = rope.cos_sin(torch.tensor([0]))[0, 0]
    torch.testing.assert_close(cosines, torch.full((DIM // 2,), float(factor)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("change", [{"attention_factor": 2.0}, {"truncate": False}])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_attention_factor_and_truncate_count(change: dict[str, Any], key: str) -> None:
    before, after = (Rope(config_with(YARN | extra, key)) for extra in ({}, change))
    positions = torch.tensor([0, 100, 5000])
    assert not torch.allclose(before.cos_sin(positions), after.cos_sin(positions), atol=1e-3)


def test_the_softmax_scale_follows_mscale_all_dim_alone() -> None:
    assert config_with(YARN | {"attention_factor": 2.0}).softmax_scale == config_with(YARN).softmax_scale
    temperature = 0.1 * math.log(64) + 1
    assert parse_config(KIMI_K25).softmax_scale == pytest.approx(192**-0.5 * temperature**2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"factor": None}, "factor"),
        ({"factor": 0}, "factor"),
        ({"factor": 0.5}, "factor"),
        ({"factor": "64"}, "factor"),
        ({"factor": ...}, "factor"),
        ({"attention_factor": 0}, "attention_factor"),
        ({"attention_factor": -1.0}, "attention_factor"),
        ({"attention_factor": True}, "attention_factor"),
        ({"truncate": 0}, "truncate"),
        ({"beta_fast": 0}, "beta_fast"),
        ({"beta_slow": -1}, "beta_slow"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"low_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "default"}, "rope_type"),
        ({"rope_type": "longrope"}, "rope_type"),
        ({"type": ["yarn"]}, "type"),
        ({"rope_theta": 10000.0}, "rope_theta"),
        # DeepSeek's code divides mscale(1) by mscale(1) here; transformers does not divide.
        ({"mscale": None}, "mscale"),
        ({"mscale": 0.707, "mscale_all_dim": None}, "mscale"),
    ],
)
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_unusable_yarn_is_refused_by_name(change: dict[str, Any], key: str, section: str) -> None:
    yarn = {name: value for name, value in (YARN | change).items() if value is not ...}
    with pytest.raises(InvalidArgument) as caught:
        config_with(yarn, section)
    assert caught.value.field == f"{section}.{key}"


def test_an_ambiguous_mscale_is_settled_by_attention_factor() -> None:
    config = config_with(YARN | {"mscale": None, "attention_factor": 1.25})
    assert config.yarn is not None
    assert config.yarn.attention_factor == 1.25


def test_keys_of_yarn_without_yarn_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="unknown key") as caught:
        config_with({"rope_type": "default", "factor": 40.0})
    assert caught.value.field == "rope_scaling.factor"
