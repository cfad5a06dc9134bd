"""One state machine for each model (`ModelMachine`), which is told here what happens to the model.

A machine that raises is made anew from what nodes hold, as by a planner that starts, and the others
go on.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from services.planner.core.alarms import NEVER, Alarms
from services.planner.core.arbiter import Claim, GiveWay
from services.planner.core.desk import Desk
from services.planner.core.disks import Read
from services.planner.core.event_machine import EventMachine
from services.planner.core.model import ModelMachine
from services.planner.core.rooms import Rooms
from shared.errors import BadInput, LambdaScaleError
from shared.ids import ModelId, ModelName, NodeId
from shared.messages.pool import ModelRecord
from shared.schedule import parse

T = TypeVar("T")
BROKEN_S = 1.0
"""Seconds for which a model is left alone whose machine raised. They double each time."""
BROKEN_MAX_S = 60.0


class Machines:
    def __init__(self, desk: Desk, alarms: Alarms) -> None:
        """The name of a model's alarm is the model's id."""
        self.named: dict[ModelName, ModelMachine] = {}
        self.by_id: dict[ModelId, ModelMachine] = {}
        self.broken: set[ModelId] = set()
        """Models whose machines raised, until they are made anew."""
        self._times_broken: dict[ModelId, int] = {}
        self._failed: list[tuple[ModelMachine, Exception]] = []
        """Machines that raised while another was told something. They break after that."""
        self.rooms = Rooms(desk, self._claims, self._loading)
        desk.reads = self._reads
        self._desk = desk
        self._alarms = alarms

    def make_way(self) -> None:
        """Tells models what has to give way to others."""
        orders, self.rooms.orders = self.rooms.orders, []
        for way in orders:
            if model := self.by_id.get(way.model):
                self.tell(model, partial(_give_way, way))

    def _loading(self, priority: int) -> Iterator[NodeId]:
        """The targets of running events that do not give way to a model of this priority."""
        for model in self.named.values():
            if model.scaling:
                yield from model.targets(priority)

    def _reads(self, asker: ModelId) -> list[Read]:
        """What running events of other models read from disks."""

        def read(model: ModelMachine) -> Read | None:
            own = model.record.model_id == asker
            return model.event.read() if model.event is not None and not own else None

        return [found for found in self._of_each(asker, read) if found is not None]

    def _claims(self, asker: ModelId) -> list[Claim]:
        """What each model has and wants."""
        return self._of_each(asker, ModelMachine.claim)

    def _of_each(self, asker: ModelId, say: Callable[[ModelMachine], T]) -> list[T]:
        """What each model says. A machine that fails to say so breaks, not the one that asks."""
        said: list[T] = []
        for id_, model in self.by_id.items():
            if id_ in self.broken:
                continue
            try:
                said.append(say(model))
            except Exception as error:
                if id_ == asker:
                    raise
                self._failed.append((model, error))
        return said

    def events(self) -> Iterator[EventMachine]:
        """The last event of each model, over or not."""
        return (model.event for model in self.named.values() if model.event is not None)

    def any_scaling(self) -> bool:
        """Whether a scaling event runs."""
        return any(model.scaling for model in self.named.values())

    def tell(self, model: ModelMachine, act: Callable[[ModelMachine], None]) -> None:
        """Tells a model that something happened. The model then does all that is due."""
        id_ = model.record.model_id
        if id_ in self.broken:
            return
        mark = len(self._desk.out)
        try:
            act(model)
            model.settle()
        except Exception as error:
            del self._desk.out[mark:]
            self._break(model, error)
        else:
            self._alarms.set(id_, model.next_wake)
        failed, self._failed = self._failed, []
        for other, why in failed:
            if other.record.model_id not in self.broken:
                self._break(other, why)

    def mention(self, model: ModelMachine, act: Callable[[ModelMachine], float]) -> None:
        """Tells a model what is heard thousands of times a second, such as loads, blocks, and
        answers of targets. `act` returns when something follows from it, which is mostly later."""
        id_ = model.record.model_id
        if id_ in self.broken:
            return
        mark = len(self._desk.out)
        try:
            due = act(model)
        except Exception as error:
            del self._desk.out[mark:]
            self._break(model, error)
            return
        if due <= self._desk.at:
            self.tell(model, lambda _: None)
        elif due < NEVER:
            self._alarms.bring_forward(id_, due)

    def tell_all(self, act: Callable[[ModelMachine], None]) -> None:
        for model in list(self.named.values()):
            self.tell(model, act)

    def tell_of_room(self) -> None:
        """Memory was freed. Who is told first can have it: models of a higher priority, and of
        these the ones that have waited for longest."""
        for model in sorted(self.named.values(), key=lambda model: model.turn):
            self.tell(model, ModelMachine.on_more_room)

    def tell_of_disks(self) -> None:
        """Disks may be read by now. Who is told first can have them."""
        waiting = self.rooms.waiting & self.by_id.keys()
        for model in sorted((self.by_id[id_] for id_ in waiting), key=lambda model: model.turn):
            self.tell(model, ModelMachine.decide_soon)

    def _break(self, model: ModelMachine, error: Exception) -> None:
        """Leaves the model alone for a while, until its machine is made anew."""
        id_, desk = model.record.model_id, self._desk
        desk.complain("a model's machine failed", error, model=model.record.name)
        times = self._times_broken.get(id_, 0)
        self._times_broken[id_] = times + 1
        self.broken.add(id_)
        self._alarms.set(id_, desk.at + min(BROKEN_S * 2**times, BROKEN_MAX_S))
        self._end(model, LambdaScaleError(f"the planner failed: {error!r}"))

    def _end(self, model: ModelMachine, error: LambdaScaleError) -> None:
        """Ends the event of a machine that has failed."""
        event = model.event
        if event is not None and not event.over:
            in_order = self._attempt(
                "an event could not be ended", model, lambda: event.fail(error)
            )
            if not in_order:
                self._attempt("nor abandoned", model, lambda: event.abandon(error))

    def _attempt(self, text: str, model: ModelMachine, act: Callable[[], object]) -> bool:
        """Returns whether `act` raised nothing. If it did, its commands are dropped, and the error
        is logged."""
        mark = len(self._desk.out)
        try:
            act()
        except Exception as error:
            del self._desk.out[mark:]
            self._desk.complain(text, error, model=model.record.name)
            return False
        return True

    def renew(self, id_: ModelId) -> None:
        broken = self.by_id[id_]
        self.broken.discard(id_)
        try:
            model = ModelMachine(self._desk, self.rooms, broken.record)
        except Exception as error:
            self._break(broken, error)
            return
        self.named[model.record.name] = self.by_id[id_] = model
        self.tell(model, lambda _: None)

    # --- which models there are ---

    def add(self, record: ModelRecord, *, resume: bool = False) -> None:
        """`resume`: the nodes are known, and an event of the model that an earlier planner began
        may go on."""
        if record.base:
            return  # an adapter, which the instances of its base serve
        counts = record.min_instances, record.max_instances, record.warm
        if not 0 < record.n_blocks == len(record.block_bytes) or min(counts) < 0:
            sizes = len(record.block_bytes)
            self._desk.log("warning", "not a model", name=record.name, sizes=sizes)
            return
        try:
            parse(record.schedule)
        except BadInput as error:  # a registry of a later release may take more than we understand
            self._desk.log("warning", "schedule left out", name=record.name, why=str(error))
            record = msgspec.structs.replace(record, schedule="")
        known = self.named.get(record.name)
        if known is not None and known.record.model_id != record.model_id:
            self.remove(record.name)
            known = None
        if known is not None:
            known.on_settings(record)  # a machine that has failed is made anew with these
            self.tell(known, lambda model: model.decide_soon())
            return
        try:
            model = ModelMachine(self._desk, self.rooms, record)
        except Exception as error:  # the registry's next answer names the model again
            self._desk.complain("a model's machine failed", error, model=record.name)
            return
        self._desk.tell(f"published as {record.name}", record.model_id)
        self.named[record.name] = self.by_id[record.model_id] = model
        begun = self._desk.archive.begun(record.model_id) if resume else None
        self.tell(model, lambda model: model.resume(begun) if begun else None)

    def remove(self, name: ModelName) -> None:
        model = self.named.pop(name, None)
        if model is None:
            return
        id_ = model.record.model_id
        del self.by_id[id_]
        self._alarms.set(id_, NEVER)
        self.broken.discard(id_)
        self._times_broken.pop(id_, None)
        self._desk.tell("removed", id_)
        self._desk.chronicle.forget(name, id_)
        if not self._attempt("a model's machine failed", model, model.remove):
            self._end(model, LambdaScaleError("the model was removed"))
            self._attempt("a model's gateways were not told", model, model.fleet.close)
        self._desk.do(*self._desk.archive.fix(id_, None, self._desk.cause))
        self._desk.do(*self._desk.archive.remember(id_, None, self._desk.cause))

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        assert {m.record.name for m in self.by_id.values()} == set(self.named)
        for id_, model in self.by_id.items():
            assert model.record.model_id == id_
            if id_ not in self.broken:
                model.validate()
        running = [event.record.id for event in self.events() if not event.over]
        assert len(set(running)) == len(running)


def _give_way(way: GiveWay, model: ModelMachine) -> None:
    model.give_way(way)
