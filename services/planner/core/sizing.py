"""Decides how many replicas one model needs, from what the cluster knows of its load (`scaling` has
the rule)."""

from services.planner.core.desk import Desk
from services.planner.core.scaling import Decision, Policy, Scaler, fulls, wanted
from shared.messages.pool import ModelRecord

SPARE_S = 1.0
"""Seconds after which replicas that the load does not fill may give way to other models."""


class Sizing:
    def __init__(self, desk: Desk) -> None:
        self.wants = 0
        """How many replicas the model should have at least, as of the last decision, whatever room
        there is."""
        self.spare_at: float | None = None
        """When replicas that the load does not fill may give way; None: there are none."""
        self._desk = desk
        self._scaler = Scaler()

    @property
    def surplus(self) -> bool:
        """Whether there were more replicas than wanted at the last decision."""
        return self._scaler.surplus_since is not None

    def decide(
        self, record: ModelRecord, *, have: int, coming: int, leaving: int, speed: float
    ) -> Decision:
        """See `scaling.decide`. `speed`: the mean speed of the replicas."""
        demand = self._desk.cluster.loads.demand(record.name)
        policy = self._policy(record, speed)
        self._scaler, decision = self._desk.settings.decide(
            self._scaler,
            demand,
            policy,
            have=have,
            coming=coming,
            leaving=leaving,
            now=self._desk.at,
        )
        self.wants = wanted(fulls(demand, policy), policy)
        surplus_since = self._scaler.surplus_since
        self.spare_at = None if surplus_since is None else surplus_since + SPARE_S
        if self.spare_at is not None and self._desk.at < self.spare_at:
            self.wants = have
        elif decision.replicas > have + coming:
            self.wants = decision.replicas
        return decision

    def _policy(self, record: ModelRecord, speed: float) -> Policy:
        cluster, settings = self._desk.cluster, self._desk.settings
        nodes = len(cluster.nodes)
        return Policy(
            min_instances=record.min_instances,
            max_instances=min(record.max_instances or nodes, nodes),
            slots=cluster.slots,
            kv_tokens=cluster.measured.kv_tokens(record.model_id),
            queue_per_instance=settings.queue_per_instance,
            prefill_wait_s=settings.prefill_wait_s,
            prefill_s_per_token=cluster.measured.prefill_s_per_token(record.model_id) / speed,
            scale_up_hold_s=settings.scale_up_hold_s,
            horizon_s=settings.horizon_s,
            idle_s=settings.idle_s if record.keep_alive_s is None else record.keep_alive_s,
            fixed=self._desk.archive.fixed.get(record.model_id),
        )
