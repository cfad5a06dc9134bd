"""Imports of checkpoints, and published models that cannot be had."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.node.checkpoints.packing import chunk_bytes
from shared import subjects
from shared.errors import (
    BadInput,
    BusTimeout,
    Conflict,
    CorruptCheckpoint,
    LambdaScaleError,
    ModelError,
    UnsupportedModel,
)
from shared.messages.pool import ModelAdded, Models, ModelsQuery, Tier
from tests.unit.node.cluster import ALL, nodes
from tests.unit.node.service.builders import FROM_A, Trouble, broken


async def test_bad_imports_are_typed_errors_and_harm_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        other = broken(checkpoint, tmp_path / "other", {"architectures": ["BertModel"]})
        with pytest.raises(UnsupportedModel):
            await up.import_model(path=other, called="bert")
        narrow = broken(checkpoint, tmp_path / "narrow", {"hidden_size": 128})
        with pytest.raises((ModelError, CorruptCheckpoint)):
            await up.import_model(path=narrow, called="narrow")
        with pytest.raises(LambdaScaleError, match="nowhere"):
            await up.import_model(path=tmp_path / "nowhere")
        with pytest.raises(BadInput, match="not valid"):
            await up.import_model(called="no spaces")
        for blocks in (-1, 1000):
            with pytest.raises(BadInput):
                await up.import_model(blocks=blocks)
        with pytest.raises(Conflict, match="is published as 'tiny' already"):
            await up.import_model(called="tiny-2")
        await up.until_holds("a", {Tier.DISK: ALL})
        await up.promoted("a")
        assert len(await up.generate("a")) == 8


async def test_importing_twice_is_importing_once(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a", request="before")
        again = await asyncio.gather(up.import_model(), up.import_model())
        assert {record.model_id for record in again} == {up.record.model_id}
        models: Models = await up.request(subjects.REGISTRY_MODELS, ModelsQuery(), Models)
        assert models.records == (up.record,)
        assert up.record.chunk_bytes == chunk_bytes(up.record.nbytes)
        assert await up.generate("a", request="after") == tokens


async def test_an_upload_that_fails_can_be_tried_again(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint) as up:
        bus = Trouble(up.broker, "a")
        await up.start("a", bus=bus)
        bus.refused.add(subjects.OBJECTS)
        with pytest.raises(BusTimeout, match="asset store"):
            await up.import_model()
        models: Models = await up.request(subjects.REGISTRY_MODELS, ModelsQuery(), Models)
        assert models.records == ()
        bus.refused.clear()
        up.record = await up.import_model()
        await up.promoted("a")


async def test_a_node_that_starts_offers_what_lies_on_its_disk(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.stop("a")
        await up.start("a")
        await up.until_holds("a", {Tier.DISK: ALL})
        await up.promoted("a")


async def test_a_published_model_whose_manifest_cannot_be_had_harms_nothing(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        objects = await up.bus.objects()
        garbage = await objects.put(b"not a manifest")
        with capture_logs() as logs:
            for manifest, model in ((garbage, "1" * 32), ("0" * 64, "2" * 32)):
                record = msgspec.structs.replace(up.record, manifest=manifest, model_id=model)
                await up.bus.publish(subjects.POOL_MODELS, ModelAdded(record=record))
            swapped = msgspec.structs.replace(up.record, model_id="3" * 32)
            await up.bus.publish(subjects.POOL_MODELS, ModelAdded(record=swapped))
            await up.promoted("a")
            await up.apply("b", FROM_A)
            await up.until_arrived("b", ALL)
        said = [log for log in logs if log["event"] == "learning a model failed"]
        assert {log["code"] for log in said} == {"corrupt_checkpoint", "not_found"}
