"""Decides how many replicas one model needs, from what the cluster knows of its load (`scaling` has
the rule)."""

from functools import partial

import msgspec

from services.planner.core.demand import Demand, Policy, fulls, steady, wanted, work_of
from services.planner.core.desk import Desk
from services.planner.core.fleet import Fleet
from services.planner.core.keeping import HOST_SHARE, Gaps, Idle
from services.planner.core.load_reports import Asked
from services.planner.core.objectives import FULL, Objectives, Supply, Work, batch, busy
from services.planner.core.rhythm import Rhythm
from services.planner.core.roles import Choice, prefillers
from services.planner.core.scaling import MANY, Decision, Scaler, unbounded
from services.planner.core.traffic import Arrivals, Traffic
from shared.ids import ModelId
from shared.messages.instances import InstanceState
from shared.messages.pool import PLANNERS_CHOICE, ModelRecord
from shared.messages.scaling import EventRecord
from shared.schedule import least

SPARE_S = 1.0
"""Seconds after which replicas that the load does not fill may give way to other models."""
START_S = 0.1
"""Seconds of an event before its first bytes move, and after its last."""
ABOUT = 1.15
"""Batches that differ by less than this factor are about the same."""
LEAD, LEAD_S = 1.2, 1.0
"""What a schedule asks for, or history lets expect, is begun earlier by this many times the time to
load, and a second, in which idle models are looked at once."""


class Sizing:
    def __init__(self, desk: Desk, model: ModelId) -> None:
        self.wants = 0
        """How many replicas the model should have at least, as of the last decision, whatever room
        there is."""
        self.unbounded = 0
        """The same, however many nodes there are."""
        self.most = 0
        """How many replicas the model may have, as of the last decision."""
        self.floor = 0
        """How many replicas it keeps even when idle, as of the last decision; without those that
        are expected to be needed."""
        self.warm = 0
        """How many sleeping copies are to be kept."""
        self.batch = 0
        """The most sequences that a replica may run at once, so that tokens come as fast as the
        objective says. 0: as many as it can."""
        self.spare_at: float | None = None
        """When replicas that the load does not fill may give way; None: there are none."""
        self._desk = desk
        self.prefill_share = 0.0
        """The share of the replicas that only prefill."""
        self._roles = Choice()
        self._scaler = Scaler()
        self._surplus_since: float | None = None
        self._traffic = Traffic()
        self._asked = Asked()
        known = desk.archive.histories.get(model)
        self._rhythm = Rhythm(known)
        self._gaps = Gaps(known.gaps if known is not None else ())

    @property
    def surplus(self) -> bool:
        """Whether there were more replicas than wanted at the last decision."""
        return self._surplus_since is not None

    def decide(
        self,
        record: ModelRecord,
        *,
        have: int,
        coming: int,
        fleet: Fleet,
        event: EventRecord | None,
    ) -> Decision:
        """See `scaling.decide`. `event`: what is coming, if anything is."""
        demand = self._desk.cluster.loads.demand(record.name)
        supply = self._supply(record, coming, fleet, event)
        policy = self._policy(record, fleet, supply)
        self.most = policy.max_instances if policy.fixed is None else policy.fixed
        demand = msgspec.structs.replace(
            demand, arrivals=self._arrivals(record, demand, policy, supply)
        )
        work = work_of(demand, policy)
        if self._rhythm.note(self._desk.now.wall_ns / 1e9, steady(work, policy)):
            archive = self._desk.archive
            history = msgspec.structs.replace(self._rhythm.history, gaps=self._gaps.counts)
            self._desk.do(*archive.remember(record.model_id, history, self._desk.cause))
        self._set_batch(work, policy)
        self.prefill_share = self._prefill_share(record, work, policy, have)
        policy = self._ahead(self._with_history(policy), supply.horizon_s)
        idle = self._scaler.idle
        self._scaler, decision = self._desk.settings.decide(
            self._scaler,
            demand,
            policy,
            have=have,
            coming=coming,
            now=self._desk.at,
        )
        self._learn(idle, policy)
        self.warm = max(self.warm, decision.in_memory - have)
        enough = decision.enough
        self.wants = wanted(fulls(demand, policy), policy) if enough is None else enough
        idle = self._scaler.idle
        surplus = coming == 0 and have > idle.need
        self._surplus_since = idle.since[have - 1] if surplus else None
        self.spare_at = self._surplus_since + SPARE_S if self._surplus_since is not None else None
        if self.spare_at is not None and self._desk.at < self.spare_at:
            self.wants = have
        elif decision.replicas > have + coming:
            self.wants = decision.replicas
        self.unbounded = self.wants
        most = record.max_instances or MANY
        if policy.max_instances <= self.wants < most:
            more = unbounded(demand, policy, most, have=have, coming=coming)
            self.unbounded = max(self.wants, more)
        return decision

    def _supply(
        self, record: ModelRecord, coming: int, fleet: Fleet, event: EventRecord | None
    ) -> Supply:
        """What serves, and when more would."""
        serving = (i for i in fleet.instances if i.state is InstanceState.SERVING)
        carried = sum(i.capacity for i in serving if not i.opening)  # those that open are `coming`
        horizon_s, coming_s = self._load_s(record, fleet), 0.0
        if event is not None:
            over_s = event.predicted.all_complete_s
            # An event of an earlier planner was decided by another clock, which may be ahead.
            since_s = max(0.0, (self._desk.now.wall_ns - event.decided_ns) / 1e9)
            coming_s = max(0.0, (horizon_s if over_s is None else over_s) - since_s)
        return Supply(carried, coming, coming_s, max(horizon_s, coming_s))

    def _load_s(self, record: ModelRecord, fleet: Fleet) -> float:
        """About how many seconds a replica takes from the decision on: a copy over a link if one
        is in memory (the devices of a group get their parts side by side), or else from a disk."""
        cluster, settings = self._desk.cluster, self._desk.settings
        fastest = cluster.fastest_sender(record.model_id)
        if fastest is None:
            return START_S + cluster.load_s(record)
        rate = (fastest or settings.link_bytes_per_s) * max(1, len(fleet.cut))
        return START_S + record.nbytes / rate if rate else settings.horizon_s

    def _arrivals(
        self, record: ModelRecord, demand: Demand, policy: Policy, supply: Supply
    ) -> Arrivals:
        """Takes in what has arrived since the last decision."""
        at, asked = self._desk.at, self._desk.cluster.loads.asked(record.name)
        work = work_of(msgspec.structs.replace(demand, arrivals=self._traffic.arrivals(at)), policy)
        self._traffic.note(
            at,
            max(0, asked.requests - self._asked.requests),
            max(0, asked.tokens - self._asked.tokens),
            inside=demand.queued_requests + demand.running_requests,
            running=demand.running_requests,
            busy=0.0 if self._roles.count else min(busy(work, supply.now), FULL),
        )
        self._asked = asked
        return self._traffic.arrivals(at)

    def _prefill_share(self, record: ModelRecord, work: Work, policy: Policy, have: int) -> float:
        if record.prefill_share != PLANNERS_CHOICE:
            return record.prefill_share
        best = prefillers(work, policy.objectives, have, self._roles.count)
        count = self._roles.look(best, self._desk.at)
        return min(count, have - 1) / have if have > 1 else 0.0

    def _set_batch(self, work: Work, policy: Policy) -> None:
        """Times as nodes measure them are never quite the same; the batch stays while it is about
        right."""
        found = batch(work, policy.objectives)
        if not policy.objectives.tpot_s or found >= policy.slots:
            self.batch = 0
        elif not found / ABOUT <= self.batch <= found * ABOUT:
            self.batch = found

    def _policy(self, record: ModelRecord, fleet: Fleet, supply: Supply) -> Policy:
        """A group of g devices runs g times as many sequences, since each runs some while the
        others run others. So it prefills g times as fast; but a token takes its time."""
        speed, devices = fleet.speed, max(1, len(fleet.cut))
        cluster, settings = self._desk.cluster, self._desk.settings
        nodes = len(cluster.nodes)
        self.floor, self.warm = self._kept(record, supply.horizon_s)
        floor = self.floor
        scheduled = f"the schedule keeps {floor} replicas" if record.schedule else ""
        return Policy(
            min_instances=floor,
            max_instances=min(record.max_instances or nodes, nodes // devices),
            slots=cluster.slots * devices,
            kv_tokens=cluster.measured.kv_tokens(record.model_id, group=devices > 1),
            queue_per_instance=settings.queue_per_instance,
            prefill_wait_s=settings.prefill_wait_s,
            prefill_s_per_token=cluster.measured.prefill_s_per_token(record.model_id)
            / (speed * devices),
            scale_up_hold_s=settings.scale_up_hold_s,
            horizon_s=settings.horizon_s,
            fill=settings.fill,
            idle_s=settings.idle_s if record.keep_alive_s is None else record.keep_alive_s,
            fixed=self._desk.archive.fixed.get(record.model_id),
            floor_why=scheduled if floor != record.min_instances else "",
            objectives=Objectives(record.ttft_s, record.tpot_s),
            decode_s=cluster.measured.decode_s(record.model_id) / speed,
            decode_s_per_token=cluster.measured.decode_s_per_token(record.model_id) / speed,
            supply=supply,
        )

    def _learn(self, before: Idle, policy: Policy) -> None:
        """Takes in for how long what is needed again was not needed."""
        if policy.fixed is None:
            for number, seconds in before.ended(self._scaler.idle, self._desk.at):
                self._gaps.note(number, seconds)

    def _with_history(self, policy: Policy) -> Policy:
        """The policy with what is known of the gaps between bursts."""
        if not self._desk.settings.anticipate:
            return policy
        asleep = partial(self._gaps.keep, price_s=policy.idle_s / HOST_SHARE)
        return msgspec.structs.replace(policy, keep_asleep=asleep)

    def _ahead(self, policy: Policy, horizon_s: float) -> Policy:
        """The policy with what the model's history lets expect."""
        if not self._desk.settings.anticipate:
            return policy
        expected = self._rhythm.ahead(self._desk.now.wall_ns / 1e9, LEAD * horizon_s + LEAD_S)
        if expected is None or expected.replicas <= policy.min_instances:
            return policy
        when = (
            "on this weekday in both of the last two weeks"
            if expected.weekly
            else ("on both of the last two days")
        )
        why = f"load that filled {expected.replicas} replicas came at this time {when}"
        return msgspec.structs.replace(policy, min_instances=expected.replicas, floor_why=why)

    def _kept(self, record: ModelRecord, horizon_s: float) -> tuple[int, int]:
        """The replicas that the model keeps even when idle, now and when what is asked for now is
        there; and its warm copies."""
        now_ns = self._desk.now.wall_ns
        soon_ns = now_ns + int((LEAD * horizon_s + LEAD_S) * 1e9)
        return least(record.schedule, record.min_instances, record.warm, (now_ns, soon_ns))
