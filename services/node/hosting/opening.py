"""The models in the arena that the engine has open."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from structlog.stdlib import BoundLogger

from services.node.core.residency import Mode
from services.node.hosting.hosted import Hosted
from services.node.hosting.library import Library
from services.node.hosting.promotion import Spawn
from services.node.keeper.link import KeeperLink
from services.node.parts import AnyWorker
from shared.containment import is_containable
from shared.ids import ModelId
from shared.vectors import is_encoder
from shared.vision import is_classifier

ENGINE = "engine"
"""User of a span."""
TOKENIZER = "tokenizer.json"
TOKENIZER_RETRY_S = 0.5
"""After a first failure to fetch it; doubles with each that follows."""
TOKENIZER_RETRY_MAX_S = 30.0


class Opening:
    """Opens hosted models for the engine, attaches their blocks, and closes them."""

    def __init__(
        self,
        worker: AnyWorker,
        library: Library,
        keeper: KeeperLink,
        log: BoundLogger,
        *,
        changed: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        """`changed` is called when a model can run whole."""
        self._worker = worker
        self._library = library
        self._keeper = keeper
        self._log = log
        self._changed = changed
        self._spawn = spawn

    async def open(self, hosted: Hosted) -> None:
        """Opens the model for the engine, which has none of its blocks yet."""
        if hosted.residency.mode is Mode.STANDBY:
            hosted.span.hold(ENGINE)
            try:
                await self._worker.open_model(
                    hosted.model, hosted.manifest, hosted.residency.room, hosted.devices
                )
            except BaseException:
                hosted.span.release(ENGINE)
                raise
            hosted.residency = hosted.residency.activate()
            self._keeper.note(hosted.kept)
            hosted.tell(hosted.event, "active")

    async def activate(self, hosted: Hosted) -> None:
        """Opens the model for the engine, with every block that is held."""
        await self.open(hosted)
        asleep = hosted.residency.held - hosted.residency.runnable
        for error in (await self.attach(hosted, sorted(asleep))).values():
            raise error

    def lift(self, hosted: Hosted, block: int) -> None:
        """Begins to bring a block that has landed to the device, if there is one."""
        if hosted.residency.mode is Mode.ACTIVE:
            self._worker.lift(hosted.model, block, hosted.space.block(block))

    async def attach(self, hosted: Hosted, blocks: Sequence[int]) -> Mapping[int, BaseException]:
        """Has the engine run blocks that are held. Returns what is wrong with those that it cannot
        run."""
        if not blocks:
            return {}
        buffers = {block: hosted.space.block(block) for block in blocks}
        failed = await self._worker.attach(hosted.model, buffers)
        there = [block for block in blocks if block not in failed]
        config = hosted.manifest.config
        generates = not (is_classifier(config) or is_encoder(config))
        if there and generates and not hosted.residency.runnable:
            # Not before the first block has come: nothing may hold up the first reads of a plan,
            # and nothing is generated without a block.
            work = self._bring_tokenizer(hosted.model)
            hosted.bringing = self._spawn(work, f"tokenizer of {hosted.model}")
        for block in there:
            hosted.residency = hosted.residency.run(block)
            hosted.tell(hosted.event, f"runs block {block}")
        if 0 in there:
            hosted.first_block.set()
        if there and len(hosted.residency.runnable) == hosted.residency.room.size:
            self._changed()  # before that, each block is reported by itself
        return failed

    async def close(self, hosted: Hosted, cause: str, *, asleep: bool = False) -> None:
        """Once it returns, the engine has no view of the model's bytes. `asleep`: these stay where
        they are."""
        if hosted.bringing is not None:
            hosted.bringing.cancel()
        hosted.first_block.set()  # the engine tells whoever waits that it has closed the model
        hosted.first_block = asyncio.Event()
        await self._worker.close_model(hosted.model, asleep=asleep)
        if hosted.residency.mode is Mode.ACTIVE:
            hosted.span.release(ENGINE)
            hosted.residency = hosted.residency.stand_by()
            self._keeper.note(hosted.kept)
            hosted.tell(cause, "stands by")

    async def _bring_tokenizer(self, model: ModelId) -> None:
        """Brings the model's tokenizer, which requests with grammars need. Tries again until the
        asset store answers. If the model has no tokenizer, that is logged once."""
        pause_s = TOKENIZER_RETRY_S
        while True:
            try:
                data = await self._library.file(model, TOKENIZER)
                if data is not None:
                    self._worker.use_tokenizer(model, data)
                break
            except BaseException as error:  # its boundary: only grammars wait for it
                if not is_containable(error):
                    raise
                self._log.warning("no tokenizer yet", model=model, error=repr(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, TOKENIZER_RETRY_MAX_S)
        if data is None:
            self._log.warning("no structured output: the model has no tokenizer", model=model)
