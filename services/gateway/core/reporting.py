"""What the next load report of a gateway says, and whether there is news (`messages/load`)."""

from collections.abc import Iterable
from math import inf

import msgspec

from shared.ids import GatewayId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad

NEWS = 1 / 8
"""Outstanding tokens fall with every step. That is news when it is more than this share."""


class Reporting:
    def __init__(self, whole_s: float, seq: int = 0) -> None:
        """`whole_s`: seconds between whole reports. `seq`: see `GatewayLoad.seq`."""
        self._whole_s = whole_s
        self._whole_at = -inf
        self._seq = seq
        self._said: dict[ModelName, ModelLoad] = {}
        """What was said last of each model."""

    def next(
        self, gateway: GatewayId, url: str, loads: Iterable[ModelLoad], now: float, zero_ns: int = 0
    ) -> GatewayLoad | None:
        """`loads`: of every model that the gateway takes requests for. `zero_ns`: what its clock
        showed at time 0. None: there is no news."""
        loads = tuple(loads)
        whole = now - self._whole_at >= self._whole_s
        told = tuple(
            load
            for load in loads
            if (whole and (load.in_use or load.kept_out))
            or _is_news(self._said.get(load.model), load)
        )
        if not whole and not told:
            return None
        if whole:
            self._whole_at, self._said = now, {}
        self._said.update((load.model, load) for load in (loads if whole else told))
        self._seq += 1
        return GatewayLoad(
            gateway=gateway,
            url=url,
            seq=self._seq,
            sent_ns=zero_ns + round(now * 1e9),
            whole=whole,
            models=told,
            listed=tuple(load.model for load in loads) if whole else (),
            takes_changes=True,
        )


def _is_news(said: ModelLoad | None, load: ModelLoad) -> bool:
    if said is None:
        return load.in_use or bool(load.kept_out) or load.asked_requests > 0
    drift = abs(load.running_tokens - said.running_tokens)
    same_tokens = msgspec.structs.replace(load, running_tokens=said.running_tokens)
    return drift > NEWS * said.running_tokens or same_tokens != said
