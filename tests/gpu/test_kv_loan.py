"""Copies of KV pages that stay on the GPU, and those that come to the host."""

import pytest
import torch

from services.node.core.kv import PAGE
from services.node.engine.kv import KvCache
from services.node.memory.checksum import checksum
from tests.gpu import NEEDS_GPU
from tests.unit.node.engine.test_kv import LAYERS, MODEL, available, open_model, start

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
COUNT = 2 * PAGE + 3


def filled(key: str) -> KvCache:
    """A cache on the GPU, with a sequence whose positions differ."""
    kv = KvCache(8 * PAGE, CUDA)
    open_model(kv, MODEL)
    sequence = start(kv, key)
    kv.extend(sequence, COUNT)
    for number, page in enumerate(sequence.pages):
        there = kv.of_layers(sequence.model_id, LAYERS)[:, page * PAGE : (page + 1) * PAGE]
        there.copy_(torch.arange(there.numel(), device=CUDA).view_as(there) + number)
    torch.cuda.synchronize()
    return kv


@pytest.mark.parametrize(("on_device"), [True, False])
def test_pages_arrive_unchanged_and_both_devices_come_to_one_checksum(on_device: bool) -> None:
    here, there = filled("r#1"), KvCache(8 * PAGE, CUDA)
    open_model(there, MODEL)
    there.extend(start(there, "r#2"), COUNT)
    lent, wanted = here.lend("r#1", LAYERS, 0, COUNT), there.lend("r#2", LAYERS, 0, COUNT)
    image = torch.zeros(lent.nbytes, dtype=torch.uint8, device=CUDA)
    memory = memoryview(bytearray(lent.nbytes))
    lent.read(image)
    lent.read(memory)
    assert image.cpu().numpy().tobytes() == bytes(memory)
    assert checksum(image) == checksum(torch.frombuffer(memory, dtype=torch.uint8))
    wanted.fill(image if on_device else memory)
    again = torch.zeros(lent.nbytes, dtype=torch.uint8, device=CUDA)
    wanted.read(again)
    came = image.cpu().numpy().tobytes() if on_device else bytes(memory)
    assert again.cpu().numpy().tobytes() == came
    for kv, loan in ((here, lent), (there, wanted)):
        loan.end()
        kv.give_back(loan)
    here.free(("r#1",))
    assert available(here) == 8
