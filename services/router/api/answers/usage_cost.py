"""What an answer costs, as the usage of every API states it beside the tokens. Pure."""

from __future__ import annotations

from services.router.api.answers.answer_format import Json
from slipstream.metering.money import amount_number
from slipstream.v1 import router_pb2


def cost_fields(usage: router_pb2.Usage) -> Json:
    """`cost` in units of `currency`; nothing where the model has no price, or the cost is not known yet."""
    if not usage.HasField("cost"):
        return {}
    return {"cost": amount_number(usage.cost.amount_pico), "currency": usage.cost.currency}
