"""The price file: what a million tokens cost, by model.

    currency = "USD"

    [[model]]
    name = "kimi-k2.5"
    input = 0.60
    cached_input = 0.10               # left out: as input
    output = 3.00

Messages of errors name the file, the model and the field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from libs.common.service_bounds import MAX_PRICE, MAX_PRICE_FILE_BYTES
from slipstream.credentials.bounded_file import read_bounded_text
from slipstream.metering.money import PICO, amount_text, parse_amount

_CURRENCY = re.compile(r"[A-Z]{3}")
_FIELDS = ("name", "input", "cached_input", "output")
_DECIMALS = 6
_MILLION = 10**6


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """The price of one token of each kind, in 10^-12 of the currency."""

    currency: str
    input_pico: int
    cached_input_pico: int
    output_pico: int

    def cost_pico(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The cost of so many tokens; `prompt_tokens` include the cached ones."""
        return (
            (prompt_tokens - cached_tokens) * self.input_pico
            + cached_tokens * self.cached_input_pico
            + completion_tokens * self.output_pico
        )

    def pricing(self) -> dict[str, str]:
        """The price of one token by the names that clients of OpenRouter read."""
        return {
            "currency": self.currency,
            "prompt": amount_text(self.input_pico),
            "input_cache_read": amount_text(self.cached_input_pico),
            "completion": amount_text(self.output_pico),
        }


@dataclass(frozen=True, slots=True)
class PriceList:
    """The prices of a file, by the name of the model."""

    source: str = ""
    models: Mapping[str, TokenPrice] = field(default_factory=dict)

    def of(self, names: Sequence[str]) -> TokenPrice | None:
        """The price of a model that has these names: that of the first name which the list has."""
        return next((self.models[name] for name in names if name in self.models), None)


def parse_prices(text: str, *, source: str) -> PriceList:
    """The prices of a file's text. Raises ValueError that begins with `source`."""
    try:
        document = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"{source}: is not TOML: {error}") from None
    currency, tables = document.get("currency"), document.get("model")
    if unknown := set(document) - {"currency", "model"}:
        raise ValueError(f"{source}: {min(unknown)} is no field; fields are currency and tables [[model]]")
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise ValueError(f'{source}: currency must be a code of three letters, as "USD"')
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{source}: model must be tables [[model]], at least one")
    prices: dict[str, TokenPrice] = {}
    for index, table in enumerate(tables):
        try:
            name, price = _price(table, currency)
            if name in prices:
                raise ValueError("name repeats that of an earlier model")
        except ValueError as error:
            raise ValueError(f"{source}: model[{index}].{error}") from None
        prices[name] = price
    return PriceList(source, prices)


def read_prices(path: Path) -> PriceList:
    """The prices of a file. Raises ValueError that names it."""
    return parse_prices(read_bounded_text(path, max_bytes=MAX_PRICE_FILE_BYTES), source=str(path))


def find_price(prices: PriceList, names: Sequence[str]) -> TokenPrice:
    """The price of a model that has these names. Raises ValueError without one."""
    price = prices.of(names)
    if price is None:
        raise ValueError(f"{prices.source}: has no price of the model {names[0]}")
    return price


def _price(table: Any, currency: str) -> tuple[str, TokenPrice]:
    """The name and the price of one table. Raises ValueError that begins with the field."""
    if not isinstance(table, Mapping):
        raise ValueError("name must be in a table [[model]]")
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("name must be the name of a model")
    if unknown := set(table) - set(_FIELDS):
        raise ValueError(f"{min(unknown)} is no field; fields are {', '.join(_FIELDS)}")
    per_token = {}
    for key in _FIELDS[1:]:
        given = table.get(key, table.get("input") if key == "cached_input" else None)
        try:
            per_million = parse_amount(given, decimals=_DECIMALS)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
        if per_million > MAX_PRICE * PICO:
            raise ValueError(f"{key} must be at most {MAX_PRICE} a million tokens")
        per_token[f"{key}_pico"] = per_million // _MILLION
    return name, TokenPrice(currency, **per_token)
