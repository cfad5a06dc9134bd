"""Models on real nodes: pulled, relayed, promoted, put to sleep, given back and removed."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from ctypes import Structure
from pathlib import Path
from typing import Any

import pytest

from services.node.engine.kernels import Kernels, Packing
from services.node.execution import worker
from services.node.execution.worker import Worker
from services.node.hosting import opening
from services.node.hosting.hosted import Hosted
from services.node.hosting.hosting import Hosting
from services.node.hosting.landings import Landings
from services.node.hosting.library import Library
from services.node.moving.events import Arrival, PullFailure
from shared import subjects, telemetry
from shared.bus.memory import MemoryObjectStore
from shared.clock import wall_ns
from shared.config import TelemetryConfig
from shared.errors import (
    BadInput,
    BusTimeout,
    CapacityExceeded,
    NotFound,
    StaleEpoch,
)
from shared.ids import ModelId
from shared.messages.pool import ModelRemove, Task, Tier
from tests.support.classifier import TINY_VIT, make_classifier
from tests.unit.node.cluster import ALL, BLOCKS, NAME, nodes
from tests.unit.node.gates import reading

FROM_A = dict.fromkeys(ALL, "a")
FIRST_HALF, SECOND_HALF = (0, 1, 2), (3, 4, 5)
WAIT_S = 100.0


# --- from disk, from peers, through relays ----------------------------------------


async def test_a_model_goes_from_disk_to_a_node_and_through_it_to_the_next(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.until_holds("a", {Tier.DISK: ALL})
        # In reverse: the relay learns of the plan before its source has a single block.
        await up.apply("c", dict.fromkeys(ALL, "b"), event="ev-2")
        await up.until_holds("c", {Tier.GPU: ()})
        await up.apply("b", FROM_A, event="ev-2")
        await up.apply("a", promote=ALL, event="ev-2", revision=3)
        for name, source, transport in (("a", "a", "disk"), ("b", "a", "tcp"), ("c", "b", "tcp")):
            arrivals = await up.until_arrived(name, ALL)
            assert sorted(m.block for m in arrivals) == list(ALL)
            for m in arrivals:
                assert (m.source, m.transport, m.event) == (source, transport, "ev-2")
                assert m.nbytes == up.record.block_bytes[m.block]
                assert m.started_ns <= m.first_byte_ns <= m.finished_ns
                assert m.generation == up.info(name).generation
                assert m.model_id == up.record.model_id
                assert m.revision == (3 if name == "a" else 0)
        await up.until_holds("a", {Tier.GPU: ALL, Tier.DISK: ALL})
        await up.until_holds("b", {Tier.GPU: ALL})
        await up.until_holds("c", {Tier.GPU: ALL})
        tokens = await up.generate("a", request="on a")
        assert len(tokens) == 8
        assert await up.generate("c", request="on c") == tokens
        assert await up.generate("c", "a", "b", request="on all") == tokens


async def test_blocks_that_are_held_are_reported_at_once(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await up.apply("a", promote=ALL, event="again")
        arrivals = await up.until_arrived("a", ALL, event="again")
        assert {(m.source, m.transport) for m in arrivals} == {("a", "held")}
        assert len(arrivals) == BLOCKS


async def test_a_newer_revision_goes_on_from_what_is_there(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.promoted("a")
        await up.apply("c", dict.fromkeys(FIRST_HALF, "a"))
        await up.apply("b", dict.fromkeys(ALL, "c"))  # waits for the second half
        await up.until_arrived("b", FIRST_HALF)
        await up.apply("b", FROM_A, revision=1)
        arrivals = await up.until_arrived("b", ALL)
        assert {(m.block, m.source) for m in arrivals if m.transport == "tcp"} == {
            *((block, "c") for block in FIRST_HALF),
            *((block, "a") for block in SECOND_HALF),
        }
        again = [m for m in arrivals if m.revision == 1]
        assert {m.block for m in again if m.transport == "held"} == set(FIRST_HALF)
        assert {m.block for m in again} == set(ALL)
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")


async def test_stale_plans_and_releases_are_refused_and_change_nothing(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with reading(monkeypatch) as gate:
            await up.apply("a", promote=ALL, revision=2)
            await gate.wait()
            with pytest.raises(StaleEpoch, match="revision 1 of event ev-1"):
                await up.apply("a", revision=1)
            with pytest.raises(StaleEpoch, match="generation"):
                await up.apply("a", revision=3, generation=7)
        await up.until_arrived("a", ALL)  # the promotion went on


async def test_a_planner_that_was_replaced_is_not_obeyed(tmp_path: Path, checkpoint: Path) -> None:
    """It comes back to life and sends what it had in hand: plans of any event, and releases."""
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.apply("a", promote=FIRST_HALF, event="old", epoch=3)
        await up.apply("a", promote=ALL, event="new", epoch=4)
        with pytest.raises(StaleEpoch, match="planner epoch 3 came after epoch 4"):
            await up.apply("a", event="old", revision=1, epoch=3)
        with pytest.raises(StaleEpoch, match="planner epoch 3 came after epoch 4"):
            await up.release("a", epoch=3)
        arrivals = await up.until_arrived("a", ALL, "new")
        assert {m.cause for m in arrivals} == {"new"}
        await up.release("a", epoch=4)
        await up.nothing_leaked("a")


async def test_the_story_of_a_model_names_the_events(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.apply("a", promote=(0,), event="ev-7")
        await up.until_arrived("a", (0,))
        await up.release("a")
        node, model = up.services["a"], up.record.model_id
        story = [(step.cause, step.text.split(": ")[0]) for step in await node.story(model)]
        assert story == [
            ("ev-7", "follows revision 0"),
            ("ev-7", "active"),
            ("ev-7", "block 0 came from a (disk)"),
            ("ev-7", "runs block 0"),
            ("release_model", "stands by"),
            ("release_model", "gives its space back"),
        ]
        of_event = [step.text.split(": ")[0] for step in await node.story("ev-7")]
        assert of_event == [text for _, text in story[:4]]


async def test_the_story_of_an_event_a_model_and_a_source_has_the_pulls(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.promoted("a")
        await up.apply("c", {0: "a", 1: "a", 2: "a"}, event="ev-7")
        await up.until_arrived("c", (0, 1, 2))
        for subject in ("ev-7", up.record.model_id, "a"):
            told = [step.text.split(": ")[0] for step in await up.services["c"].story(subject)]
            assert "pulls blocks 0-2 from a" in told
            for block in range(3):
                assert any(text.startswith(f"block {block} came from a (") for text in told)
            assert {step.cause for step in await up.services["c"].story(subject)} == {"ev-7"}


async def test_what_a_model_does_not_have_is_bad_input(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        for wrong in ({"promote": (BLOCKS,)}, {"promote": (-1,)}, {"pulls": {BLOCKS: "a"}}):
            with pytest.raises(BadInput, match="no block"):
                await up.apply("b", **wrong)
        with pytest.raises(BadInput, match="no address is known of nobody"):
            await up.apply("b", {0: "nobody"})
        await up.nothing_leaked("b")


# --- room ---------------------------------------------------------------------------


async def test_an_arena_that_is_too_small_is_left_as_it_was(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.start("b", arena_bytes=300 << 10)
        with pytest.raises(CapacityExceeded, match="bytes are wanted"):
            await up.apply("b", FROM_A)
        await up.nothing_leaked("b")


async def test_an_engine_that_refuses_a_model_leaves_its_space_free(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise CapacityExceeded("no KV for it")

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "open_model", refuse)
            with pytest.raises(CapacityExceeded, match="no KV"):
                await up.apply("b", FROM_A)
        await up.nothing_leaked("b")
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)


class Tokenizers:
    """How often nodes ask for one, and what their engines are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = 0
        """The first so many times."""
        self.asked: asyncio.Semaphore = asyncio.Semaphore(0)
        self.given: asyncio.Queue[bytes] = asyncio.Queue()
        times = itertools.count(1)

        async def file(library: Library, model: ModelId, name: str) -> bytes:
            self.asked.release()
            if next(times) <= self.fails:
                raise BusTimeout("no answer")
            return name.encode()

        monkeypatch.setattr(opening, "TOKENIZER_RETRY_S", 0.001)
        monkeypatch.setattr(Library, "file", file)
        monkeypatch.setattr(
            Worker, "use_tokenizer", lambda _, __, data: self.given.put_nowait(data)
        )


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> Tokenizers:
    return Tokenizers(monkeypatch)


async def test_a_tokenizer_is_asked_for_until_it_comes(
    tmp_path: Path, checkpoint: Path, tokenizers: Tokenizers
) -> None:
    tokenizers.fails = 3
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.apply("a", promote=ALL)
        assert await tokenizers.given.get() == b"tokenizer.json"


async def test_a_tokenizer_is_not_asked_for_before_the_first_block(
    tmp_path: Path, checkpoint: Path, tokenizers: Tokenizers
) -> None:
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.apply("a")
        await up.release("a")
        assert tokenizers.asked.locked()


async def test_a_model_that_wakes_or_comes_back_is_not_packed_again(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packings: list[Packing] = []
    run = Kernels.run

    def watched(self: Kernels, argument: Structure, threads: int) -> None:
        if isinstance(argument, Packing):
            packings.append(argument)
        run(self, argument, threads)

    monkeypatch.setattr(Kernels, "run", watched)
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        once = len(packings)
        assert once > 0
        tokens = await up.generate("a", request="before")
        await up.release("a", keep=Tier.HOST)
        await up.apply("a", event="wakes")
        await up.until_arrived("a", ALL, event="wakes")
        assert await up.generate("a", request="after") == tokens
        assert len(packings) == once
        await up.release("a")
        await up.apply("a", promote=ALL, event="from disk")
        await up.until_arrived("a", ALL, event="from disk")
        assert len(packings) == once
        assert await up.generate("a", request="back") == tokens


async def test_a_sleeping_model_comes_to_the_engine_in_portions(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its blocks is larger than a portion."""
    attach, ready = Worker.attach, asyncio.Semaphore(0)

    async def slow(
        self: Worker, model_id: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        await ready.acquire()
        return await attach(self, model_id, blocks)

    monkeypatch.setattr(worker, "PORTION", 1)

    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a", request="before")
        await up.release("a", keep=Tier.HOST)
        monkeypatch.setattr(Worker, "attach", slow)
        await up.apply("a", promote=ALL, event="wake")  # answered before any block is there
        for block in ALL[:2]:
            ready.release()
            await up.until_arrived("a", (block,), event="wake")
        await up.until_holds("a", {Tier.GPU: ALL[:2], Tier.HOST: ALL[2:], Tier.DISK: ALL})
        ready.release()
        await up.release("a", keep=Tier.HOST)  # while the next block is on its way
        await up.until_holds("a", {Tier.HOST: ALL, Tier.DISK: ALL})
        for _ in ALL:
            ready.release()
        await up.apply("a", promote=ALL, event="wake again")
        await up.until_arrived("a", ALL, event="wake again")
        assert await up.generate("a", request="after") == tokens


async def test_small_blocks_come_to_the_engine_together(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a model that sleeps, and those that have landed while another was attached. Requests
    wait for the first one, which comes before the others."""
    attach, asked, gate = Worker.attach, list[tuple[int, ...]](), asyncio.Event()

    async def slow(
        self: Worker, model_id: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        asked.append(tuple(blocks))
        await gate.wait()
        return await attach(self, model_id, blocks)

    monkeypatch.setattr(Worker, "attach", slow)
    async with nodes(tmp_path, checkpoint, "a") as up:
        landed = Delivered(monkeypatch)
        await up.apply("a", promote=ALL)
        await landed.until(BLOCKS)
        gate.set()
        await up.until_arrived("a", ALL)
        assert sorted(block for blocks in asked for block in blocks) == [*ALL]
        assert len(asked) <= 3
        asked.clear()
        await up.release("a", keep=Tier.HOST)
        await up.apply("a", promote=ALL, event="wake")
        await up.until_arrived("a", ALL, event="wake")
        assert asked == [ALL[:1], ALL[1:]]
        assert await up.generate("a")


async def test_a_tokenizer_comes_again_when_the_model_wakes(
    tmp_path: Path, checkpoint: Path, tokenizers: Tokenizers
) -> None:
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        assert await tokenizers.given.get() == b"tokenizer.json"
        await up.release("a", keep=Tier.HOST)
        await up.apply("a")
        assert await tokenizers.given.get() == b"tokenizer.json"


async def test_a_tokenizer_is_fetched_once(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not fetched again when the model wakes, nor where the model was imported."""
    fetched, given = list[str](), asyncio.Queue[bytes]()
    get = MemoryObjectStore.get

    async def watched(store: MemoryObjectStore, name: str) -> bytes:
        fetched.append(name)
        return await get(store, name)

    monkeypatch.setattr(MemoryObjectStore, "get", watched)
    monkeypatch.setattr(Worker, "use_tokenizer", lambda _, __, data: given.put_nowait(data))
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a", "b") as up:
        tokenizer = up.record.files["tokenizer.json"]
        await up.promoted("a")
        assert await given.get() == (checkpoint / "tokenizer.json").read_bytes()
        assert tokenizer not in fetched
        for event in ("comes", "wakes"):
            await up.apply("b", FROM_A, event=event)
            await up.until_arrived("b", ALL, event=event)
            assert await given.get() == (checkpoint / "tokenizer.json").read_bytes()
            await up.release("b", keep=Tier.HOST)
        assert fetched.count(tokenizer) == 1


async def test_an_image_classifier_has_none(tmp_path: Path, tokenizers: Tokenizers) -> None:
    make_classifier(tmp_path / "vit", TINY_VIT)
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, tmp_path / "vit", "a") as up:
        assert (up.record.task, up.record.files) == (Task.CLASSIFY, {})
        await up.promoted("a")
        await up.until_holds("a", {Tier.GPU: ALL, Tier.DISK: ALL})
        assert tokenizers.asked.locked()


async def test_a_tokenizer_is_not_asked_for_when_the_model_was_given_up(
    tmp_path: Path, checkpoint: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers.fails = 1000
    made: list[Hosted] = []
    free = Hosting._free

    async def watched(self: Hosting, hosted: Hosted, cause: str) -> None:
        made.append(hosted)
        await free(self, hosted, cause)

    monkeypatch.setattr(Hosting, "_free", watched)
    async with asyncio.timeout(WAIT_S), nodes(tmp_path, checkpoint, "a") as up:
        await up.apply("a", promote=ALL)
        for _ in range(2):
            await tokenizers.asked.acquire()
        await up.release("a")
        (hosted,) = made
        assert hosted.bringing is not None
        await asyncio.wait([hosted.bringing])
        assert hosted.bringing.cancelled()


@pytest.mark.parametrize("refuses", [False, True])
async def test_bytes_come_while_the_engine_opens_the_model(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    opening, may_open = asyncio.Event(), asyncio.Event()
    open_model = Worker.open_model

    async def slowly(*args: Any) -> None:
        opening.set()
        await may_open.wait()
        if refuses:
            raise CapacityExceeded("no KV for it")
        await open_model(*args)

    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.promoted("a")
        await up.apply("c", dict.fromkeys(ALL, "b"))
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "open_model", slowly)
            taking_up = asyncio.ensure_future(up.apply("b", FROM_A))
            await opening.wait()
            await up.until_arrived("c", ALL)  # through b, whose engine is not open yet
            assert up.arrived("b") == []
            may_open.set()
            if refuses:
                with pytest.raises(CapacityExceeded, match="no KV"):
                    await taking_up
                await up.nothing_leaked("b")
                assert up.failed("b") == []  # the refusal says it all
            else:
                await taking_up
                await up.until_arrived("b", ALL)
                assert await up.generate("b", request="on b")


async def test_a_sleeping_copy_can_be_woken_where_there_is_room_for_nothing_else(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a", request="before")
        await up.release("a", keep=Tier.HOST)
        await up.until_holds("a", {Tier.HOST: ALL, Tier.DISK: ALL})
        with pytest.raises(NotFound):
            await up.submit("a", request="asleep")
        before = wall_ns()
        await up.apply("a", promote=ALL, event="wake")
        woken = await up.until_arrived("a", ALL, event="wake")
        assert {m.transport for m in woken} == {"held"}
        (asked,) = {m.started_ns for m in woken}
        assert before < asked < min(m.first_byte_ns for m in woken)
        await up.until_holds("a", {Tier.GPU: ALL, Tier.DISK: ALL})
        assert await up.generate("a", request="after") == tokens


async def test_a_sleeping_copy_is_a_source(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        await up.release("a", keep=Tier.HOST)
        await up.release("a", keep=Tier.HOST)
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        await up.release("a")
        await up.nothing_leaked("a")


# --- giving back in the midst of things ---------------------------------------------


@pytest.mark.parametrize("keep", [None, Tier.HOST])
async def test_release_while_blocks_come(
    tmp_path: Path, checkpoint: Path, keep: Tier | None
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.apply("a", promote=FIRST_HALF)
        await up.apply("b", FROM_A)
        await up.until_arrived("b", FIRST_HALF)
        await up.release("b", keep=keep)  # a part of a model is not worth keeping
        await up.nothing_leaked("b")
        await up.apply("a", promote=ALL, revision=1)
        await up.apply("b", FROM_A, event="ev-2")
        await up.until_arrived("b", ALL, event="ev-2")
        await up.until_arrived("a", ALL)
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")


async def test_a_block_that_landed_before_a_release_is_not_taken_for_one_after_it(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks wait to be attached while the model is released and its space is taken again."""
    attach = Worker.attach
    entered, opened = asyncio.Event(), asyncio.Event()

    async def slow(
        self: Worker, model: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        if not entered.is_set():
            entered.set()
            await opened.wait()
        return await attach(self, model, blocks)

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        monkeypatch.setattr(Worker, "attach", slow)
        landed = Delivered(monkeypatch)
        await up.apply("b", FROM_A)
        await entered.wait()
        await landed.until(BLOCKS)
        released = asyncio.create_task(up.release("b"))
        applied = asyncio.create_task(up.apply("b", event="ev-2"))
        await asyncio.sleep(0)
        opened.set()
        await asyncio.gather(released, applied)
        await up.until_holds("b", {Tier.GPU: ()})
        assert up.arrived("b", event="ev-2") == []


class Delivered:
    """Counts what the data planes deliver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._changed = asyncio.Event()
        land = Landings.land

        def counted(landings: Landings, item: Arrival | PullFailure) -> None:
            land(landings, item)
            self._count += 1
            self._changed.set()

        monkeypatch.setattr(Landings, "land", counted)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._count < count:
                self._changed.clear()
                await self._changed.wait()


async def test_release_during_a_promotion_waits_for_the_disk(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with reading(monkeypatch, after=2) as gate:
            await up.apply("a", promote=ALL)
            await up.until_arrived("a", (0, 1))
            released = asyncio.create_task(up.release("a"))
            await up.until_holds("a", {Tier.GPU: (0, 1), Tier.DISK: ALL})
            assert not released.done()  # threads write into the span
            gate.open()
            await released
        await up.nothing_leaked("a")
        assert {m.block for m in up.arrived("a")} == {0, 1}
        await up.promoted("a")


async def test_a_node_that_stops_waits_for_the_disk(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with reading(monkeypatch) as gate:
            await up.apply("a", promote=ALL)
            await gate.wait()
            stopping = asyncio.create_task(up.stop("a"))
            await asyncio.wait([stopping], timeout=0.3)
            assert not stopping.done()  # the thread writes into the arena
            gate.open()
            await stopping


async def test_sequences_of_a_released_model_end_and_say_so(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", settings={"step_floor_s": 0.02}) as up:
        await up.promoted("a")
        await up.submit("a", max_tokens=400)
        await up.tokens.until(lambda: len(up.tokens_of("r")) >= 2)
        await up.release("a", keep=Tier.HOST)
        await up.tokens.until(lambda: up.over("r"))
        failure = up.failure("r")
        assert failure is not None
        assert failure.code == NotFound.code
        assert [t.index for t in up.tokens_of("r")] == list(range(len(up.tokens_of("r"))))


async def test_many_releases_and_removals_at_once(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        await asyncio.gather(
            up.release("b"),
            up.release("b", keep=Tier.HOST),
            up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME)),
            up.release("b"),
            up.release("a", keep=Tier.HOST),
        )
        await up.until_holds("a", {})
        await up.until_holds("b", {})
        await up.nothing_leaked("a")


async def test_plans_and_releases_in_any_order_end_in_a_sound_state(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        calls: list[asyncio.Task[object]] = []
        for number in range(30):
            keep = (None, Tier.HOST)[number // 3 % 2]
            work = (
                up.apply("b", FROM_A, event=f"ev-{number}")
                if number % 3
                else up.release("b", keep=keep)
            )
            calls.append(asyncio.create_task(work))
            if number % 5 == 0:
                await asyncio.sleep(0.002)
        for call in asyncio.as_completed(calls):
            await call
            up.services["b"].validate()
        await up.until_arrived("b", ALL, event="ev-29")  # what it held before is no sign
        await up.until_holds("b", {Tier.GPU: ALL})
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")
        await up.release("b")
        await up.nothing_leaked("b")


# --- traces -------------------------------------------------------------------------


async def test_opening_the_model_is_part_of_the_plan_in_the_trace(
    tmp_path: Path, checkpoint: Path
) -> None:
    telemetry.configure("b", TelemetryConfig(trace_dir=str(tmp_path / "traces")))
    try:
        async with nodes(tmp_path, checkpoint, "a", "b") as up:
            await up.apply("b", FROM_A)
    finally:
        telemetry.shutdown()
    lines = (tmp_path / "traces" / "b.jsonl").read_text().splitlines()
    spans = {span["name"]: span for span in map(json.loads, lines)}
    assert spans["open_model"]["parent_id"] == spans["apply_plan"]["span_id"]
