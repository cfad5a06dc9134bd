"""From an image file to the pixels that a model sees.

The pixels are the same as transformers': `load_image` rotates the image as its EXIF data say and
converts it to RGB, and ViTImageProcessor resizes it with Pillow.
"""

import asyncio
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from PIL import Image, ImageOps

from shared.errors import BadInput
from shared.vision import ImageInput

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 50_000_000
"""Limit for an image as it was sent, and for all that are decoded at a time. Decoding takes about
10 bytes for each pixel, however small the file."""
THREADS = 4
"""The number of images that are decoded at once."""


class ImageDecoder:
    """Decodes several images at a time, as long as they have no more pixels than one may have:
    small files may become large."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        self._free = MAX_PIXELS
        """Pixels that may be decoded beside those that are being decoded."""
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def pixels(self, file: bytes, wanted: ImageInput) -> bytes:
        """The same as `pixels_of`, while the loop goes on."""
        loop = asyncio.get_running_loop()
        count = await loop.run_in_executor(self._threads, count_pixels, file)
        async with self._turn:
            while self._free < count:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        decoding = loop.run_in_executor(self._threads, pixels_of, file, wanted)
        decoding.add_done_callback(lambda _: self._give_back(count))
        return await asyncio.shield(decoding)  # the thread ends it, even if whoever asked has gone

    def _give_back(self, count: int) -> None:
        self._free += count
        self._freed.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def count_pixels(file: bytes) -> int:
    """Of the image, as its header says. BadInput if the file is no image, or too large an image."""
    with _opened(file) as image:
        return image.width * image.height


@contextmanager
def _opened(file: bytes) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadInput(
                    f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}"
                )
            yield image
    except BadInput:
        raise
    except Exception as error:  # Pillow's errors for broken files have no common type
        formats = " or ".join(FORMATS)
        raise BadInput(f"the image cannot be read as {formats}: {error}") from error


def pixels_of(file: bytes, wanted: ImageInput) -> bytes:
    """Rows of pixels, one byte each for red, green and blue. BadInput if the file is no image, is
    broken or too large, or has the wrong size and may not be resized."""
    with _opened(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return _resized(image.convert("RGB"), wanted).tobytes()


def _resized(image: Image.Image, wanted: ImageInput) -> Image.Image:
    size = (wanted.size, wanted.size)
    if wanted.resample is not None:
        return image.resize(size, Image.Resampling(wanted.resample))
    if image.size != size:
        raise BadInput(
            f"the image has {image.width} x {image.height} pixels; this model takes only "
            f"{wanted.size} x {wanted.size}"
        )
    return image
