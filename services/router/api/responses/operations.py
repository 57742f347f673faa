"""What clients of both APIs do with stored responses. A tenant's ids name nothing for another tenant."""

from __future__ import annotations

from collections.abc import Sequence

from libs.common import api_bounds
from services.router.api.json_body import Json
from services.router.api.responses.background import BackgroundResponses
from services.router.api.responses.request import EarlierItems, ResponseDraft
from services.router.api.responses.stored.store import ResponseStore
from slipstream import errors


class ResponseOperations:
    """The operations. `store` None: nothing is stored. `background` None: nothing runs without a client."""

    def __init__(self, store: ResponseStore | None, background: BackgroundResponses | None) -> None:
        self.store = store
        self._background = background

    @property
    def opened(self) -> ResponseStore:
        """The store. Raises FailedPrecondition without a database."""
        if self.store is None:
            raise _no_database()
        return self.store

    @property
    def background(self) -> BackgroundResponses:
        """The responses in the background. Raises FailedPrecondition without a database."""
        if self._background is None:
            raise _no_database()
        return self._background

    async def earlier_items(self, tenant: str, draft: ResponseDraft) -> EarlierItems:
        """The items that a request goes on with or refers to.

        Raises NotFound naming the first id that is unknown, and InvalidArgument for a response that cannot be
        continued, and for what needs a database where there is none.
        """
        needs_store = draft.wants_store is True or draft.previous_id is not None or draft.references
        if self.store is None:
            if needs_store:
                raise api_bounds.NO_STORE.refused(_reason(draft))
            return EarlierItems()
        if draft.previous_id is not None and self._background is not None:
            await self._background.check_continued(tenant, draft.previous_id)
        return await self.store.earlier_items(tenant, draft)

    async def find(self, tenant: str, response_id: str) -> Json | bytes:
        """A response: as JSON where it is stored, else as an object. Raises NotFound, InvalidArgument."""
        _check_given(response_id)
        if self._background is not None:
            found = await self._background.find(tenant, response_id)
            if found is not None:
                return found
        return await self.opened.find_body(tenant, response_id)

    async def input_items(self, tenant: str, response_id: str) -> Sequence[Json]:
        """All items of a response's input. Raises NotFound, InvalidArgument."""
        _check_given(response_id)
        if self._background is not None:
            items = await self._background.input_items(tenant, response_id)
            if items is not None:
                return items
        return await self.opened.find_items(tenant, response_id)

    async def cancel(self, tenant: str, response_id: str) -> Json | bytes:
        """End a response in the background; as it is then. Raises NotFound, InvalidArgument for others."""
        _check_given(response_id)
        await self.background.cancel(tenant, response_id)
        return await self.find(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response. Raises NotFound, and InvalidArgument for one that still runs."""
        _check_given(response_id)
        had_job = self._background is not None and await self._background.delete(tenant, response_id)
        try:
            await self.opened.delete(tenant, response_id)
        except errors.NotFound:
            if not had_job:  # one that was cancelled or failed has no answer
                raise


def _check_given(response_id: str) -> None:
    if not response_id:
        raise errors.InvalidArgument("response_id", "must be given")


def _no_database() -> errors.FailedPrecondition:
    return errors.FailedPrecondition("this router has no --database, which stored responses need")


def _reason(draft: ResponseDraft) -> str:
    """The field that needs the database."""
    if draft.wants_store is True:
        return "store"
    return "input" if draft.previous_id is None else "previous_response_id"
