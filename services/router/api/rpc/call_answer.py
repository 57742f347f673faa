"""The responses of a Generate call, made of the events of its answers, and the metadata beside them. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from libs.common.rpc.access import Metadata
from services.router.api.rpc.call_record import trailing_id
from services.router.api.rpc.generate_message import ParsedCall
from services.router.request.types import PromptInput
from slipstream.metering.money import amount_text
from slipstream.v1 import router_pb2

COST, CURRENCY = "x-slipstream-cost", "x-slipstream-currency"


class CallAnswer:
    """Puts the events of each answer into responses, the echoed prompt before its first piece.

    `prompt`: the text of the call's prompt, where the call asks for it; empty: it does not. `response_id`: by
    which the answer will be stored; empty: it is not.
    """

    def __init__(self, call: ParsedCall, *, response_id: str = "") -> None:
        self.prompt = ""
        self._response_id = response_id
        self._is_prompt_alone = call.requests[0].is_prompt_alone
        self._costs: list[router_pb2.Cost] = []

    def response(
        self, events: Sequence[router_pb2.GenerateEvent], index: int = 0
    ) -> router_pb2.GenerateResponse:
        """The events as one response. It is empty where the client gets none of them."""
        response = router_pb2.GenerateResponse()
        if events[-1].HasField("finished") and events[-1].finished.usage.HasField("cost"):
            self._costs.append(events[-1].finished.usage.cost)
        for event in self._shown(events) if self._is_prompt_alone else events:
            added = response.events.add()
            added.CopyFrom(event)  # `append` takes several times as long
            if index:
                kind = added.WhichOneof("kind")
                assert kind is not None
                getattr(added, kind).index = index
            if self._response_id and event.HasField("started"):
                added.started.response_id = self._response_id
            if self.prompt and event.HasField("started"):
                echo = response.events.add().delta
                echo.text, echo.index = self.prompt, index
        return response

    def metadata(
        self, request_id: str, limits: Mapping[str, str], *, others: Iterable[tuple[str, str]] = ()
    ) -> Metadata:
        """The call's trailing metadata: its id, the limits of its key, and what all answers cost."""
        found = [*trailing_id(request_id), *limits.items(), *others]
        if self._costs:
            amount = amount_text(sum([cost.amount_pico for cost in self._costs]))
            found += [(COST, amount), (CURRENCY, self._costs[0].currency)]
        return tuple(found)

    def _shown(self, events: Sequence[router_pb2.GenerateEvent]) -> Iterable[router_pb2.GenerateEvent]:
        """The events of an answer that is its prompt alone: not those of the token that computes it."""
        for event in events:
            if not event.HasField("delta"):
                yield event
            elif event.delta.prompt_logprobs:
                shown = router_pb2.GenerateEvent()
                shown.delta.prompt_logprobs.MergeFrom(event.delta.prompt_logprobs)
                yield shown


async def prompt_text(call: ParsedCall, text_of: Callable[[Sequence[int]], Awaitable[str]]) -> str:
    """The text of the call's prompt, which all its answers have; empty where the call asks for no echo.

    `text_of` decodes token ids.
    """
    if not call.echo:
        return ""
    source = call.requests[0].input
    assert isinstance(source, PromptInput)
    return source.prompt or await text_of(source.token_ids)
