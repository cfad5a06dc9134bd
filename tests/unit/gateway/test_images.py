"""The pixels that transformers' own image processor makes; what is no image is refused."""

import asyncio
import io
import struct
import threading
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from services.gateway import images
from services.gateway.images import ImageDecoder, pixels_of
from shared.errors import BadInput
from shared.vision import image_input

SIZE = 24
ORIENTATION = 0x0112


def wanted(**changes: Any) -> Any:
    return image_input({"preprocessor_config": {"size": SIZE} | changes})


def picture(mode: str = "RGB", width: int = 40, height: int = 30) -> Image.Image:
    random = np.random.default_rng(3)
    image = Image.fromarray(random.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    return image.convert("RGB").convert(mode) if mode != "RGBA" else image


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def theirs(file: bytes, **changes: Any) -> np.ndarray[Any, Any]:
    """[3, height, width]: before it is rescaled and normalised."""
    processor = ViTImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, do_rescale=False, do_normalize=False, **changes
    )
    image = load_image(Image.open(io.BytesIO(file)))
    found: np.ndarray[Any, Any] = processor(image, return_tensors="np").pixel_values[0]
    return found


def assert_same(file: bytes, **changes: Any) -> None:
    pixels = pixels_of(file, wanted(**changes))
    ours = np.frombuffer(pixels, dtype=np.uint8).reshape(SIZE, SIZE, 3).transpose(2, 0, 1)
    assert np.array_equal(ours, theirs(file, **changes))


@pytest.mark.parametrize("resample", range(6))
def test_every_filter(resample: int) -> None:
    assert_same(saved(picture()), resample=resample)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
@pytest.mark.parametrize(("width", "height"), [(40, 30), (7, 90), (SIZE, SIZE), (1, 1)])
def test_every_kind_of_png(mode: str, width: int, height: int) -> None:
    assert_same(saved(picture(mode, width, height)))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_kind_of_jpeg(mode: str) -> None:
    assert_same(saved(picture(mode), "JPEG", progressive=mode == "L"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_as_its_exif_data_say(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    assert_same(saved(picture(), "JPEG", exif=exif))


def test_an_image_that_must_have_the_size() -> None:
    as_it_is = msgspec.structs.replace(wanted(), resample=None)
    right = picture(width=SIZE, height=SIZE)
    assert pixels_of(saved(right), as_it_is) == right.tobytes()
    with pytest.raises(BadInput, match="40 x 30 pixels; this model takes only 24 x 24"):
        pixels_of(saved(picture()), as_it_is)


def flipped(file: bytes, at: int) -> bytes:
    return file[:at] + bytes([file[at] ^ 0xFF]) + file[at + 1 :]


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"not an image",
        saved(picture())[:100],
        saved(picture())[:-100],
        saved(picture(), "JPEG")[:400],
        flipped(saved(picture()), 60),
        saved(picture(), "GIF"),
        saved(picture(), "TIFF"),
    ],
)
def test_what_is_no_image(file: bytes) -> None:
    with pytest.raises(BadInput, match="cannot be read as JPEG or PNG"):
        pixels_of(file, wanted())


def bomb(side: int) -> bytes:
    """A PNG that says it is so large."""
    file = saved(picture())
    header = b"IHDR" + struct.pack(">II", side, side) + file[24:29]
    return file[:12] + header + struct.pack(">I", zlib.crc32(header)) + file[33:]


@pytest.mark.parametrize(
    ("side", "says"), [(8000, "8000 x 8000 pixels, more than 50000000"), (40000, "exceeds limit")]
)
def test_a_large_image_is_not_decoded(side: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        pixels_of(bomb(side), wanted())


class Slow:
    """In place of `pixels_of`: ends when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: asyncio.Queue[bytes] = asyncio.Queue()
        self.end = threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(images, "pixels_of", self._decode)

    def _decode(self, file: bytes, _: Any) -> bytes:
        self._loop.call_soon_threadsafe(self.begun.put_nowait, file)
        self.end.wait()
        return file


async def test_the_loop_goes_on_while_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, decoder, file = Slow(monkeypatch), ImageDecoder(), saved(picture())
    decoding = asyncio.create_task(decoder.pixels(file, wanted()))
    async with asyncio.timeout(20):
        await slow.begun.get()
        slow.end.set()
        assert await decoding == file
    decoder.close()


async def test_images_that_are_decoded_at_a_time_share_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, file = Slow(monkeypatch), saved(picture())
    monkeypatch.setattr(images, "MAX_PIXELS", 2 * images.count_pixels(file))
    decoder = ImageDecoder()
    decoding = [asyncio.create_task(decoder.pixels(file, wanted())) for _ in range(4)]
    async with asyncio.timeout(20):
        await slow.begun.get()
        await slow.begun.get()
        decoding[0].cancel()  # its thread is still at it
        await asyncio.wait([decoding[0]])
        assert decoder._free == 0
        slow.end.set()
        assert await asyncio.gather(*decoding[1:]) == [file] * 3
        decoder._threads.shutdown()  # the thread of the first may be the last to end
        await asyncio.sleep(0.01)  # the loop hears of it
    assert decoder._free == images.MAX_PIXELS
    decoder.close()
