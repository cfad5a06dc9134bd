"""The KV cache: pages of PAGE positions, taken as a sequence grows.

A sequence has the same page numbers in all layers it uses, and attention reads whole pages (paged
attention: Kwon et al., SOSP 2023, section 4). Nothing is reserved: a sequence that finds no free
page has to wait until others are freed.

All models share one piece of memory, in slabs that change hands with the models' load (`Slabs`).
Each model has a view of all of it. So nothing is copied when a slab changes hands, and no address
changes, which graphs have recorded. A slab looks like this to its model:

    slab       | layer 0: pages 0..n | layer 1: pages 0..n | ... |

A page number counts pieces of memory as large as one layer's part of a page, over the whole memory.
It is where the page's part of layer 0 lies. The part of layer l lies l x n pieces on, in all slabs:
that is a tensor whose layers overlap. A model uses only the first n numbers of each of its slabs.

A sequence that has KV in a few layers takes parts of pages, whose other parts other sequences take
(`Pages`). A part of w layers is the pieces p, p + n, ... p + (w - 1) x n of a slab, and its number
is p. The sequence's first layer a lies in p. So its page has the number p - a x n: the part of its
layer l lies where that of any page with this number would. Such a number may be less than the first
one of the slab. So the memory begins with a slab that no model has and nobody writes to.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b

import torch

from services.node.core.kv import PAGE, Need, Restoration, pages_of
from services.node.core.kv_slabs import Slabs
from services.node.engine.base import SequenceKey
from services.node.engine.budget import KvBudget
from services.node.engine.kv_host import KvHost, Pair, page_of
from services.node.engine.kv_loan import KvLoan
from services.node.engine.kv_memory import KvMemory
from services.node.engine.kv_model import KvModel
from services.node.engine.kv_sequence import KvSequence, Restoring
from services.node.engine.pages import Pages
from shared.errors import CapacityExceeded, NotFound
from shared.ids import NO_ADAPTER, ModelId

NO_NEEDS: Mapping[Need, int] = {}


class KvCache:
    """`budget`: the memory that all models share, or a number of positions for one model."""

    def __init__(
        self,
        budget: KvBudget | int,
        device: torch.device,
        kept: KvMemory | None = None,
        host: KvHost | None = None,
    ) -> None:
        """`kept`: where it is kept, if not on `device` alone. `host`: keeps what is evicted
        here."""
        self.changes = 0
        """Grows when sequences end: whatever was planned with an older value is outdated."""
        self._budget = budget
        self._device = device
        self._kept = kept or KvMemory(device)
        self.host = host
        self._memory: torch.Tensor | None = None
        self._slabs = Slabs(0)
        self._slab_bytes = 0
        self._unit = 1
        """Bytes of a page of the model that opened first."""
        self._models: dict[ModelId, KvModel] = {}
        self._sequences: dict[SequenceKey, KvSequence] = {}
        self._restoring: dict[SequenceKey, Restoring] = {}

    @property
    def capacity(self) -> int:
        """Positions of the model that opened first which the whole memory holds. 0: none is
        open."""
        return self._slabs.count * self._slab_bytes // self._unit * PAGE

    @property
    def used(self) -> int:
        """How much of `capacity` is in pages that sequences use."""
        used = sum(
            model.pages.used_layers * (model.page_bytes // len(model.layers))
            for model in self._models.values()
        )
        return -(-used // self._unit) * PAGE

    def share(self, model_id: ModelId) -> int:
        """Positions that the model can have while all models need more than they have."""
        model = self._models.get(model_id)
        return self._slabs.share(model_id) * model.pages.per_slab * PAGE if model else 0

    def longest(self, model_id: ModelId) -> int:
        """Positions that the model has room for if it has all the memory."""
        return self._slabs.count * self._models[model_id].pages.per_slab * PAGE

    def parts(self, model_id: ModelId, layers: range) -> int:
        """Into how many parts a page is divided for sequences that have KV in these layers only."""
        model = self._models.get(model_id)
        return model.parts(layers) if model else 1

    def free_for(self, model_id: ModelId, promised: Mapping[Need, int] = NO_NEEDS) -> int:
        """Positions of whole pages that the model's sequences can still take, if what is promised
        is taken. Below 0: it will be more than there is."""
        model = self._models.get(model_id)
        if model is None or not model.page_bytes:
            return 0
        pages: Counter[ModelId] = Counter()
        for (each, parts), positions in promised.items():
            if (found := self._models.get(each)) and found.page_bytes:
                pages[each] += found.pages.pages_for(pages_of(positions), parts)
        own = pages.pop(model_id, 0)
        slabs = {other: self._slabs_for(other, count) for other, count in pages.items()}
        more = max(0, self._slabs.takeable(model_id, slabs))
        return (model.pages.available + more * model.pages.per_slab - own) * PAGE

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Lets models that have more than their share vacate memory for the sequences of others
        that wait: positions by model, of all models for which sequences wait."""
        slabs = {model: self._slabs_for(model, pages_of(n)) for model, n in wanted.items()}
        for slab in self._slabs.want(slabs):
            self._vacate(slab)

    def _slabs_for(self, model_id: ModelId, pages: int) -> int:
        """How many more slabs the model needs to have room for `pages` more."""
        model = self._models.get(model_id)
        if model is None or not model.page_bytes:
            return 0
        more = pages - model.pages.available
        return max(0, -(-more // model.pages.per_slab))

    def open_model(
        self,
        model_id: ModelId,
        layers: range,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        weight: int = 1,
        erased: bool = False,
        transposed: bool = False,
    ) -> None:
        """Gives the model a share of the memory, by `weight`. `layers`: those that may be run
        here. On a CPU only pages that are used become resident. CapacityExceeded if too little
        memory is left for it, or for its share. `transposed`: whether kernels keep keys transposed
        in pages.

        `erased`: what an earlier sequence left in the page in which a sequence ends is erased,
        because attention reads that page whole, and a mask gives a foreign value no weight only if
        the value is finite.
        """
        heads, piece = (n_kv_heads, head_dim), PAGE * 2 * n_kv_heads * head_dim * dtype.itemsize
        if not piece:
            nothing = torch.empty(0, dtype=dtype, device=self._device)
            pages = Pages(0, len(layers), lambda _: 0)
            self._models[model_id] = KvModel(nothing, layers, heads, pages, 0, erased, "")
            return
        if self._memory is None:
            self._lay_out(len(layers) * piece)
        assert self._memory is not None
        exact = self._slab_bytes % piece == 0
        per_slab = (self._slab_bytes // piece - (not exact)) // len(layers)
        if per_slab <= 0 and self._budget:
            raise CapacityExceeded(
                f"a page of KV cache of model {model_id} takes {len(layers) * piece} bytes, and "
                f"the memory is divided in pieces of {self._slab_bytes}: raise node.kv_bytes"
            )
        self._slabs.open(model_id, weight)
        pages = Pages(
            per_slab,
            len(layers),
            lambda slab: -(-(slab + 1) * self._slab_bytes // piece),
            partial(self._leave, model_id),
        )
        form = f"{PAGE} x 2 x {n_kv_heads} x {head_dim} {dtype}" + ", transposed" * transposed
        self._models[model_id] = KvModel(
            self._memory.view(dtype), layers, heads, pages, len(layers) * piece, erased, form
        )

    def _lay_out(self, page: int) -> None:
        """Takes the memory. `page`: bytes of a page of the first model."""
        count, nbytes = 1, 0
        if isinstance(self._budget, int):
            nbytes = pages_of(self._budget) * page
        else:
            count, nbytes = self._budget.slabs(page)
        if self._device.type == "cuda" and count > 1:  # memory takes room there even if not used
            count -= 1
        try:
            self._memory = self._kept.allocate((count + 1) * nbytes)
        except RuntimeError as error:
            raise CapacityExceeded(
                f"the memory for KV caches, {count * nbytes} bytes, cannot be allocated: lower "
                f"node.kv_bytes"
            ) from error
        self._slabs, self._slab_bytes, self._unit = Slabs(count), nbytes, page

    def close_model(self, model_id: ModelId) -> None:
        self.free(tuple(s.key for s in self._sequences.values() if s.model_id == model_id))
        if model := self._models.get(model_id):
            for loan in tuple(model.loans):
                loan.end()
                self.give_back(loan)
        self._models.pop(model_id, None)
        self._slabs.close(model_id)
        if not any(model.page_bytes for model in self._models.values()):
            self._memory, self._slabs = None, Slabs(0)

    def of_layers(self, model_id: ModelId, layers: range) -> torch.Tensor:
        """The cache of these layers, [len(layers), slots, 2, kv heads, head_dim], where index 0 of
        the third dimension holds keys and 1 values. Page i is slots i * PAGE up to (i + 1) *
        PAGE."""
        return self._models[model_id].view(layers)

    def uses(self, adapter: ModelId) -> bool:
        """Whether a sequence has KV that is computed with the adapter."""
        return any(sequence.adapter == adapter for sequence in self._sequences.values())

    def find(self, key: SequenceKey) -> KvSequence | None:
        return self._sequences.get(key)

    def start(
        self,
        model_id: ModelId,
        blocks: tuple[int, int],
        layers: range,
        key: SequenceKey,
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> KvSequence:
        """A new sequence, which has no pages yet."""
        if model_id not in self._models:
            raise NotFound(f"model {model_id} has no KV cache: open it first")
        sequence = KvSequence(key, model_id, blocks, layers, limit, adapter)
        self._place(sequence, layers)
        # With an adapter the same tokens have other KV.
        sequence.digest = adapter.encode()
        self._sequences[key] = sequence
        return sequence

    def _place(self, sequence: KvSequence, layers: range) -> None:
        """Says which parts of pages the sequence takes from now on."""
        if layers:
            model = self._models[sequence.model_id]
            sequence.parts, sequence.shift = model.parts(layers), model.shift(layers)

    def adopt(self, sequence: KvSequence, tokens: tuple[int, ...]) -> int:
        """Gives a sequence that has just started the cached pages of `tokens`, without the page of
        the last token (which must be run, to draw what follows). Returns the number of
        positions."""
        pages = self._models[sequence.model_id].pages
        for start in range(0, len(tokens) - PAGE, PAGE):
            digest = _chained(sequence.digest, tokens[start : start + PAGE])
            page = pages.find(digest)
            if page is None:
                break
            if pages.read(page):
                self._slabs.begin(pages.slab_of(page))
            sequence.pages.append(page)
            sequence.known, sequence.digest = sequence.known + 1, digest
            sequence.length += PAGE
        return sequence.length

    def restorable(self, sequence: KvSequence, tokens: tuple[int, ...]) -> Restoration | None:
        """What host memory has of the pages of `tokens` after those that `adopt` found. If it is
        worth it, `restore` brings them."""
        if self.host is None:
            return None
        model_id, model = sequence.model_id, self._models[sequence.model_id]
        digests, digest, copied = list[bytes](), sequence.digest, 0
        for start in range(sequence.length, len(tokens) - PAGE, PAGE):
            digest = _chained(digest, tokens[start : start + PAGE])
            if model.pages.find(digest) is None:
                if self.host.tier.find((model_id, digest)) is None:
                    break
                copied += 1
            digests.append(digest)
        if not copied:
            return None
        found = self.host.restoration(model_id, len(digests), copied * model.page_bytes)
        if found.worth:
            self.host.tier.touch((model_id, digest) for digest in reversed(digests))
            self._restoring[sequence.key] = Restoring(digests)
        return found

    def restore(self, sequence: KvSequence) -> bool:
        """Brings the next portion of the sequence's pages from host memory, as far as they are
        still there and the model may take pages for them. Returns whether more will come. The
        sequence has the positions that are whole."""
        assert self.host is not None
        restoring = self._restoring[sequence.key]
        self._arrive(sequence, restoring)
        if self.host.bring(self._coming(sequence, restoring, self.host)):
            self._arrive(sequence, restoring)
        if restoring.digests or restoring.coming:
            return True
        del self._restoring[sequence.key]
        if not sequence.length:
            self.free((sequence.key,))
        return False

    def _coming(self, sequence: KvSequence, restoring: Restoring, host: KvHost) -> list[Pair]:
        """Gives the sequence pages for the next portion, and returns what has to be copied."""
        model_id, model = sequence.model_id, self._models[sequence.model_id]
        pairs: list[Pair] = []
        most = host.begin_portion(model.page_bytes)
        while restoring.digests and len(pairs) < most:
            digest = restoring.digests.popleft()
            page, source = model.pages.find(digest), host.tier.find((model_id, digest))
            if page is not None:  # another sequence has computed or restored it meanwhile
                if model.pages.read(page):
                    self._slabs.begin(model.pages.slab_of(page))
            elif source is not None and self.free_for(model_id) > 0:
                (page,) = self._take(sequence, 1)
                pairs.append((page_of(model, page), source))
            else:
                restoring.digests.clear()
                break
            sequence.pages.append(page)
            restoring.coming.append((page, digest))
        return pairs

    def _arrive(self, sequence: KvSequence, restoring: Restoring) -> None:
        """What was copied last is whole: it can be read and shared from now on."""
        assert self.host is not None
        self.host.copies.settle()
        for page, digest in restoring.coming:
            self._models[sequence.model_id].pages.keep(page, digest)
            sequence.known, sequence.digest = sequence.known + 1, digest
            sequence.length += PAGE
        restoring.coming.clear()

    def position_bytes(self, model_id: ModelId) -> int:
        """Bytes of one position in all layers."""
        model = self._models.get(model_id)
        return model.page_bytes // PAGE if model else 0

    def lend(self, key: SequenceKey, layers: range, first: int, stop: int) -> KvLoan:
        """The KV of positions first <= position < stop in these layers, with all of the pages in
        which they lie. NotFound: the sequence does not have them."""
        sequence = self._sequences.get(key)
        if sequence is None or not (set(layers) <= set(sequence.layers)) or not layers:
            raise NotFound(f"there is no KV of sequence {key} in layers {layers}")
        if not 0 <= first < stop <= sequence.length:
            raise NotFound(f"sequence {key} has {sequence.length} positions, not {first} to {stop}")
        model = self._models[sequence.model_id]
        pages = tuple(sequence.pages[first // PAGE : pages_of(stop)])
        for page in pages:
            model.pages.read(page + sequence.shift)
        form = f"{len(layers)} x {model.form}"
        erased = -stop % PAGE if model.erased else 0
        loan = KvLoan(sequence.model_id, pages, sequence.shift, model.view(layers), form, erased)
        model.loans.add(loan)
        return loan

    def give_back(self, loan: KvLoan) -> None:
        """Frees what a loan kept. A loan of a model that was closed is over already."""
        model = self._models.get(loan.model_id)
        if model is None or loan not in model.loans:
            return
        model.loans.remove(loan)
        for page in reversed(loan.pages):
            self._give_back(model.pages, page + loan.shift)

    def missing(
        self, sequence: KvSequence | None, model_id: ModelId, layers: range, end: int
    ) -> tuple[int, int]:
        """What a sequence that has KV in these layers lacks for `end` positions: (into how many
        parts its pages are divided, how many such parts). None: it has not begun."""
        parts = self.parts(model_id, layers)
        has = len(sequence.pages) if sequence and sequence.parts == parts else 0
        return parts, max(0, pages_of(end) - has) if layers else 0

    def require(self, model_id: ModelId, wanted: Iterable[tuple[int, int]]) -> None:
        """CapacityExceeded if the model cannot take all these parts of pages (`missing`)."""
        pages: Counter[Need] = Counter()
        for parts, count in wanted:
            pages[model_id, parts] += count
        more = self.free_for(model_id, {need: count * PAGE for need, count in pages.items()})
        if pages.total() and more < 0:
            raise CapacityExceeded(
                f"{pages.total() * PAGE} more positions of KV cache are needed, "
                f"{self.free_for(model_id)} of {self.longest(model_id)} are free: wait for running "
                f"sequences to end, or raise node.kv_bytes"
            )

    def extend(self, sequence: KvSequence, count: int, proposed: int = 0) -> None:
        """Makes room for `count` more positions, to be written before the next attention. The last
        `proposed` of them may be taken back. CapacityExceeded changes nothing."""
        end = sequence.length + count
        new = pages_of(end) - len(sequence.pages)
        if sequence.layers and new > 0:
            sequence.pages += self._take(sequence, new)
            if self._models[sequence.model_id].erased:
                layers = self.of_layers(sequence.model_id, sequence.layers)
                self._kept.erase(sequence.model_id, layers, sequence.pages[-1:])
        sequence.length, sequence.proposed = end, proposed

    def run_on(self, sequence: KvSequence, stop: int, layers: range) -> None:
        """The stage that began the sequence goes on to block `stop`, so that it has these layers.
        Its positions stay the same. CapacityExceeded changes nothing."""
        new = range(sequence.layers.stop if sequence.layers else layers.start, layers.stop)
        if new:
            self._move(sequence, layers)
        # The page in which it ends, and those that it had for proposed tokens.
        last = sequence.pages[sequence.length // PAGE :]
        if new and last and self._models[sequence.model_id].erased:
            self._kept.erase(sequence.model_id, self.of_layers(sequence.model_id, new), last)
        sequence.blocks, sequence.layers = (sequence.blocks[0], stop), layers

    def _move(self, sequence: KvSequence, layers: range) -> None:
        """Gives the sequence pages that have these layers, and copies what it has so far."""
        model, had, shift = self._models[sequence.model_id], sequence.pages, sequence.shift
        parts, new = sequence.parts, model.parts(layers)
        if sequence.layers and new == parts:
            return
        sequence.pages = []
        self._place(sequence, layers)
        try:
            sequence.pages = self._take(sequence, pages_of(sequence.length))
        except CapacityExceeded:
            sequence.pages, sequence.parts, sequence.shift = had, parts, shift
            raise
        if had:  # perhaps further ones too, for proposed tokens that were taken back
            so_far = model.view(sequence.layers)
            self._kept.copy(sequence.model_id, so_far, had, sequence.pages)
        for page in reversed(had):
            self._give_back(model.pages, page + shift)

    def truncate(self, sequence: KvSequence, length: int) -> None:
        """Takes back the proposed positions from `length` on. The sequence keeps their pages, since
        it will need them again."""
        assert sequence.length - sequence.proposed <= length <= sequence.length
        sequence.length, sequence.proposed = length, 0

    def cut(self, sequence: KvSequence, length: int) -> None:
        """Takes the positions from `length` on back, and their pages."""
        left = pages_of(length)
        pages = self._models[sequence.model_id].pages
        for page in reversed(sequence.pages[left:]):
            self._give_back(pages, page + sequence.shift)
        del sequence.pages[left:]
        sequence.length = length

    def keep(self, sequence: KvSequence, position: int, tokens: Iterable[int]) -> None:
        """Records that the positions from `position` on are written, with these tokens, in all
        layers of the model. Pages that they fill can be shared from now on. If several sequences
        computed the same page, the copy of one of them is shared. A sequence that began as a stage
        of a path, and ran on to the model's end, shares nothing: its first tokens are not known."""
        if position != sequence.known * PAGE + len(sequence.tail):
            return
        sequence.tail += tokens
        while len(sequence.tail) >= PAGE:
            sequence.digest = _chained(sequence.digest, sequence.tail[:PAGE])
            del sequence.tail[:PAGE]
            page = sequence.pages[sequence.known]
            sequence.known += 1
            self._models[sequence.model_id].pages.keep(page, sequence.digest)

    def free(self, keys: tuple[SequenceKey, ...]) -> None:
        for key in keys:
            sequence = self._sequences.pop(key, None)
            if self._restoring.pop(key, None) is not None and self.host is not None:
                self.host.copies.settle()
            if sequence is not None:
                sequence.live = False
                self.changes += 1
                for page in reversed(sequence.pages):
                    pages = self._models[sequence.model_id].pages
                    self._give_back(pages, page + sequence.shift)

    def _take(self, sequence: KvSequence, count: int) -> list[int]:
        """Free pages first, then those of further slabs, then those of cached prefixes: the
        model's own, unless it has less than its share of the slabs."""
        model_id, parts, shift = sequence.model_id, sequence.parts, sequence.shift
        self.require(model_id, [(parts, count)])
        pages = self._models[model_id].pages
        whole = pages.pages_for(count, parts)
        while pages.free < whole and (slab := self._slabs.take(model_id)) is not None:
            pages.add_slab(slab)
        below = pages.available + whole < self.share(model_id) // PAGE
        while (pages.free if below else pages.available) < whole:
            found = self._slabs.unused(model_id)
            if found is None:
                break
            loser, slabs = found
            self._vacate(self._models[loser].pages.stalest(slabs))
            slab = self._slabs.take(model_id)
            assert slab is not None
            pages.add_slab(slab)
        after = sequence.pages[-1] + shift if sequence.pages else None
        new = pages.take(count, after, parts)
        for page in new:
            self._slabs.begin(pages.slab_of(page))
        return [page - shift for page in new]

    def _give_back(self, pages: Pages, page: int) -> None:
        slab = pages.slab_of(page)
        if pages.give_back(page):
            self._slabs.end(slab)
            if self._slabs.is_leaving(slab) and not self._slabs.is_used(slab):
                pages.drop_slab(slab)
                self._slabs.give(slab)

    def _leave(self, model_id: ModelId, evicted: list[tuple[int, bytes]]) -> None:
        if self.host is not None:
            self.host.save(model_id, self._models[model_id], evicted)

    def _vacate(self, slab: int) -> None:
        """Nothing more is put into the slab. It changes hands once no sequence uses it."""
        owner = self._slabs.owner(slab)
        assert owner is not None
        pages = self._models[owner].pages
        pages.close_slab(slab)
        if not self._slabs.is_used(slab):
            pages.drop_slab(slab)
            self._slabs.give(slab)


def _chained(digest: bytes, tokens: Iterable[int]) -> bytes:
    """The digest of all tokens up to the end of a page, made from the digest of the page before.
    The hash is cryptographic, so nobody can craft a prompt that finds the KV of another."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=16).digest()
