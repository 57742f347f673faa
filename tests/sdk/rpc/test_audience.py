"""The audiences of tokens: one spelling for an endpoint, and what a server answers to."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rpc.audience import audience_of, server_audiences

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.ip_addresses(v=6).map(lambda address: f"[{address.exploded}]"),
    st.sampled_from(["localhost", "LocalHost", "0.0.0.0", "[::]", "node-7", "Router-0.slipstream.svc"]),
)
PORTS = st.integers(0, 65535)


@pytest.mark.parametrize(
    ("endpoint", "audience"),
    [
        ("127.0.0.1:7000", "127.0.0.1:7000"),
        ("127.0.0.1:07000", "127.0.0.1:7000"),
        ("localhost:7000", "127.0.0.1:7000"),
        ("0.0.0.0:7000", "127.0.0.1:7000"),
        ("[::]:7000", "[::1]:7000"),
        ("[0:0:0:0:0:0:0:1]:7000", "[::1]:7000"),
        ("Router.Svc:7000", "router.svc:7000"),
        ("127.0.0.2:7000", "127.0.0.2:7000"),
        ("127.1:7000", "127.1:7000"),  # a resolver reads it as 127.0.0.1; as an audience it is another name
        ("127.0.0.1", ""),
        ("127.0.0.1:70000", ""),
        (":7000", ""),
        ("a b:1", ""),
        ("dns://8.8.8.8/router:7000", ""),
        ("ipv4:127.0.0.1:7000", ""),
        ("unix:/tmp/socket", ""),
        ("127.0.0.1:７０００", ""),
        ("", ""),
    ],
)
def test_an_endpoint_has_one_spelling(endpoint: str, audience: str) -> None:
    assert audience_of(endpoint) == audience


@given(HOSTS, PORTS)
def test_the_spelling_is_stable_and_fits_into_metadata(host: str, port: int) -> None:
    audience = audience_of(f"{host}:{port}")
    assert audience and audience_of(audience) == audience
    assert audience.isascii() and audience.isprintable() and " " not in audience


@given(st.ip_addresses(), PORTS, st.ip_addresses(), PORTS)
def test_two_addresses_have_one_audience_only_where_both_are_this_machine(
    one: object, port: int, other: object, other_port: int
) -> None:
    """The audience and the endpoint lead to the same server."""
    first, second = (f"[{host}]" if ":" in str(host) else str(host) for host in (one, other))
    if audience_of(f"{first}:{port}") == audience_of(f"{second}:{other_port}"):
        own = {"0.0.0.0", "127.0.0.1", "[::]", "[::1]"}
        assert port == other_port and (first == second or {first, second} <= own)


@given(st.text(max_size=40))
def test_any_text_has_an_audience_without_an_error(text: str) -> None:
    assert isinstance(audience_of(text), str)


@pytest.mark.parametrize(
    ("bound", "names", "audiences"),
    [
        ("127.0.0.1:7000", [], {"127.0.0.1:7000"}),
        ("127.0.0.1:7000", ["", "10.0.0.5:7000"], {"127.0.0.1:7000", "10.0.0.5:7000"}),
        # The wildcard stands for every machine: a server with a name answers to that name alone.
        ("0.0.0.0:7000", ["0.0.0.0:7000", "10.0.0.5:7000"], {"10.0.0.5:7000"}),
        ("[::]:7000", ["prefill-0.svc:7000", "localhost:7000"], {"prefill-0.svc:7000", "127.0.0.1:7000"}),
        ("0.0.0.0:7000", ["0.0.0.0:7000"], {"127.0.0.1:7000"}),
        ("[::]:7000", [""], {"[::1]:7000"}),
        ("10.0.0.5:7000", ["no endpoint"], {"10.0.0.5:7000"}),
    ],
)
def test_a_server_answers_to_its_names(bound: str, names: list[str], audiences: set[str]) -> None:
    assert server_audiences(bound, names) == audiences


def test_localhost_is_not_where_another_process_of_the_machine_listens() -> None:
    """A resolver may name ::1 first, where another user listens at the port of a server on 127.0.0.1."""
    assert audience_of("localhost:7000") == "127.0.0.1:7000"
    assert "[::1]:7000" not in server_audiences("127.0.0.1:7000")
    assert socket.inet_pton(socket.AF_INET, audience_of("localhost:7000").rpartition(":")[0])
