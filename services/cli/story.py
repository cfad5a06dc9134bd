"""`lambdascale events ID --story`: what each service did lately about ID, merged by time."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import msgspec

from services.local.asking import ask
from shared import subjects
from shared.bus.base import Bus, On
from shared.errors import BusError
from shared.ids import GatewayId
from shared.messages.load import GatewayLoad
from shared.messages.pool import Models, ModelsQuery
from shared.messages.scaling import PlannerQuery, PlannerState
from shared.messages.story import Step, StoryQuery, Told
from shared.pool_pages import read_nodes

LAST = "last"
GATEWAYS_S = 1.0
"""Each gateway reports its load within this time, even if nothing changes. Their reports are the
only list of the gateways that run."""


class ToldStep(msgspec.Struct, frozen=True):
    """One step of the merged story."""

    teller: str
    """The service that took the step: `planner`, `registry`, or the id of a node or a gateway."""
    step: Step


class Merged(msgspec.Struct, frozen=True):
    steps: tuple[ToldStep, ...]
    """The earliest first. The clocks of different hosts may differ by some milliseconds."""
    errors: tuple[str, ...]
    """Why services are missing from the story."""
    names: dict[str, str]
    """The name of each published model, by the id that steps call it by."""


async def gather(bus: Bus, subject: str) -> Merged:
    """Asks every service of the cluster about a subject.

    `subject` is an id, a model's name, or `last` for the newest scaling event.
    """
    errors: list[str] = []
    names: dict[str, str] = {}
    gateways = asyncio.create_task(_gateways(bus))
    try:
        tellers = {"planner": subjects.PLANNER_STORY, "registry": subjects.REGISTRY_STORY}
        try:
            models = await ask(bus, subjects.REGISTRY_MODELS, ModelsQuery(), Models)
            names = {record.model_id: record.name for record in models.records}
            subject = await _id_of(bus, subject, names)
            nodes = await read_nodes(partial(ask, bus))
            tellers |= {info.node: subjects.node_story(info.node) for info in nodes}
        except BusError as error:
            errors.append(str(error))
        tellers |= {gateway: subjects.gateway_story(gateway) for gateway in await gateways}
    finally:
        gateways.cancel()
    query = StoryQuery(subject=subject)
    answers = await asyncio.gather(
        *(_ask(bus, teller, topic, query, errors) for teller, topic in tellers.items())
    )
    steps = sorted((step for told in answers for step in told), key=lambda told: told.step.at_ns)
    return Merged(tuple(steps), tuple(dict.fromkeys(errors)), names)


async def _id_of(bus: Bus, subject: str, names: Mapping[str, str]) -> str:
    """The id that services know the subject by."""
    if subject == LAST:
        newest = await ask(bus, subjects.PLANNER_STATE, PlannerQuery(events=1), PlannerState)
        return newest.events[0].id if newest.events else subject
    return next((model_id for model_id, name in names.items() if name == subject), subject)


async def _gateways(bus: Bus) -> tuple[GatewayId, ...]:
    """The gateways that run, found by their load reports."""
    found: dict[GatewayId, None] = {}

    async def hear(load: GatewayLoad) -> None:
        found[load.gateway] = None

    subscription = await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
    await asyncio.sleep(GATEWAYS_S)
    await subscription.close()
    return tuple(found)


async def _ask(
    bus: Bus, teller: str, topic: str, query: StoryQuery, errors: list[str]
) -> tuple[ToldStep, ...]:
    try:
        told = await ask(bus, topic, query, Told)
    except BusError as error:
        errors.append(str(error))
        return ()
    return tuple(ToldStep(teller, step) for step in told.steps)


def lines(steps: Iterable[ToldStep], names: Mapping[str, str]) -> Iterator[str]:
    """Time of day, service, cause and text of each step, in columns. `names`: of models, by id."""
    steps = tuple(steps)
    teller_width = max((len(told.teller) for told in steps), default=0)
    cause_width = max((len(told.step.cause) for told in steps), default=0)
    for told in steps:
        step = told.step
        seconds, ms = divmod(step.at_ns // 1_000_000, 1000)
        at = time.strftime("%H:%M:%S", time.localtime(seconds))
        about = " ".join(names.get(each, each) for each in step.subjects if each != step.cause)
        columns = f"{told.teller:<{teller_width}}  {step.cause:<{cause_width}}"
        yield f"{at}.{ms:03}  {columns}  {about}: {step.text}"
