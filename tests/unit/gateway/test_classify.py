"""/v1/classify over HTTP, in front of a node that answers known classes."""

import asyncio
import base64
import io
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from PIL import Image

from shared.config import GatewayConfig
from shared.errors import BadInput
from shared.ids import ModelName
from shared.messages.serving import AttemptFailed, Sampling
from tests.unit.gateway.support import NAME, Cluster, replica, running

VIT = ModelName("vit")


def png(color: str = "red", size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), color).save(file, "PNG")
    return file.getvalue()


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


ASK: dict[str, Any] = {"model": VIT, "image": encoded(png()), "top_k": 3}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    config = GatewayConfig(max_body_bytes=4096, max_image_bytes=16384)
    async with running(replica(1), config=config) as cluster:
        record = await cluster.store_classifier(VIT)
        await cluster.add(record)
        await cluster.publish(replica(1), record=record)
        await cluster.until(lambda: len(cluster.loads[-1].models) == 2)
        cluster.nodes[1].script = lambda submit: [4]
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.service.url) as session:
        yield session


async def post(
    http: aiohttp.ClientSession, body: Any, route: str = "classify"
) -> tuple[int, dict[str, Any]]:
    given = {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
    async with http.post(f"/v1/{route}", **given) as response:
        return response.status, await response.json()


def form(**fields: Any) -> aiohttp.FormData:
    data = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            data.add_field(name, value, filename="image.png")
        else:
            data.add_field(name, value)
    return data


async def test_the_most_probable_classes(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, ASK)
    assert status == 200
    assert (answer["object"], answer["model"]) == ("classification", VIT)
    assert answer["id"].startswith("classify-req")
    assert answer["data"] == [
        {"label": "eel", "index": 4, "probability": math.exp(-1)},
        {"label": "fox", "index": 5, "probability": math.exp(-2)},
        {"label": "gnu", "index": 6, "probability": math.exp(-3)},
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    (submit,) = cluster.nodes[1].submits
    assert submit.image == bytes([255, 0, 0]) * 64
    assert (submit.tokens, submit.prompt_tokens, submit.max_tokens) == ((0,) * 5, 5, 1)
    assert submit.sampling == Sampling(logprobs=3)


@pytest.mark.parametrize(
    "body",
    [
        {"model": VIT, "image": f"data:image/png;base64,{encoded(png())}"},
        form(model=VIT, image=png()),
    ],
)
async def test_other_ways_to_send_it(
    body: Any, cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, body)
    assert status == 200, answer
    (submit,) = cluster.nodes[1].submits
    assert submit.image == bytes([255, 0, 0]) * 64
    assert submit.sampling == Sampling(logprobs=5)


async def test_no_more_classes_than_there_are(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].refusal = BadInput("seen")
    await post(http, ASK | {"top_k": 1000})
    await post(http, form(model=VIT, image=png(), top_k="2"))
    assert [submit.sampling.logprobs for submit in cluster.nodes[1].submits] == [9, 2]


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"model": VIT}, "missing required field `image`", "image"),
        ({"image": ASK["image"]}, "missing required field `model`", "model"),
        (ASK | {"top_k": 0}, "must be at least 1", "top_k"),
        (ASK | {"top_k": "all"}, "top_k: Expected `int | null`", "top_k"),
        (ASK | {"image": "???"}, "not valid base64", "image"),
        (ASK | {"image": "http://host/cat.png"}, "URLs are not fetched", "image"),
        (ASK | {"image": "data:image/png,abc"}, "the data URL must be", "image"),
        (ASK | {"image": encoded(b"no image")}, "cannot be read as JPEG or PNG", None),
        (ASK | {"image": encoded(png()[:-40])}, "cannot be read as JPEG or PNG", None),
        (form(image=png()), "the form has no such text field", "model"),
        (form(model=VIT), "the form has no file of this name", "image"),
        (form(model=VIT, image="text"), "the form has no file of this name", "image"),
        (form(model=VIT, image=png(), top_k="-1"), "must be a number", "top_k"),
        (form(model=VIT, image=png(), top_k="9" * 5000), "must be a number", "top_k"),
        ({**ASK, "model": NAME}, "generates text: use /v1/completions", None),
    ],
)
async def test_bad_requests(
    body: Any, says: str, param: str | None, cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert not cluster.nodes[1].submits


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"model": VIT, "prompt": "hi"}),
        ("chat/completions", {"model": VIT, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_classifier_generates_no_text(
    route: str, body: Any, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, body, route)
    assert status == 400
    assert "classifies images: use /v1/classify" in answer["error"]["message"]


async def test_unknown_models(http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, ASK | {"model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_images_have_a_limit_of_their_own(http: aiohttp.ClientSession) -> None:
    noise = io.BytesIO()
    Image.effect_noise((60, 60), 50).save(noise, "PNG")
    assert 3072 < len(noise.getvalue()) < 12288
    assert (await post(http, ASK | {"image": encoded(noise.getvalue())}))[0] == 200
    too_large = encoded(bytes(16384))
    status, answer = await post(http, ASK | {"image": too_large})
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert (await post(http, form(model=VIT, image=bytes(20000))))[0] == 413
    long = {"model": NAME, "prompt": "a" * 5000}
    assert (await post(http, long, "completions"))[0] == 413


async def test_models_say_what_they_are_for(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        tasks = {card["id"]: card["task"] for card in (await response.json())["data"]}
    assert tasks == {NAME: "text-generation", VIT: "image-classification"}


async def test_an_image_goes_to_another_node_when_its_node_fails(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    first, second = cluster.nodes[1], await cluster.node(2)
    record = cluster.records[-1]
    second.script = lambda submit: [4]

    first.pause_at = 0
    asking = asyncio.create_task(post(http, ASK))
    await first.submitted(1)
    await cluster.publish(replica(1), replica(2), record=record)
    submit = first.submits[0]
    failed = AttemptFailed(submit.request, submit.attempt, "peer_lost", "died")
    await first.send(submit, failed=failed)
    status, answer = await asking
    assert status == 200
    assert answer["data"][0]["label"] == "eel"
    assert [s.image for s in second.submits] == [submit.image]
    assert second.submits[0].attempt == submit.attempt + 1


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=" + "b" * 80, b"x"),
        ("multipart/form-data; boundary=b", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\nNone--b--\r\n"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n'
            b"Content-Transfer-Encoding: x\r\n\r\nvit\r\n--b--\r\n",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n'
            b"Content-Type: text/plain; charset=x\r\n\r\nvit\r\n--b--\r\n",
        ),
    ],
)
async def test_a_form_that_is_none_is_the_clients_error(
    http: aiohttp.ClientSession, kind: str, data: bytes
) -> None:
    async with http.post("/v1/classify", data=data, headers={"Content-Type": kind}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
