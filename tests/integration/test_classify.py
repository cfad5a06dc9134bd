"""Image classification with real processes: transformers' answers, whatever happens meanwhile."""

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTForImageClassification, pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from shared import subjects
from shared.ids import InstanceId, NodeId
from shared.messages.scaling import EventState, ScaleAccepted, SetInstances
from tests.support.classifier import TINY_VIT, make_classifier
from tests.support.cluster import LIMIT_S, MODEL, Running, running

SLOW_LINKS = {
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.7 MB takes 3 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.1",
    "LAMBDASCALE_NODE_SLOTS": "2",
}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "vit"
    make_classifier(path, TINY_VIT)
    return path


@pytest.fixture(scope="module")
def oracle(classifier: Path) -> Any:
    """transformers' pipeline: an image to all classes and their probabilities."""
    torch.set_num_threads(1)
    return pipeline(
        "image-classification",
        model=ViTForImageClassification.from_pretrained(classifier),
        image_processor=ViTImageProcessorPil.from_pretrained(classifier),
        top_k=TINY_VIT.labels,
    )


def images(count: int) -> list[Image.Image]:
    """Images of many sizes, the same in every run."""
    random = np.random.default_rng(5)
    shapes = random.integers(20, 90, (count, 2))
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in shapes
    ]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


async def ask(up: Running, image: Image.Image) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "image": base64.b64encode(png(image)).decode(),
        "top_k": TINY_VIT.labels,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S * 2)) as session,
        session.post(f"{up.url}/v1/classify", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def check(oracle: Any, asked: Sequence[Image.Image], answers: Sequence[dict[str, Any]]) -> None:
    for image, answer in zip(asked, answers, strict=True):
        expected = oracle(image)
        assert [each["label"] for each in answer["data"]] == [each["label"] for each in expected]
        actual = torch.tensor([each["probability"] for each in answer["data"]])
        assert (actual - torch.tensor([each["score"] for each in expected])).abs().max() < 1e-5


async def test_from_cold_to_a_replica(tmp_path: Path, classifier: Path, oracle: Any) -> None:
    """The model is in no node's memory: the first image brings it up."""
    async with running(tmp_path, classifier, nodes=2, min_instances=0) as up:
        assert not up.watch.arrivals
        asked = images(6)
        answers = await asyncio.gather(*(ask(up, image) for image in asked))
        check(oracle, asked, answers)
        assert {arrival.block for arrival in up.watch.arrivals} == set(range(up.record.n_blocks))
        url = f"{up.url}/v1/models/{MODEL}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            card = await response.json()
        assert (card["task"], card["max_model_len"]) == ("image-classification", 17)
        await up.replicas(0)


async def test_scale_out_under_load(tmp_path: Path, classifier: Path, oracle: Any) -> None:
    """Over paths of nodes that hold a part of it, and across the switch to replicas."""
    async with running(tmp_path, classifier, nodes=4, settings=SLOW_LINKS) as up:
        asked = images(120)
        answers = await asyncio.gather(*(ask(up, image) for image in asked))
        check(oracle, asked, answers)
        event = up.watch.scale_out()
        assert event is not None
        assert event.state is not EventState.FAILED
        assert any(token.stages > 1 for token in up.watch.partial_tokens)


async def test_a_node_is_killed_while_it_classifies(
    tmp_path: Path, classifier: Path, oracle: Any
) -> None:
    settings = {"LAMBDASCALE_NODE_STEP_FLOOR_S": "0.3", "LAMBDASCALE_NODE_SLOTS": "2"}
    async with running(tmp_path, classifier, nodes=2, settings=settings) as up:
        scale = SetInstances(name=MODEL, instances=2)
        await up.bus.request(subjects.PLANNER_SCALE, scale, ScaleAccepted, timeout=60.0)
        await up.replicas(2)
        asked = images(12)
        load = asyncio.gather(*(ask(up, image) for image in asked))
        await up.until(lambda: serving(up, NodeId("node-1")) > 0, "images on node-1")
        up.kill("node-1")
        check(oracle, asked, await load)


def serving(up: Running, node: NodeId) -> int:
    load = up.watch.load
    return load.instance_requests.get(InstanceId(f"replica-{node}"), 0) if load else 0
