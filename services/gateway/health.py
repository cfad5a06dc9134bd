"""What a gateway needs in order to serve, and what of it is there."""

from dataclasses import dataclass

from services.gateway.answer_bodies import HealthPage, ModelsHealth

FRESH_S = 15.0
"""Registry and planner count as there for so long after they were heard. A gateway asks the
registry every 5 s; the planner speaks every second, if there is a model."""


@dataclass(frozen=True, slots=True)
class Health:
    bus: bool
    """Whether the control bus is there, or was a moment ago."""
    registry_s: float
    """Seconds since the registry was last heard; infinite: never."""
    planner_s: float
    """The same of the planner."""
    models: int
    served: int
    """Models that an instance serves now."""
    draining: bool

    @property
    def serves(self) -> bool:
        """Whether a request could be answered now, by an instance or after the planner made one."""
        registered = self.registry_s < float("inf")
        return self.bus and registered and (self.served > 0 or self._planner)

    @property
    def page(self) -> HealthPage:
        parts = {"bus": self.bus, "registry": self._registry, "planner": self._planner}
        missing = ", ".join(name for name, there in parts.items() if not there)
        return HealthPage(
            status=self._status(missing),
            error=f"not there: {missing}" if missing else None,
            models=ModelsHealth(self.models, self.served),
            **parts,
        )

    def _status(self, missing: str) -> str:
        if not self.serves:
            return "unavailable"
        if self.draining:
            return "draining"
        return "degraded" if missing else "ok"

    @property
    def _registry(self) -> bool:
        return self.registry_s < FRESH_S

    @property
    def _planner(self) -> bool:
        # It has nothing to say while there is no model.
        return self.planner_s < (FRESH_S if self.models else float("inf"))
