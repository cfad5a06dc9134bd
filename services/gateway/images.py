"""From an image file to the pixels that a model sees.

The same pixels as transformers makes of it: `load_image` turns it as its EXIF data say and makes it
RGB, ViTImageProcessor resizes it with Pillow.
"""

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, ImageOps

from shared.errors import BadInput
from shared.vision import ImageInput

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 50_000_000
"""Of an image as it was sent. Decoded it takes some 10 bytes a pixel, however small its file."""
THREADS = 4
"""Images that are decoded at once."""


class ImageDecoder:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")

    async def pixels(self, file: bytes, wanted: ImageInput) -> bytes:
        """As `pixels_of`, while the loop goes on."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, pixels_of, file, wanted)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def pixels_of(file: bytes, wanted: ImageInput) -> bytes:
    """Rows of pixels, red, green and blue a byte each. BadInput if the file is not an image, is
    broken, too large, or not of the size wanted where that can't be changed."""
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadInput(
                    f"the image has {image.width} x {image.height} pixels, more than {MAX_PIXELS}"
                )
            ImageOps.exif_transpose(image, in_place=True)
            return _resized(image.convert("RGB"), wanted).tobytes()
    except BadInput:
        raise
    except Exception as error:  # what Pillow raises for broken files has no common type
        formats = " or ".join(FORMATS)
        raise BadInput(f"the image cannot be read as {formats}: {error}") from error


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
