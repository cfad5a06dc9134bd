"""What peers may read of this node's models: what the capabilities that they show allow."""

from collections.abc import Callable

from services.node.moving.kv_images import KV_REGION
from services.node.moving.mover import block_of
from services.node.transport.base import Visitor
from shared import telemetry
from shared.capabilities import TOLERANCE_S, Claims, Signers
from shared.clock import wall_ns
from shared.errors import BadInput, ReadRefused
from shared.ids import ModelId

MAX_MODELS = 4096
"""The most models that one connection may show capabilities for."""


class CapabilityGate:
    def __init__(self, signers: Signers, clock: Callable[[], int] = wall_ns) -> None:
        """`clock`: the wall clock, in nanoseconds."""
        self._signers = signers
        self._clock = clock
        self._log = telemetry.logger("gate")

    def visitor(self, certified: str | None) -> Visitor:
        return _Reader(self, certified)

    def claims_of(self, data: bytes, certified: str | None) -> Claims:
        """What the capability says. ReadRefused: it is not good, for this peer or at all."""
        claims = self._signers.claims_of(data)
        if certified is not None and certified != claims.reader:
            raise ReadRefused(
                f"a capability for node {claims.reader}, shown by "
                + (f"node {certified}" if certified else "a peer whose certificate names no node")
            )
        self.check_time(claims)
        return claims

    def check_time(self, claims: Claims) -> None:
        late_s = (self._clock() - claims.until_ns) / 1e9
        if late_s > TOLERANCE_S:
            raise ReadRefused(
                f"a capability for model {claims.model} that ended {late_s:.0f} s ago by this "
                "node's clock"
            )

    def tell(self, error: ReadRefused) -> None:
        self._log.warning("a capability is refused", error=str(error))


class _Reader:
    def __init__(self, gate: CapabilityGate, certified: str | None) -> None:
        self._gate = gate
        self._certified = certified
        self._shown: dict[ModelId, Claims] = {}
        """The last good capability of each model."""
        self._refused = ""
        """What was wrong with the last one, if anything."""

    def show(self, data: bytes) -> None:
        try:
            claims = self._gate.claims_of(data, self._certified)
        except ReadRefused as error:
            self._refused = str(error)
            self._gate.tell(error)
            return
        self._refused = ""
        # Taken out first, so that the first of them is the one that was shown longest ago.
        self._shown.pop(claims.model, None)
        self._shown[claims.model] = claims
        if len(self._shown) > MAX_MODELS:
            del self._shown[next(iter(self._shown))]

    def check(self, region: str) -> None:
        if region.startswith(KV_REGION):
            return  # its name is known only to those who may read it
        try:
            model, block = block_of(region)
        except BadInput as error:
            raise ReadRefused(str(error)) from error
        claims = self._shown.get(model)
        if claims is None:
            raise ReadRefused(
                f"region {region} takes a capability"
                + (f": {self._refused}" if self._refused else "")
            )
        if not claims.cover(block):
            raise ReadRefused(f"the capability for model {model} is not for block {block}")
        self._gate.check_time(claims)
