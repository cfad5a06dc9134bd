"""Packing into the store and reading back; what crashes, damage and full disks leave."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from services.local.demo_model import make_checkpoint
from services.node.checkpoints.disk import check_room
from services.node.checkpoints.store import Imported, Store
from shared.errors import (
    BadInput,
    CapacityExceeded,
    CorruptCheckpoint,
    DigestMismatch,
    ModelError,
    NotFound,
)
from shared.ids import ModelId
from shared.layout import encode_manifest, model_id
from tests.support.models import TINY, WIDE

WEIGHTS = "model.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def read(store: Store, imported: Imported, index: int) -> bytearray:
    buffer = bytearray(imported.manifest.blocks[index].nbytes)
    store.fill(imported.model_id, index, memoryview(buffer))
    return buffer


def unpacked(store: Store, imported: Imported) -> dict[str, torch.Tensor]:
    """Every tensor as a view of its block; checks that all between them is zero."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in imported.manifest.blocks:
        block = read(store, imported, spec.index)
        used = np.zeros(spec.nbytes, dtype=bool)
        for tensor in spec.tensors:
            dtype = getattr(torch, tensor.dtype)
            count = tensor.nbytes // dtype.itemsize
            view = torch.frombuffer(block, dtype=dtype, count=count, offset=tensor.offset)
            tensors[tensor.name] = view.view(tensor.shape)
            used[tensor.offset : tensor.offset + tensor.nbytes] = True
        assert not np.frombuffer(block, dtype=np.uint8)[~used].any()
    return tensors


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].flatten().view(torch.uint8), b[name].flatten().view(torch.uint8))
        for name in a
    )


def names_in(root: Path) -> set[str]:
    return (
        {path.name for path in root.iterdir() if path.name != ".lock"} if root.is_dir() else set()
    )


@pytest.mark.parametrize("blocks", [0, 1, 3, 4])
def test_blocks_hold_the_checkpoint_bit_for_bit(wide: Path, store: Store, blocks: int) -> None:
    imported = store.import_checkpoint(wide, blocks=blocks)
    assert imported.manifest.n_blocks == (blocks or WIDE.layers + 2)
    assert imported.manifest.n_chunks(1 if blocks != 1 else 0) > 2
    assert same_bits(unpacked(store, imported), load_file(wide / WEIGHTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, store: Store, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path / "half", replace(TINY, dtype=dtype))
    imported = store.import_checkpoint(tmp_path / "half")
    assert same_bits(unpacked(store, imported), load_file(tmp_path / "half" / WEIGHTS))


def test_head_of_a_tied_model_has_its_own_copy(tmp_path: Path, store: Store) -> None:
    make_checkpoint(tmp_path / "tied", replace(TINY, tied=True))
    saved = load_file(tmp_path / "tied" / WEIGHTS)
    assert "lm_head.weight" not in saved
    for blocks in (1, 6):
        imported = store.import_checkpoint(tmp_path / "tied", blocks=blocks)
        expected = saved | {"lm_head.weight": saved["model.embed_tokens.weight"]}
        assert same_bits(unpacked(store, imported), expected)
        last = [tensor.name for tensor in imported.manifest.blocks[-1].tensors]
        assert last[-1] == "lm_head.weight"


def test_what_import_says(tiny: Path, store: Store) -> None:
    seen: list[tuple[int, int]] = []
    imported = store.import_checkpoint(tiny, progress=lambda done, all_: seen.append((done, all_)))
    assert imported.model_id == model_id(imported.manifest)
    assert imported.context_length == TINY.context_length
    assert imported.nbytes == imported.manifest.nbytes
    assert imported.manifest.architecture == "LlamaForCausalLM"
    assert imported.manifest.config == json.loads((tiny / "config.json").read_text())
    assert imported.files["tokenizer.json"] == (tiny / "tokenizer.json").read_bytes()
    assert store.files(imported.model_id) == imported.files
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (imported.nbytes, imported.nbytes)


def test_more_blocks_than_units(tiny: Path, store: Store) -> None:
    with pytest.raises(BadInput, match="6 units"):
        store.import_checkpoint(tiny, blocks=7)
    with pytest.raises(BadInput, match="-1"):
        store.import_checkpoint(tiny, blocks=-1)


def test_same_weights_are_the_same_model_however_stored(tmp_path: Path, tiny: Path) -> None:
    make_checkpoint(tmp_path / "sharded", replace(TINY, shards=3))
    one = Store(tmp_path / "a").import_checkpoint(tiny)
    other = Store(tmp_path / "b").import_checkpoint(tmp_path / "sharded")
    assert encode_manifest(one.manifest) == encode_manifest(other.manifest)
    assert one.model_id == other.model_id


def test_changed_weight_is_another_model(own: Path, store: Store) -> None:
    before = store.import_checkpoint(own)
    tensors = load_file(own / WEIGHTS)
    tensors["model.layers.3.mlp.down_proj.weight"][5, 7] += 0.5
    save_file(tensors, own / WEIGHTS)
    after = store.import_checkpoint(own)
    assert after.model_id != before.model_id
    assert set(store.manifests()) == {before.model_id, after.model_id}
    changed = [
        a.index
        for a, b in zip(after.manifest.blocks, before.manifest.blocks, strict=True)
        if a.digests != b.digests
    ]
    assert changed == [4]


def test_another_store_finds_what_was_imported(tiny: Path, tmp_path: Path, store: Store) -> None:
    imported = store.import_checkpoint(tiny)
    later = Store(tmp_path / "store")
    assert later.manifests() == {imported.model_id: imported.manifest}
    assert read(later, imported, 2) == read(store, imported, 2)


def test_empty_store(store: Store) -> None:
    assert store.manifests() == {}
    missing = ModelId("0" * 32)
    for call in (
        lambda: store.files(missing),
        lambda: store.remove(missing),
        lambda: store.fill(missing, 0, memoryview(bytearray(1))),
        lambda: store.files(ModelId("../../etc")),
    ):
        with pytest.raises(NotFound):
            call()


def test_remove(tiny: Path, tmp_path: Path, store: Store) -> None:
    imported = store.import_checkpoint(tiny)
    store.remove(imported.model_id)
    assert store.manifests() == {}
    assert names_in(tmp_path / "store") == set()
    with pytest.raises(NotFound):
        read(store, imported, 0)


def test_block_that_is_not_there_or_buffer_that_does_not_fit(tiny: Path, store: Store) -> None:
    imported = store.import_checkpoint(tiny)
    for index in (-1, 6):
        with pytest.raises(NotFound, match="6 blocks"):
            store.fill(imported.model_id, index, memoryview(bytearray(8)))
    with pytest.raises(BadInput, match="buffer 8"):
        store.fill(imported.model_id, 0, memoryview(bytearray(8)))


@pytest.mark.parametrize("position", [0, 300_000, -1])
def test_flipped_byte_is_found(wide: Path, tmp_path: Path, store: Store, position: int) -> None:
    imported = store.import_checkpoint(wide)
    path = tmp_path / "store" / imported.model_id / "block-001.bin"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    chunk = position % len(content) // imported.manifest.chunk_bytes
    with pytest.raises(DigestMismatch, match=f"block 1 .*chunk {chunk} "):
        read(store, imported, 1)
    read(store, imported, 2)
    store.import_checkpoint(wide)
    read(store, imported, 1)


def test_shortened_block_is_found(wide: Path, tmp_path: Path, store: Store) -> None:
    imported = store.import_checkpoint(wide)
    path = tmp_path / "store" / imported.model_id / "block-002.bin"
    os.truncate(path, 300_000)
    with pytest.raises(DigestMismatch, match=r"block 2 .*chunk 1 "):
        read(store, imported, 2)
    path.unlink()
    with pytest.raises(NotFound, match="block-002"):
        read(store, imported, 2)


def test_a_disk_that_cannot_be_read_is_a_model_error(
    tiny: Path, tmp_path: Path, store: Store
) -> None:
    imported = store.import_checkpoint(tiny)
    path = tmp_path / "store" / imported.model_id / "block-000.bin"
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"block-000.bin cannot be read: Is a directory"):
        read(store, imported, 0)


def test_a_model_that_cannot_be_removed(
    tiny: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    imported = store.import_checkpoint(tiny)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ModelError, match="cannot be removed: Permission denied"):
        store.remove(imported.model_id)


@pytest.mark.parametrize("damage", ["garbage", "other", "gone", "short block", "no block"])
def test_damaged_models_are_reported_and_left_out(
    tiny: Path, wide: Path, tmp_path: Path, store: Store, damage: str
) -> None:
    good, bad = store.import_checkpoint(tiny), store.import_checkpoint(wide)
    folder = tmp_path / "store" / bad.model_id
    manifest, block = folder / "manifest.msgpack", folder / "block-003.bin"
    if damage == "garbage":
        manifest.write_bytes(b"\xc1" * 50)
    elif damage == "other":
        manifest.write_bytes(encode_manifest(good.manifest))
    elif damage == "gone":
        manifest.unlink()
    elif damage == "short block":
        os.truncate(block, 100)
    else:
        block.unlink()
    later = Store(tmp_path / "store")
    with structlog.testing.capture_logs() as logs:
        assert set(later.manifests()) == {good.model_id}
    assert [(log["event"], log["model_id"]) for log in logs] == [
        ("stored_model_damaged", bad.model_id)
    ]
    if damage in ("garbage", "other"):
        with pytest.raises(CorruptCheckpoint, match=bad.model_id):
            read(later, bad, 0)
    later.import_checkpoint(wide)
    assert set(later.manifests()) == {good.model_id, bad.model_id}
    assert same_bits(unpacked(later, bad), load_file(wide / WEIGHTS))


def test_importing_again_takes_over_changed_files(own: Path, store: Store) -> None:
    (own / "chat_template.jinja").write_text("old")
    first = store.import_checkpoint(own)
    (own / "chat_template.jinja").unlink()
    (own / "generation_config.json").write_text('{"temperature": 0.5}')
    second = store.import_checkpoint(own)
    assert second.model_id == first.model_id
    assert store.files(first.model_id) == second.files != first.files


def test_imports_at_once_by_two_stores_of_one_root(
    tiny: Path, wide: Path, tmp_path: Path, store: Store
) -> None:
    other = Store(tmp_path / "store")
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(which.import_checkpoint, path)
            for which in (store, other)
            for path in (tiny, wide, tiny)
        ]
        imported = {job.result(timeout=60).model_id for job in jobs}
    assert len(imported) == 2
    assert set(store.manifests()) == imported == names_in(tmp_path / "store")


class Interrupted(Exception):
    pass


def test_failure_in_the_middle_leaves_nothing(wide: Path, tmp_path: Path, store: Store) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        store.import_checkpoint(wide, progress=fail)
    assert names_in(tmp_path / "store") == set()


def test_checkpoint_that_shrinks_in_the_middle_leaves_nothing(
    own: Path, tmp_path: Path, store: Store
) -> None:
    with pytest.raises(CorruptCheckpoint, match="became shorter"):
        store.import_checkpoint(own, progress=lambda *_: os.truncate(own / WEIGHTS, 100_000))
    assert names_in(tmp_path / "store") == set()


def test_weights_that_cannot_be_read_in_the_middle(own: Path, tmp_path: Path, store: Store) -> None:
    """Where the file was, the kernel finds unmapped memory, and says EIO."""

    def unmap(*_: int) -> None:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}") == str(own / WEIGHTS):
                    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
                        os.dup2(memory.fileno(), descriptor)

    with pytest.raises(CorruptCheckpoint, match=f"{WEIGHTS}: cannot be read: Input/output error"):
        store.import_checkpoint(own, progress=unmap)
    assert names_in(tmp_path / "store") == set()


def test_weights_that_go_before_they_are_read(
    own: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(root: Path, nbytes: int) -> None:
        check_room(root, nbytes)
        (own / WEIGHTS).unlink()

    monkeypatch.setattr("services.node.checkpoints.store.check_room", gone)
    with pytest.raises(CorruptCheckpoint, match=f"{WEIGHTS}: cannot be read: No such file"):
        store.import_checkpoint(own)
    assert names_in(tmp_path / "store") == set()


def test_the_weights_are_read_once_and_written_once(
    wide: Path, tmp_path: Path, store: Store
) -> None:
    def done() -> tuple[int, int]:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"]), int(fields["wchar"])

    # A chat template would be compiled in a process of its own, whose bytes count here, too.
    plain = Path(shutil.copytree(wide, tmp_path / "plain"))
    config = plain / "tokenizer_config.json"
    told = json.loads(config.read_text())
    del told["chat_template"]
    config.write_text(json.dumps(told))
    before = done()
    imported = store.import_checkpoint(plain)
    read, written = (after - at for after, at in zip(done(), before, strict=True))
    assert imported.nbytes <= written < 1.01 * imported.nbytes
    small = sum(path.stat().st_size for path in plain.iterdir() if path.name != WEIGHTS)
    assert imported.nbytes * 0.99 < read < 1.01 * imported.nbytes + 4 * small


KILLED = """
import os, signal, sys
from pathlib import Path
from services.node.checkpoints.disk import check_room
from services.node.checkpoints.store import Store
def die(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
Store(Path(sys.argv[2])).import_checkpoint(Path(sys.argv[1]), progress=die)
"""


def test_kill_in_the_middle_leaves_no_half_model(wide: Path, tmp_path: Path, store: Store) -> None:
    root = tmp_path / "store"
    child = subprocess.run([sys.executable, "-c", KILLED, wide, root], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert names_in(root)
    assert store.manifests() == {}
    imported = store.import_checkpoint(wide)
    assert names_in(root) == {imported.model_id}


def test_disk_that_is_too_small_is_refused_at_once(
    tiny: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(CapacityExceeded, match="no room"):
        store.import_checkpoint(tiny, progress=lambda *_: pytest.fail("copied something"))
    assert names_in(tmp_path / "store") == set()


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.ENOSPC, CapacityExceeded), (errno.EDQUOT, CapacityExceeded), (errno.EIO, ModelError)],
)
def test_disk_that_fails_in_the_middle(
    tiny: Path,
    tmp_path: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[Exception],
) -> None:
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(error) as caught:
        store.import_checkpoint(tiny)
    assert type(caught.value) is error
    assert names_in(tmp_path / "store") == set()


def test_root_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot store"):
        Store(tmp_path / "file" / "store").import_checkpoint(tiny)


FULL = """
import asyncio, os, sys
from pathlib import Path
from services.node.checkpoints.reading import Verified, Wanted
from services.node.checkpoints.disk import check_room
from services.node.checkpoints.store import Store
from shared.errors import LambdaScaleError

root, good, other = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
store = Store(root / "store")
imported = store.import_checkpoint(good)
before = sorted(path.name for path in (root / "store").iterdir())

def fill(done, total):  # another user of the disk takes what is left
    with open(root / "filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError as error:
            pass

try:
    store.import_checkpoint(other, progress=fill)
except LambdaScaleError as error:
    print(error.code, sorted(path.name for path in (root / "store").iterdir()) == before)

async def read():
    wanted = [
        Wanted(spec.index, memoryview(bytearray(spec.nbytes))) for spec in imported.manifest.blocks
    ]
    return [type(outcome) async for outcome in store.read(imported.model_id, wanted)]

print(set(asyncio.run(read())) == {Verified})
(root / "filler").unlink()
print(store.import_checkpoint(other).nbytes > 0)
"""


def test_a_full_disk_ends_an_import_and_harms_no_other_model(
    tiny: Path, wide: Path, tmp_path: Path
) -> None:
    """A real file system of 6 MiB, in a mount namespace of its own."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=6m none {tmp_path}"
    try:
        tried = subprocess.run([*alone, "sh", "-c", mount], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare(1)")
    if tried.returncode:
        pytest.skip(f"no mount namespaces here: {tried.stderr.decode().strip()}")
    inside = f'{mount} && exec "$0" -c "$@"'
    arguments = [sys.executable, FULL, str(tmp_path), str(tiny), str(wide)]
    child = subprocess.run(
        [*alone, "sh", "-c", inside, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.stderr == ""
    assert child.stdout.split("\n") == ["capacity True", "True", "True", ""]
    assert list(tmp_path.iterdir()) == []
