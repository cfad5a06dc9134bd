"""Classification of images."""

from aiohttp import web

from services.gateway import answer_bodies, classify
from services.gateway.books import Books, Tab
from services.gateway.connections import Connections
from services.gateway.frontend import Frontend
from services.gateway.generation import Generation
from services.gateway.http import sending
from services.gateway.http.call import Call
from services.gateway.http.models import ServedModels
from services.gateway.http.outer import CALLER, ID, SPAN
from services.gateway.images import ImageDecoder
from services.gateway.metrics import Metrics


class Classification:
    def __init__(
        self,
        max_image: int,
        connections: Connections,
        books: Books,
        models: ServedModels,
        frontend: Frontend,
        metrics: Metrics,
    ) -> None:
        """`max_image`: the most bytes of a body."""
        self._max_image = max_image
        self._connections = connections
        self._books = books
        self._models = models
        self._frontend = frontend
        self._metrics = metrics
        self._decoder = ImageDecoder()

    def calls(self) -> list[Call]:
        return [
            Call(
                "POST",
                "/v1/classify",
                self._classify,
                "classify",
                "The most probable classes of an image",
                answer_bodies.Classification,
                body=classify.ClassifyBody,
                form=classify.ClassifyForm,
                names_model=True,
                generates=True,
            )
        ]

    def close(self) -> None:
        self._decoder.close()

    async def _classify(self, request: web.Request) -> web.Response:
        async with self._connections.arriving():
            body = await classify.read(request.clone(client_max_size=self._max_image))
        record = self._models.record(request, body.model)
        sight = await self._models.sight(record)
        pixels = await self._decoder.pixels(body.image, sight.input)
        choice = classify.choice_of(body, pixels, sight, record, request[ID])
        tab = Tab(self._books, request[CALLER])
        generation = Generation(
            self._frontend,
            self._metrics,
            record,
            [choice],
            record.context_length,
            request[SPAN],
            tab,
        )
        async with generation:
            async for _ in generation.deltas(None):
                pass
        return sending.as_json(classify.answer(request[ID], generation, choice, sight))
