"""The models that can be asked for now, for all calls; and the calls that list them."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from aiohttp import web

from services.gateway.answer_bodies import ModelCard, ModelList
from services.gateway.api_error import ApiError, of_error
from services.gateway.catalog import Catalog, Lingo, Sight
from services.gateway.frontend import NO_BUS
from services.gateway.http import sending
from services.gateway.http.call import Call
from services.gateway.http.outer import CALLER
from services.gateway.keyring import Keyring
from shared.errors import BusError, ModelError, NotFound
from shared.ids import ModelName
from shared.messages.pool import ModelRecord

Found = TypeVar("Found")
VECTORS = "feature-extraction"
"""The task of an encoder on the Hugging Face Hub."""


class ServedModels:
    def __init__(
        self,
        catalog: Catalog,
        keyring: Keyring,
        connected: Callable[[], bool],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`connected`: whether the control bus is there, or was a moment ago."""
        self.draining = False
        """Whether nothing new is accepted any more."""
        self.connected = connected
        self._catalog = catalog
        self._keyring = keyring
        self._log = log

    def calls(self) -> list[Call]:
        one = "/v1/models/{name:.+}"
        return [
            Call("GET", "/v1/models", self._list, "list_models", "The models", ModelList),
            Call("GET", one, self._show, "get_model", "A model", ModelCard, names_model=True),
        ]

    def check_ready(self) -> None:
        if self.draining:
            raise ApiError(503, "the gateway is stopping", retry_after=1)
        if not self.connected():
            raise of_error(BusError(NO_BUS))
        if not (self._catalog.known and self._keyring.known):
            message = "the gateway is starting: the registry has not answered yet"
            raise ApiError(503, message, retry_after=1)

    def record(self, request: web.Request, name: str) -> ModelRecord:
        """The model of this name, if there is one that the request's sender may use. ApiError 404
        if not: who may not use a model need not learn that it is there."""
        self.check_ready()
        record = self._catalog.records.get(ModelName(name))
        if record is None or not request[CALLER].may_use(record.name):
            raise of_error(NotFound(f"there is no model {name!r}; GET /v1/models lists them"))
        return record

    async def lingo(self, record: ModelRecord) -> Lingo:
        return await self._loaded(record, self._catalog.lingo)

    async def writer(self, record: ModelRecord) -> Lingo:
        return await self._loaded(record, self._catalog.writer)

    async def sight(self, record: ModelRecord) -> Sight:
        return await self._loaded(record, self._catalog.sight)

    async def _loaded(
        self, record: ModelRecord, load: Callable[[ModelRecord], Awaitable[Found]]
    ) -> Found:
        try:
            return await load(record)
        except (ModelError, NotFound, BusError) as error:
            self._log.warning("model's files not loaded", model=record.name, error=str(error))
            message = f"model {record.name!r} can't be served now: {error}"
            raise ApiError(503, message, code=error.code, retry_after=1) from error

    async def _list(self, request: web.Request) -> web.Response:
        self.check_ready()
        names = filter(request[CALLER].may_use, sorted(self._catalog.records))
        records = [self._catalog.records[name] for name in names]
        return sending.as_json(ModelList(data=[self._card(r) for r in records]))

    async def _show(self, request: web.Request) -> web.Response:
        return sending.as_json(self._card(self.record(request, request.match_info["name"])))

    def _card(self, record: ModelRecord) -> ModelCard:
        return ModelCard(
            id=record.name,
            created=record.created_ns // 1_000_000_000,
            root=record.model_id,
            parent=self._catalog.base(record).name if record.base else None,
            max_model_len=record.context_length,
            task=VECTORS if record.embeds else record.task.value,
        )
