"""Checks, for tests, that the parts of the dispatch core's state agree where they overlap."""

from collections.abc import Iterable, Iterator
from math import isclose

from services.gateway.core.ledger import Ledger
from services.gateway.core.model import Model
from services.gateway.core.requests import Request, State
from services.gateway.core.routes import Node, Route
from shared.ids import RequestId

RUNNING = (State.SUBMITTED, State.STREAMING, State.MOVING)


def faults(models: Iterable[Model], ledger: Ledger) -> Iterator[str]:
    """The contradictions found, in words."""
    if ledger.out:
        yield f"{len(ledger.out)} commands were not handed out"
    places: dict[RequestId, list[str]] = {key: [] for key in ledger.requests}
    for model in models:
        for request in model.queue:
            yield from _of_queued(request, model)
            places.setdefault(request.id, []).append("the queue")
        for route in model.table.routes.values():
            yield from _of_route(route)
            for request in route.requests.values():
                places.setdefault(request.id, []).append(route.instance.id)
        yield from _of_nodes(model)
        yield from _of_open(model)
    for key, found in places.items():
        if key not in ledger.requests:
            yield f"request {key} has ended and is in {' and '.join(found)}"
        elif len(found) != (1 if ledger.requests[key].move is None else 2):
            yield f"request {key} is in {' and '.join(found) or 'no place'}"


def _of_queued(request: Request, model: Model) -> Iterator[str]:
    if request.state is not State.QUEUED or request.instance is not None:
        yield f"request {request.id} waits and is {request.state.value} on {request.instance}"
    if request.charge or request.prefill:
        yield f"request {request.id} waits and counts as work"
    if request.model_id != model.id:
        yield f"request {request.id} waits for another model"
    if request.in_doubt and not request.suspect:
        yield f"request {request.id} waits to be judged and is no suspect"


def _of_route(route: Route) -> Iterator[str]:
    requests, name = route.requests.values(), route.instance.id
    tokens = prompts = 0
    for request in requests:
        move = request.move
        if (move is not None) != (request.state is State.MOVING):
            yield f"request {request.id} is {request.state.value} and its move is {move}"
        if move is not None and move.instance == name:
            tokens, prompts = tokens + move.charge, prompts + move.prefill
            continue
        tokens, prompts = tokens + request.charge, prompts + request.prefill
        if request.state not in RUNNING or request.instance != name:
            where = f"{request.state.value} on {request.instance}"
            yield f"request {request.id} runs on {name} and is {where}"
        if request.charge <= 0 or (request.state is State.STREAMING and request.prefill):
            yield f"request {request.id} counts as {request.charge} and {request.prefill} tokens"
    if route.tokens != tokens:
        yield f"instance {name} counts {route.tokens} tokens, which its requests have not"
    if route.prompts != prompts:
        yield f"instance {name} counts prompts of {route.prompts}, which its requests have not"


def _of_open(model: Model) -> Iterator[str]:
    there = model.table.open
    routes = model.table.routes.values()
    tokens = sum(route.tokens + route.others.tokens for route in routes)
    if model.table.total.tokens != tokens:
        yield f"model {model.name} counts {model.table.total.tokens} tokens, it has {tokens}"
    if any(route.place_in_open != at for at, route in enumerate(there)):
        yield f"the instances of model {model.name} with room are not where they say"
    room = {key for key, route in model.table.routes.items() if route.has_room}
    if {route.instance.id for route in there} != room:
        yield f"instances of model {model.name} have room: {room}, which others are kept"


def _of_nodes(model: Model) -> Iterator[str]:
    found: dict[Node, list[float]] = {}
    """For each node: prompts, sequences on its replica, slots' worth of sequences on paths, and
    suspects that are tried there."""
    for route in model.table.routes.values():
        suspects = sum([request.suspect for request in route.requests.values()])
        requests = len(route.requests) + route.others.requests
        for place in route.places:
            sums = found.setdefault(place.node, [0.0, 0.0, 0.0, 0.0])
            sums[0] += place.share * route.prompts
            sums[3] += suspects
            if len(route.places) == 1:
                sums[1] += requests
            else:
                sums[2] += place.weight * requests
    for node, sums in found.items():
        if node.suspects > 1:
            yield f"a node of model {model.name} tries {node.suspects} suspects at once"
        kept = [node.prompts, node.account.alone, node.account.on_paths, node.suspects]
        if kept != sums and not all(
            isclose(a, b, rel_tol=1e-6, abs_tol=1e-3) for a, b in zip(kept, sums, strict=True)
        ):
            yield f"a node of model {model.name} counts {kept}, its instances have {sums}"
