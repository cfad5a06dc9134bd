"""Asks where models have their copies."""

from services.local.asking import ask
from shared import subjects
from shared.bus.base import Bus
from shared.messages.copies import CopiesQuery, PoolCopies


async def copies(bus: Bus) -> PoolCopies:
    return await ask(bus, subjects.REGISTRY_COPIES, CopiesQuery(), PoolCopies)


def shortfalls(found: PoolCopies) -> dict[str, str]:
    """By model, what is missing of its durable copies, in words."""
    return {model.name: model.shortfall for model in found.models if model.shortfall}
