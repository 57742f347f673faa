"""Amounts of money: whole numbers of 10^-12 of a currency, so that sums are exact.

A price a million tokens with up to six decimals is a whole number of them a token.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction

PICO = 10**12  # of one unit of the currency
_DIGITS = 12
_MAX_DIGITS = 40


def parse_amount(value: object, *, decimals: int) -> int:
    """An amount in 10^-12 from a number or text with at most so many decimals. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, str, Decimal)):
        raise ValueError("must be a number")
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise ValueError("must be a number") from None
    if not amount.is_finite() or amount < 0 or abs(amount.adjusted()) > _MAX_DIGITS:
        raise ValueError("must be a number from 0")
    pico = Fraction(amount) * PICO
    if (pico * 10**decimals / PICO).denominator != 1:
        raise ValueError(f"must have at most {decimals} decimals")
    return int(pico)


def amount_text(pico: int) -> str:
    """An amount as a plain decimal number, without an exponent and without trailing zeros."""
    whole, rest = divmod(abs(pico), PICO)
    decimals = f"{rest:0{_DIGITS}d}".rstrip("0")
    sign = "-" if pico < 0 else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def amount_number(pico: int) -> float:
    """An amount as the nearest JSON number."""
    return pico / PICO


def pico_of(number: float) -> int:
    """The amount that `amount_number` made a JSON number of."""
    return round(number * PICO)


def sum_of_amounts(one: float, other: float) -> float:
    """The sum of two amounts that are JSON numbers, without what their fractions lack."""
    return amount_number(pico_of(one) + pico_of(other))
