"""Models of the Hub, fetched from a server that answers as the Hub does, over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from services.local import hub
from services.local.hub import HubError
from services.local.hub_name import HubModel, parse
from shared.errors import BadInput, CapacityExceeded, LambdaScaleError, NotFound
from tests.support.hub import COMMIT, TOKEN, Hub, serving

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"again",
}
WANTED = ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # it keeps whole ones
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library waits before it tries again
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving(FILES) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        yield found


def fetched(cache: Path, text: str = "hf:owner/tiny") -> tuple[Path, int]:
    """The directory, and how many bytes came."""
    model = parse(text)
    listing = hub.list_files(model)
    into = hub.directory(cache, model, listing)
    came: list[int] = []
    hub.fetch(model, listing, into, came.append)
    return into, sum(came)


def names(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:Qwen/Qwen2.5-0.5B-Instruct", HubModel("Qwen/Qwen2.5-0.5B-Instruct")),
        ("hf:gpt2", HubModel("gpt2")),
        ("hf:owner/name@refs/pr/1", HubModel("owner/name", "refs/pr/1")),
    ],
)
def test_names(text: str, expected: HubModel) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c", "hf:a b", "hf:owner/name@"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(BadInput, match="hf:OWNER/NAME"):
        parse(text)


def test_what_is_needed_of_a_model_comes(served: Hub, tmp_path: Path) -> None:
    into, came = fetched(tmp_path)
    assert names(into) == WANTED
    assert {name: (into / name).read_bytes() for name in WANTED} == {
        name: FILES[name] for name in WANTED
    }
    assert came == sum(len(FILES[name]) for name in WANTED)
    assert COMMIT in str(into)


def test_nothing_comes_twice(served: Hub, tmp_path: Path) -> None:
    fetched(tmp_path)
    served.asked.clear()
    assert fetched(tmp_path)[1] == 0
    assert served.asked == []


def test_a_fetch_that_broke_off_is_gone_on_with(served: Hub, tmp_path: Path) -> None:
    served.dies_after = 1000
    with pytest.raises(HubError, match=r"503.*what has come is kept"):
        fetched(tmp_path)
    [part] = tmp_path.rglob("*" + hub.PART)
    assert part.stat().st_size == 1000
    served.dies_after = None
    served.asked.clear()
    into, came = fetched(tmp_path)
    assert (into / "model.safetensors").read_bytes() == WEIGHTS
    assert ("model.safetensors", "bytes=1000-") in served.asked
    assert came < len(WEIGHTS)
    assert not [name for name in names(into) if name.endswith(hub.PART)]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_the_listing_says_are_thrown_away(
    served: Hub, tmp_path: Path, name: str
) -> None:
    served.said[name] = bytes(len(FILES[name]))
    with pytest.raises(HubError, match=f"{name} of owner/tiny came with other bytes"):
        fetched(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(name)]
    served.said.clear()
    assert names(fetched(tmp_path)[0]) == WANTED


def test_a_gated_model_says_where_to_ask(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated = True
    with pytest.raises(HubError, match=r"gated: ask for access at http://.*/owner/tiny.*HF_TOKEN"):
        fetched(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names(fetched(tmp_path)[0]) == WANTED


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("hf:owner/none", NotFound, "no model owner/none that you may see.*HF_TOKEN"),
        ("hf:owner/tiny@none", NotFound, "owner/tiny has no revision none"),
        ("hf:owner/-", BadInput, "no name of a model"),
    ],
)
def test_what_is_not_there_is_said(
    served: Hub, text: str, kind: type[LambdaScaleError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        hub.list_files(parse(text))


def test_a_model_without_safetensors_is_refused(served: Hub) -> None:
    del served.files["model.safetensors"]
    with pytest.raises(BadInput, match="no weights as safetensors"):
        hub.list_files(HubModel("owner/tiny"))


def test_a_hub_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9 cannot be reached.*HF_ENDPOINT"):
        hub.list_files(HubModel("owner/tiny"))


def test_a_disk_without_room_is_said_first(served: Hub, tmp_path: Path) -> None:
    model = HubModel("owner/tiny")
    huge = hub.Listing(COMMIT, (hub.HubFile("model.safetensors", 10**18, "", ""),))
    with pytest.raises(CapacityExceeded, match="--cache"):
        hub.fetch(model, huge, tmp_path, lambda _: None)
    assert served.asked == []
