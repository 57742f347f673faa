"""Parsing of requests: each invalid field is refused by its name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import MAX_SALT_BYTES, SharedPrefix, chain_hashes
from libs.common.cluster.fingerprint import Fingerprint
from libs.engine.kv.cache import KV_DTYPES
from libs.worker.requests.request_spec import (
    check_fingerprint,
    pack_tokens,
    parse_block_hashes,
    parse_sampling,
    parse_tokens,
)
from slipstream.block_hashes import pack_hashes
from slipstream.errors import FingerprintMismatch, InvalidArgument
from slipstream.sampling import SAMPLING_DEFAULTS, OutputConstraint
from slipstream.v1 import common_pb2

ROOT = bytes(16)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_round_trip(tokens: list[int]) -> None:
    assert parse_tokens(pack_tokens(tokens), "prompt").tolist() == tokens


def test_packed_tokens_of_an_odd_length_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        parse_tokens(b"abcde", "prompt")


def test_a_fingerprint_mismatch_names_the_differing_fields() -> None:
    own = Fingerprint("m", "t", "k", "float32", 64)
    check_fingerprint(own, own.to_proto(), of="the request")
    other = Fingerprint("m2", "t", "k", "bfloat16", 64)
    with pytest.raises(FingerprintMismatch, match="the ticket differs in digest, model, kv_dtype"):
        check_fingerprint(own, other.to_proto(), of="the ticket")
    with pytest.raises(FingerprintMismatch):
        check_fingerprint(own, common_pb2.Fingerprint(), of="the request")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("sent", [common_pb2.KV_DTYPE_UNSPECIFIED, 99])
def test_a_type_of_kv_from_a_later_contract_matches_none(name: str, sent: int) -> None:
    own = Fingerprint("m", "t", "k", name, 64)
    other = own.to_proto()
    check_fingerprint(own, common_pb2.Fingerprint.FromString(other.SerializeToString()), of="the ticket")
    other.kv_dtype = sent  # type: ignore[assignment]
    # The digest alone is not trusted: it equals this worker's, and the field does not.
    with pytest.raises(FingerprintMismatch, match=r"the ticket differs in kv_dtype$"):
        check_fingerprint(own, common_pb2.Fingerprint.FromString(other.SerializeToString()), of="the ticket")


def test_every_type_of_the_cache_is_one_of_the_contract() -> None:
    sent = {name: Fingerprint("m", "t", "k", name, 64).to_proto().kv_dtype for name in KV_DTYPES}
    assert sorted(sent.values()) == sorted(filter(None, common_pb2.KvDtype.values()))
    assert sent["float32"] == common_pb2.KV_DTYPE_FLOAT32
    with pytest.raises(KeyError, match="int8"):
        Fingerprint("m", "t", "k", "int8", 64).to_proto()


def test_the_digest_of_a_fingerprint_has_the_name_of_the_kv_type() -> None:
    # Blocks on disks are named by it: it must not change with the contract.
    assert Fingerprint("m", "t", "k", "float32", 64).digest.hex() == "7f8aebdb889ebeb0553451acbf21b726"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.lists(st.integers(0, 9), max_size=10))
def test_hashes_cover_emitted_tokens_too(prompt: list[int], emitted: list[int]) -> None:
    given_ = chain_hashes(prompt, root=ROOT, salt=b"s", block_tokens=4)
    got = parse_block_hashes(
        pack_hashes(given_),
        np.asarray(prompt, "<u4"),
        emitted=emitted,
        root=ROOT,
        salt=b"s",
        block_tokens=4,
    )
    assert list(got) == chain_hashes([*prompt, *emitted], root=ROOT, salt=b"s", block_tokens=4)


@pytest.mark.parametrize(
    ("hashes", "salt", "field"),
    [
        (bytes(16), b"", "block_hashes"),
        (b"", b"", "block_hashes"),
        (bytes(15), b"", "block_hashes"),
        (pack_hashes(chain_hashes(range(4), root=ROOT, salt=b"other", block_tokens=4)), b"", "block_hashes"),
        (b"", bytes(MAX_SALT_BYTES + 1), "salt"),
        (b"", bytes(MAX_SALT_BYTES), "block_hashes"),
    ],
)
def test_wrong_hashes_are_refused(hashes: bytes, salt: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_block_hashes(hashes, np.arange(4, dtype="<u4"), root=ROOT, salt=salt, block_tokens=4)
    assert caught.value.field == field


@pytest.mark.parametrize("emitted", [[], [7] * 6])
def test_a_shared_prefix_is_checked_as_all_hashes_are(emitted: list[int]) -> None:
    prompt, shared = list(range(14)), SharedPrefix(b"all", 2)
    given_ = chain_hashes(prompt, root=ROOT, salt=b"s", block_tokens=4, shared=shared)

    def parse(n_blocks: int, salt: bytes = b"all") -> list[bytes]:
        return list(
            parse_block_hashes(
                pack_hashes(given_),
                np.asarray(prompt, "<u4"),
                emitted=emitted,
                root=ROOT,
                salt=b"s",
                block_tokens=4,
                shared=SharedPrefix(salt, n_blocks),
            )
        )

    whole = chain_hashes([*prompt, *emitted], root=ROOT, salt=b"s", block_tokens=4, shared=shared)
    assert parse(2) == whole
    for n_blocks, salt, field in (
        (1, b"all", "block_hashes"),
        (3, b"all", "block_hashes"),
        (2, b"other", "block_hashes"),
        (4, b"all", "shared_blocks"),
        (2, bytes(65), "shared_salt"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            parse(n_blocks, salt)
        assert caught.value.field == field


GOOD: dict[str, Any] = {**SAMPLING_DEFAULTS, "max_tokens": 5}


def test_sampling_parameters_are_copied() -> None:
    parsed = parse_sampling(
        common_pb2.SamplingParams(
            **{**GOOD, "temperature": 0.5}, seed=2**64 - 1, logit_bias={3: 1.5}, top_logprobs=0
        )
    )
    assert (parsed.temperature, parsed.seed, parsed.logit_bias, parsed.logprobs) == (
        0.5,
        2**64 - 1,
        {3: 1.5},
        0,
    )
    assert parse_sampling(common_pb2.SamplingParams(**GOOD)).logprobs is None


def test_constraints_are_copied() -> None:
    stated = common_pb2.OutputConstraint(grammar="{}", thinking=True, forced=[3], field="f", is_closing=True)
    parsed = parse_sampling(common_pb2.SamplingParams(**GOOD, constraint=stated)).constraint
    assert parsed == OutputConstraint("{}", thinking=True, forced=(3,), field="f", is_closing=True)
    bare = common_pb2.OutputConstraint(grammar="{}")
    plain = parse_sampling(common_pb2.SamplingParams(**GOOD, constraint=bare)).constraint
    assert plain == OutputConstraint("{}", field="grammar")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", 50.0),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("top_logprobs", 21),
        ("stop_token_ids", list(range(1000))),
        ("logit_bias", {i: 1.0 for i in range(2000)}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_invalid_sampling_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_sampling(common_pb2.SamplingParams(**{**GOOD, field: value}))
    assert caught.value.field.startswith(field)
