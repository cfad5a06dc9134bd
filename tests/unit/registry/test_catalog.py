import msgspec
import pytest

from services.registry.core.catalog import Catalog
from shared.errors import BadInput, Conflict, NotFound
from shared.ids import ModelId, ModelName
from shared.messages.pool import ModelRecord, ModelSet
from tests.unit.registry.builders import record


@pytest.fixture
def catalog() -> Catalog:
    catalog = Catalog()
    catalog.put(record())
    return catalog


def test_the_same_record_again_changes_nothing(catalog: Catalog) -> None:
    assert catalog.admit(record()) is None
    assert catalog.admit(record(created_ns=99)) is None


def test_the_same_model_with_new_limits_replaces_the_record(catalog: Catalog) -> None:
    updated = catalog.admit(record(created_ns=99, max_instances=3))
    assert updated == record(created_ns=1, max_instances=3)


def test_admit_changes_nothing_by_itself(catalog: Catalog) -> None:
    catalog.admit(record("second", "id2"))
    assert catalog.records == (record(),)


def test_a_name_that_means_another_model_is_a_conflict(catalog: Catalog) -> None:
    with pytest.raises(Conflict, match="remove that model first, or publish under another name"):
        catalog.admit(record(model_id="changed"))


def test_a_model_has_one_name(catalog: Catalog) -> None:
    with pytest.raises(Conflict, match="published as 'llama' already"):
        catalog.admit(record("alias"))


def test_a_removed_name_and_id_are_free_again(catalog: Catalog) -> None:
    assert catalog.remove(ModelName("llama")) == record()
    assert catalog.admit(record("alias")) == record("alias")
    assert catalog.admit(record(model_id="changed")) is not None


def test_unknown_models_are_not_found_and_the_error_names_the_known(catalog: Catalog) -> None:
    with pytest.raises(NotFound, match="published models: llama"):
        catalog.remove(ModelName("gone"))
    with pytest.raises(NotFound, match="publish the model first"):
        catalog.identified(ModelId("gone"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(name="no spaces"), "model name"),
        (record(model_id="a.b"), "digest of a manifest"),
        (record(model_id=""), "digest of a manifest"),
        (record(n_blocks=0), "must be positive"),
        (msgspec.structs.replace(record(), block_bytes=(400,)), "sizes of 1 blocks, but has 4"),
        (msgspec.structs.replace(record(), max_instances=-1), "must not be negative"),
        (msgspec.structs.replace(record(), chunk_bytes=-1), "chunks of -1 bytes"),
        (msgspec.structs.replace(record(max_instances=1), min_instances=2), "exceeds"),
    ],
)
def test_records_that_make_no_sense_are_bad_input(bad: ModelRecord, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Catalog().admit(bad)


def test_restoring_keeps_the_older_of_two_records_of_one_name() -> None:
    catalog = Catalog()
    newer = record(model_id="newer", created_ns=2)
    refused = catalog.restore([newer, record(created_ns=1)])
    assert catalog.records == (record(created_ns=1),)
    assert [r for r, _ in refused] == [newer]


def test_records_come_by_name(catalog: Catalog) -> None:
    catalog.put(record("aya", "id2"))
    assert [r.name for r in catalog.records] == ["aya", "llama"]


def adapter(name: str = "sql", model_id: str = "tuned", base: str = "id1") -> ModelRecord:
    return msgspec.structs.replace(record(name, model_id), base=ModelId(base))


def test_an_adapter_needs_its_base_which_goes_after_it(catalog: Catalog) -> None:
    base = record()
    own = adapter(base=base.model_id)
    with pytest.raises(NotFound, match="publish the model first"):
        catalog.admit(adapter(base="gone"))
    admitted = catalog.admit(own)
    assert admitted == own
    catalog.put(own)
    with pytest.raises(BadInput, match="adapter of an adapter"):
        catalog.admit(adapter("more", "tuned2", base=own.model_id))
    with pytest.raises(Conflict, match="remove sql first"):
        catalog.removable(base.name)
    with pytest.raises(BadInput, match=f"change its base '{base.name}'"):
        catalog.changed(ModelSet(name=own.name, min_instances=1))
    assert catalog.removable(own.name) == own
    catalog.remove(own.name)
    assert catalog.removable(base.name) == base


def test_adapters_are_restored_after_their_bases_whatever_clocks_said(catalog: Catalog) -> None:
    base = msgspec.structs.replace(record(), created_ns=50)
    own = msgspec.structs.replace(adapter(base=base.model_id), created_ns=1)
    restored = Catalog()
    assert restored.restore([own, base]) == []
    assert restored.records == (base, own)
