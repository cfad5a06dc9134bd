"""Models as data: what is published of them, and manifests that stand for them."""

import msgspec
import pytest

from services.node.checkpoints.packing import digest
from shared.errors import BadInput, ConfigError
from shared.layout import model_id
from simulation.models import DATA, Model, block_content, model, model_record, modelled_manifest

PUBLISHED = {
    # Parameters in 1e9, as the model cards have them; KV bytes of a position, from the shapes.
    "llama-2-7b": (6.74, 512 << 10),
    "llama-2-13b": (13.02, 800 << 10),
    "llama-2-70b": (68.98, 320 << 10),
    "llama-3.1-8b": (8.03, 128 << 10),
    "qwen2.5-32b": (32.76, 256 << 10),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_were_published(name: str) -> None:
    parameters, kv_bytes = PUBLISHED[name]
    described = model(name)
    assert described.parameters / 1e9 == pytest.approx(parameters, abs=0.01)
    assert described.kv_bytes == kv_bytes
    assert described.nbytes == 2 * described.parameters


def test_tied_embeddings_are_counted_once_and_carried_twice() -> None:
    untied = model("demo")
    tied = msgspec.structs.replace(untied, tied=True)
    assert tied.parameters == untied.parameters - untied.vocab * untied.hidden
    assert tied.nbytes == untied.nbytes


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.toml")))
def test_a_manifest_describes_its_model(name: str) -> None:
    described = model(name)
    manifest = modelled_manifest(described, blocks=16, unit=4096)
    assert Model.of(manifest) == described
    assert [b.first_unit for b in manifest.blocks[1:]] == [
        b.last_unit + 1 for b in manifest.blocks[:-1]
    ]
    assert manifest.blocks[-1].last_unit == described.layers + 1
    assert sum(described.block_layers(block) for block in manifest.blocks) == described.layers
    assert sum(described.block_bytes(block) for block in manifest.blocks) == described.nbytes
    assert 0 <= manifest.nbytes - described.nbytes / 4096 < 16


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_bytes_have_the_manifests_digests(chunks: int) -> None:
    manifest = modelled_manifest(model("demo"), blocks=5, unit=4096, chunks=chunks)
    assert max(manifest.n_chunks(block) for block in range(5)) == chunks
    for block in range(5):
        content = block_content(manifest, block)
        assert len(content) == manifest.blocks[block].nbytes
        for chunk, expected in enumerate(manifest.blocks[block].digests):
            offset, length = manifest.chunk_range(block, chunk)
            assert digest(content[offset : offset + length]) == expected


def test_models_of_one_shape_and_two_names_are_two() -> None:
    one, other = (
        modelled_manifest(model("demo", name), blocks=4, unit=64) for name in ("one", "other")
    )
    assert model_id(one) != model_id(other)
    assert block_content(one, 0) != block_content(other, 0)
    assert one == modelled_manifest(model("demo", "one"), blocks=4, unit=64)


def test_a_record_is_of_what_is_moved() -> None:
    manifest = modelled_manifest(model("demo", "m"), blocks=4, unit=64)
    record = model_record(manifest, stored="object", created_ns=7)
    assert (record.name, record.model_id, record.manifest) == ("m", model_id(manifest), "object")
    assert sum(record.block_bytes) == record.nbytes == manifest.nbytes
    assert record.n_blocks == 4
    assert record.chunk_bytes == manifest.chunk_bytes


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama-2-7b"):
        model("llama-9")
    with pytest.raises(BadInput, match="not valid"):
        model("demo", "two words")
    for given in ({"blocks": 17}, {"blocks": 4, "unit": 0}, {"blocks": 4, "chunks": 0}):
        with pytest.raises(BadInput):
            modelled_manifest(model("demo"), **({"unit": 64} | given))
