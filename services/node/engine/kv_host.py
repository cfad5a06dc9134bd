"""The host tier's memory, and copies of pages between it and the memory of the engine's device.

Pages are copied between steps, a portion at a time (`services.node.core.kv_host`), so that
sequences that run wait for no more than that. On a GPU the copies have a stream of their own, and
the engine's stream waits for them where it has to: before it writes to pages that were saved, and
before it reads pages that were restored. The stream copies in order, and each saved page has memory
of its own. So nothing is read before it is whole, and nothing is overwritten before it is copied.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch

from services.node.core.kv import PAGE, Restoration
from services.node.core.kv_host import (
    PORTION_S,
    TRIAL_BYTES,
    CopyRate,
    HostTier,
    PageKey,
    restoration,
)
from services.node.engine.kv_model import KvModel
from shared import telemetry
from shared.ids import ModelId

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source)"""


class Copies(Protocol):
    rate: CopyRate

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for such a page. RuntimeError: there is none."""

    def copy(self, pairs: Sequence[Pair]) -> bool:
        """Copies pages once what the engine has begun is done. Returns whether they are whole."""

    def settle(self) -> None:
        """Whatever the engine begins from now on finds all copies done."""


class CpuCopies:
    def __init__(self) -> None:
        self.rate = CopyRate()

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def copy(self, pairs: Sequence[Pair]) -> bool:
        began = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        self.rate.add(_nbytes(pairs), time.perf_counter() - began)
        return True

    def settle(self) -> None:
        """Every copy is whole at once."""


class CudaCopies:
    """Through page-locked memory. To be used on the engine's thread."""

    def __init__(self, device: torch.device) -> None:
        self.rate = CopyRate()
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        """(event before, event after, bytes) of copies that were not timed yet."""

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        # torch keeps page-locked memory that is given back, and hands it out again only once the
        # copies from and to it are done.
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, pairs: Sequence[Pair]) -> bool:
        self._time()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        before, after = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        before.record(self._stream)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        after.record(self._stream)
        self._begun.append((before, after, _nbytes(pairs)))
        return False

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _time(self) -> None:
        while self._begun and self._begun[0][1].query():  # type: ignore[no-untyped-call]
            before, after, nbytes = self._begun.popleft()
            self.rate.add(nbytes, before.elapsed_time(after) / 1e3)


class KvHost:
    """Pages in host memory, and the copies."""

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        token_s: Callable[[ModelId], float] = lambda model_id: 0.0,
    ) -> None:
        """`token_s`: seconds of prefill for a token of the model, as measured; 0: not known."""
        self.tier = HostTier[torch.Tensor](nbytes)
        self.saved = 0
        """Pages copied to host memory so far, and in `restored` those copied back."""
        self.restored = 0
        self.copies: Copies = CudaCopies(device) if device.type == "cuda" else CpuCopies()
        self._token_s = token_s
        self._left_s = PORTION_S
        """Time that is left to save pages before the next step."""
        self._log = telemetry.logger("kv host tier")

    def begin_step(self) -> None:
        self._left_s = PORTION_S

    def begin_portion(self, page_bytes: int) -> int:
        """How many pages are brought back before the next step. For them, others may be saved."""
        self.begin_step()
        return self.copies.rate.portion(page_bytes, PORTION_S)

    def save(self, model_id: ModelId, model: KvModel, pages: Sequence[tuple[int, bytes]]) -> None:
        """Copies pages that are about to be overwritten to host memory, unless they lie there. If
        there is no time for all, the last ones are copied. If it takes longer there and back than
        to compute it, nothing is copied, but for a trial now and then. `pages`: (page, digest)"""
        token_s, rate = self._token_s(model_id), self.copies.rate
        worth = restoration(1, 2 * model.page_bytes, token_s, rate).worth
        if not (worth or rate.tries()):
            return
        keys = [(model_id, digest) for _, digest in pages]
        self.tier.touch(keys)
        new = [
            (key, page_of(model, page))
            for key, (page, _) in zip(keys, pages, strict=True)
            if self.tier.find(key) is None
        ]
        if not new or self._left_s <= 0:
            return
        most = rate.portion(model.page_bytes, self._left_s)
        if not worth:
            most = min(most, max(1, TRIAL_BYTES // model.page_bytes))
        pairs = list(self._room(new[-most:], model.page_bytes))
        self._left_s -= len(pairs) * model.page_bytes / rate.bytes_per_s
        if pairs:
            self.copies.copy(pairs)
            self.copies.settle()
            self.saved += len(pairs)

    def _room(self, new: Iterable[tuple[PageKey, torch.Tensor]], nbytes: int) -> Iterable[Pair]:
        for key, source in new:
            try:
                memory = self.tier.keep(key, nbytes, partial(self.copies.memory, source))
            except RuntimeError as error:
                self._log.warning("no memory for the host tier", nbytes=nbytes, error=str(error))
                return
            if memory is not None:
                yield memory, source

    def restoration(self, model_id: ModelId, pages: int, nbytes: int) -> Restoration:
        """What it takes to have `pages` pages on the device, of which `nbytes` lie here."""
        return restoration(pages, nbytes, self._token_s(model_id), self.copies.rate)

    def bring(self, pairs: Sequence[Pair]) -> bool:
        """Copies pages to the device. Returns whether they are whole; else `settle` comes first."""
        self.restored += len(pairs)
        return not pairs or self.copies.copy(pairs)


def page_of(model: KvModel, page: int) -> torch.Tensor:
    """[layers, PAGE, 2, kv heads, head_dim]"""
    return model.view(model.layers)[:, page * PAGE : (page + 1) * PAGE]


def _nbytes(pairs: Sequence[Pair]) -> int:
    return sum(target.nbytes for target, _ in pairs)
