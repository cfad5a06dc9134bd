"""Pages of a sequence's KV that are copied to another node, or from there.

A loan keeps its pages from being freed, so any thread may copy while the engine goes on. Nobody
writes to pages that are being filled but the thread that copies. Only positions are lent that are
final. If they end within a page, the engine may write to later ones of that page meanwhile, which
is copied whole: what comes of those means nothing.

The bytes of a loan, its *image*, are its pages one after the other, each as
[layers, PAGE, 2, kv heads, head_dim] in the cache's data type. Kernels have their own order within
a page (`form`). An image lies in the host's memory, or on the device beside the cache.
"""

import threading
from collections.abc import Iterator

import torch

from services.node.core.kv import PAGE, Image
from services.node.memory.device import Event
from shared.errors import BadInput, NotFound
from shared.ids import ModelId


class KvLoan:
    def __init__(
        self,
        model_id: ModelId,
        pages: tuple[int, ...],
        shift: int,
        layers: torch.Tensor,
        form: str,
        erased: int = 0,
    ) -> None:
        """`pages`, `shift`: see `KvSequence`. `layers`: the cache of the layers that are lent, see
        `KvCache.of_layers`. `form`: what the bytes mean, which must be the same on both nodes.
        `erased`: the number of positions at the end of the last page that filling it erases."""
        self.model_id = model_id
        self.pages = pages
        self.shift = shift
        self.form = form
        self.written: Event | None = None
        """Comes once everything that was begun before the loan is done. None: it is."""
        self._layers = layers
        self._erased = erased
        self._lock = threading.Lock()
        self._over = False

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self._page_bytes

    @property
    def _page_bytes(self) -> int:
        layers, _, *slot = self._layers.shape
        return layers * PAGE * torch.Size(slot).numel() * self._layers.itemsize

    def read(self, image: Image) -> None:
        """Copies the pages into `image`. NotFound: the loan is over."""
        for parts in self._together(image):
            with self._lock:
                for page, part in parts:
                    part.copy_(self._page(page))
                _finish(image)

    def fill(self, image: Image) -> None:
        """Copies the pages out of `image`. NotFound: the loan is over."""
        for parts in self._together(image):
            with self._lock:
                for page, part in parts:
                    if self._erased and page == self.pages[-1]:
                        part[:, PAGE - self._erased :] = 0
                    self._page(page).copy_(part)
                _finish(image)

    def end(self) -> None:
        """Once this returns, no page is touched any more."""
        with self._lock:
            self._over = True

    def _together(self, image: Image) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Pages with their parts of the image, as many as are copied while the loan cannot end.
        Copies on a device are begun at once. Before the first one, everything is done that the
        engine had begun: its kernels may still read or write these pages for an earlier owner."""
        if self.written is not None:
            self.written.synchronize()
        parts = list(self._parts(image))
        yield from [parts] if isinstance(image, torch.Tensor) else ([part] for part in parts)

    def _parts(self, image: Image) -> Iterator[tuple[int, torch.Tensor]]:
        if len(image) != self.nbytes:
            raise BadInput(f"an image of {len(image)} bytes for KV of {self.nbytes}")
        on_device = isinstance(image, torch.Tensor)
        flat = image if on_device else torch.frombuffer(image, dtype=torch.uint8)
        layers, _, *slot = self._layers.shape
        for page, piece in zip(self.pages, flat.split(self._page_bytes), strict=True):
            yield page, piece.view(self._layers.dtype).view(layers, PAGE, *slot)

    def _page(self, page: int) -> torch.Tensor:
        if self._over:
            raise NotFound(f"KV of model {self.model_id} is not to be copied any more")
        return self._layers[:, page * PAGE : (page + 1) * PAGE]


def _finish(image: Image) -> None:
    """Waits for the copies that this thread has begun on a device. Those to or from the host are
    done already."""
    if isinstance(image, torch.Tensor) and image.is_cuda:
        torch.cuda.current_stream(image.device).synchronize()
