"""Prices: exact costs, a file that is followed, errors that name the field."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.runtime.followed_file import FollowedFile
from libs.common.service_bounds import MAX_PRICE_FILE_BYTES
from services.router.metering.price_list import PriceList, parse_prices, read_prices
from slipstream.metering.money import PICO, amount_number, amount_text, parse_amount

GOOD = 'currency = "USD"\n[[model]]\nname = "tiny"\ninput = 0.60\noutput = 3\n'
AMOUNTS = st.decimals(0, 10_000, places=6)


@given(AMOUNTS, AMOUNTS, AMOUNTS, st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_a_cost_is_the_exact_sum_of_its_tokens(
    fresh: Decimal, cached: Decimal, output: Decimal, n_fresh: int, n_cached: int, n_output: int
) -> None:
    text = (
        f'currency = "EUR"\n[[model]]\nname = "m"\ninput = {fresh:f}\ncached_input = {cached:f}\n'
        f"output = {output:f}\n"
    )
    price = parse_prices(text, source="f").models["m"]
    cost = price.cost_pico(
        prompt_tokens=n_fresh + n_cached, cached_tokens=n_cached, completion_tokens=n_output
    )
    exact = (fresh * n_fresh + cached * n_cached + output * n_output) / 10**6
    assert cost == exact * PICO
    assert Decimal(amount_text(cost)) == exact


@given(st.integers(0, 10**30))
def test_an_amount_is_read_as_it_is_written(pico: int) -> None:
    text = amount_text(pico)
    assert parse_amount(text, decimals=12) == pico
    assert "e" not in text.lower()


def test_amounts_read_as_people_write_them() -> None:
    assert [amount_text(pico) for pico in (0, 1, 5 * PICO, 5 * PICO // 2, -PICO)] == [
        "0",
        "0.000000000001",
        "5",
        "2.5",
        "-1",
    ]
    assert amount_number(123_456_789) == 0.000123456789


def test_cached_input_costs_as_much_as_input_where_it_is_left_out() -> None:
    price = parse_prices(GOOD, source="f").models["tiny"]
    assert price.cached_input_pico == price.input_pico == 600_000


def test_the_price_of_a_model_is_that_of_the_first_name_that_has_one() -> None:
    prices = parse_prices(GOOD + '[[model]]\nname = "b"\ninput = 1\noutput = 1\n', source="f")
    assert prices.of(("x", "b", "tiny")) is prices.models["b"]
    assert prices.of(("x",)) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "currency must be"),
        ("currency = 1", "currency must be"),
        ('currency = "USD"', "model must be tables"),
        (GOOD + "rate = 2", r"model\[0\]\.rate is no field"),
        ('when = "now"\n' + GOOD, "when is no field"),
        (GOOD.replace("3", "-3"), r"model\[0\]\.output must be a number from 0"),
        (GOOD.replace("3", '"x"'), r"model\[0\]\.output must be a number"),
        (GOOD.replace("3", "nan"), r"model\[0\]\.output must be a number"),
        (GOOD.replace("3", "true"), r"model\[0\]\.output must be a number"),
        (GOOD.replace("0.60", "0.0000001"), r"model\[0\]\.input must have at most 6 decimals"),
        (GOOD.replace("3", "1e99999999"), r"model\[0\]\.output must be a number from 0"),
        (GOOD.replace("3", "10001"), r"model\[0\]\.output must be at most 10000"),
        (GOOD.replace("output = 3", ""), r"model\[0\]\.output must be a number"),
        (GOOD.replace('"tiny"', '""'), r"model\[0\]\.name"),
        (GOOD + GOOD.partition("\n")[2], r"model\[1\]\.name repeats"),
        ("[[model]", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^prices: {said}"):
        parse_prices(text, source="prices")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    with pytest.raises(ValueError, match=r"prices\.toml: cannot be read"):
        read_prices(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_prices(path)
    path.write_bytes(b"#" * (MAX_PRICE_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="has more than"):
        read_prices(path)


async def test_a_new_file_counts_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    seen: list[PriceList] = []
    followed = FollowedFile(path, read_prices, seen.append, noun="prices")
    for text in (GOOD.replace("3", "4"), "broken = ["):
        replacement = tmp_path / "new"
        replacement.write_text(text)
        replacement.replace(path)
        await followed.poll()
    assert [prices.models["tiny"].output_pico for prices in seen] == [3_000_000, 4_000_000]
