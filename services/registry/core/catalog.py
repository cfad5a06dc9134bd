"""The published models. A name stands for one model, and a model has one name.

The second rule is needed because memory of a model is released and forgotten by model id: two names
of one model would take it away from each other.
"""

from collections.abc import Iterable
from math import inf

import msgspec

from shared.errors import BadInput, Conflict, LambdaScaleError, NotFound
from shared.ids import ModelId, ModelName, check_model_name
from shared.messages.pool import PLANNERS_CHOICE, ModelRecord, ModelSet
from shared.schedule import MOST_COPIES, parse

MOST_PRIORITY = 1000
WISHES = tuple(
    field.name
    for field in msgspec.structs.fields(ModelSet)
    if field.name in ModelRecord.__struct_fields__ and field.name != "name"
)
"""What `model set` can change."""
OPERATORS = tuple(field for field in WISHES if field not in ("min_instances", "max_instances"))
"""Those that an import does not name."""


class Catalog:
    def __init__(self) -> None:
        self._by_name: dict[ModelName, ModelRecord] = {}
        self._by_id: dict[ModelId, ModelRecord] = {}

    def admit(self, record: ModelRecord) -> ModelRecord | None:
        """The record to keep for this one; None if it is kept already. Changes nothing.

        The same model again under its name replaces files and the limits on instances, and keeps
        everything else. BadInput: the record makes no sense. Conflict: the name or the id is taken.
        """
        _check(record)
        if record.base and self.identified(record.base).base:
            raise BadInput(f"model {record.name!r} is an adapter of an adapter: name its base")
        named = self._by_name.get(record.name)
        if named is not None and named.model_id != record.model_id:
            raise Conflict(
                f"model name {record.name!r} means model {named.model_id} already, not "
                f"{record.model_id}: remove that model first, or publish under another name"
            )
        known = self._by_id.get(record.model_id)
        if known is None:
            return record
        if known.name != record.name:
            raise Conflict(
                f"model {record.model_id} is published as {known.name!r} already: use that name, "
                f"or remove it before publishing as {record.name!r}"
            )
        kept = {field: getattr(known, field) for field in ("created_ns", *OPERATORS)}
        updated: ModelRecord = msgspec.structs.replace(record, **kept)
        return None if updated == known else updated

    def changed(self, wish: ModelSet) -> ModelRecord:
        """The record with the operator's changes. Changes nothing. NotFound, BadInput."""
        known = self.named(wish.name)
        if known.base:
            raise BadInput(
                f"model {known.name!r} is an adapter, which has no instances of its own: change "
                f"its base {self.identified(known.base).name!r}"
            )
        wishes = {field: getattr(wish, field) for field in WISHES}
        changes = {field: value for field, value in wishes.items() if value is not None}
        if changes.get("keep_alive_s", 0.0) < 0:
            changes["keep_alive_s"] = None
        record: ModelRecord = msgspec.structs.replace(known, **changes)
        _check(record)
        return record

    def put(self, record: ModelRecord) -> None:
        """Keeps a record that `admit` returned."""
        self._by_name[record.name] = record
        self._by_id[record.model_id] = record

    def restore(self, records: Iterable[ModelRecord]) -> list[tuple[ModelRecord, str]]:
        """Takes stored records, oldest first. Returns the records that do not fit, with the
        reasons."""
        refused = []
        # Bases first, whatever the clocks of the nodes said that imported them.
        for record in sorted(records, key=lambda r: (bool(r.base), r.created_ns, r.model_id)):
            try:
                self.put(self.admit(record) or record)
            except LambdaScaleError as error:
                refused.append((record, str(error)))
        return refused

    def removable(self, name: ModelName) -> ModelRecord:
        """The model of this name. NotFound; Conflict: it is the base of adapters."""
        record = self.named(name)
        adapters = [other.name for other in self.records if other.base == record.model_id]
        if adapters:
            raise Conflict(
                f"model {name!r} is the base of adapters: remove {', '.join(adapters)} first"
            )
        return record

    def remove(self, name: ModelName) -> ModelRecord:
        record = self.named(name)
        del self._by_name[name]
        del self._by_id[record.model_id]
        return record

    def validate(self) -> None:
        """Raises AssertionError if names and ids do not stand for the same records."""
        assert self._by_name == {record.name: record for record in self._by_id.values()}
        assert self._by_id == {record.model_id: record for record in self._by_name.values()}

    def named(self, name: ModelName) -> ModelRecord:
        """The published model of this name. NotFound."""
        record = self._by_name.get(name)
        if record is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise NotFound(f"no model is named {name!r}; published models: {known}")
        return record

    def get(self, model_id: ModelId) -> ModelRecord | None:
        return self._by_id.get(model_id)

    def identified(self, model_id: ModelId) -> ModelRecord:
        """The published model of this id. NotFound."""
        record = self._by_id.get(model_id)
        if record is None:
            raise NotFound(f"no published model has the id {model_id!r}: publish the model first")
        return record

    @property
    def records(self) -> tuple[ModelRecord, ...]:
        """Sorted by name."""
        return tuple(self._by_name[name] for name in sorted(self._by_name))


def _check(record: ModelRecord) -> None:
    check_model_name(record.name)
    digest = record.model_id.replace("-", "").replace("_", "")
    if not (digest.isascii() and digest.isalnum()) or len(record.model_id) > 128:
        raise BadInput(
            f"model id {record.model_id!r} is not valid: it is the digest of a manifest "
            "(letters, digits, '-' and '_', 128 at most)"
        )
    if record.n_blocks < 1 or record.nbytes < 1:
        raise BadInput(
            f"model {record.name!r} has {record.n_blocks} blocks and {record.nbytes} bytes: "
            "both must be positive; import the checkpoint again"
        )
    if len(record.block_bytes) != record.n_blocks:
        raise BadInput(
            f"model {record.name!r} gives the sizes of {len(record.block_bytes)} blocks, "
            f"but has {record.n_blocks}: import the checkpoint again"
        )
    if record.chunk_bytes < 0:
        raise BadInput(
            f"model {record.name!r} has chunks of {record.chunk_bytes} bytes: "
            "0 (not known) or more; import the checkpoint again"
        )
    if record.min_instances < 0 or record.max_instances < 0:
        raise BadInput(f"model {record.name!r}: limits on instances must not be negative")
    if 0 < record.max_instances < record.min_instances:
        raise BadInput(
            f"model {record.name!r}: min_instances {record.min_instances} exceeds "
            f"max_instances {record.max_instances}"
        )
    if abs(record.priority) > MOST_PRIORITY:
        raise BadInput(
            f"model {record.name!r}: priority {record.priority} is not within "
            f"{-MOST_PRIORITY} and {MOST_PRIORITY}"
        )
    if record.keep_alive_s is not None and not 0 <= record.keep_alive_s < inf:
        raise BadInput(
            f"model {record.name!r}: keep_alive_s {record.keep_alive_s} must be 0 or more seconds"
        )
    for objective in ("ttft_s", "tpot_s"):
        if not 0 <= getattr(record, objective) < inf:
            raise BadInput(
                f"model {record.name!r}: {objective} {getattr(record, objective)} must be 0 (no "
                "objective) or more seconds"
            )
    if not 0 <= record.warm <= MOST_COPIES:
        raise BadInput(f"model {record.name!r}: warm {record.warm} must be 0 to {MOST_COPIES}")
    if not 0 <= record.prefill_share < 1 and record.prefill_share != PLANNERS_CHOICE:
        raise BadInput(
            f"model {record.name!r}: prefill_share {record.prefill_share} must be 0 (replicas do "
            "both) or more, and less than 1, or -1 (the planner chooses)"
        )
    try:
        parse(record.schedule)
    except BadInput as error:
        raise BadInput(f"model {record.name!r}: {error}") from None
