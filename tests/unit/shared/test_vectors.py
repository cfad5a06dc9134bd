"""How a checkpoint's files say that vectors are made."""

import json
from typing import Any

import pytest

from shared.errors import CorruptCheckpoint, UnsupportedModel
from shared.messages.serving import Pooling
from shared.vectors import MODULES, POOLING, VectorRule, is_encoder, vector_rule

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules."


def files(pooling: Any = None, modules: Any = None) -> dict[str, bytes]:
    found = {POOLING: pooling, MODULES: modules}
    return {name: json.dumps(value).encode() for name, value in found.items() if value is not None}


def modules(*types: str) -> list[dict[str, Any]]:
    return [{"idx": index, "type": kind} for index, kind in enumerate(types)]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, VectorRule(Pooling.MEAN, True)),
        ({"pooling": {}}, VectorRule(Pooling.MEAN, True)),
        ({"pooling": {"pooling_mode_cls_token": True}}, VectorRule(Pooling.CLS, True)),
        (
            {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}},
            VectorRule(Pooling.MEAN, True),
        ),
        ({"pooling": {"pooling_mode_lasttoken": True}}, VectorRule(Pooling.LAST, True)),
        ({"pooling": {"pooling_mode": "cls"}}, VectorRule(Pooling.CLS, True)),
        (
            {"modules": modules(OLD + "Transformer", OLD + "Pooling")},
            VectorRule(Pooling.MEAN, False),
        ),
        (
            {"modules": modules(NEW + "transformer.Transformer", NEW + "normalize.Normalize")},
            VectorRule(Pooling.MEAN, True),
        ),
    ],
)
def test_rules(given: dict[str, Any], rule: VectorRule) -> None:
    assert vector_rule(files(**given), encoder=True) == rule


def test_a_decoder_without_files_has_its_last_state() -> None:
    assert vector_rule({}, encoder=False) == VectorRule(Pooling.LAST, True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "max_tokens"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "weightedmean"),
        (
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            "cls_token with mean_tokens",
        ),
        ({"modules": modules(OLD + "Dense")}, "module Dense"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        vector_rule(files(**given), encoder=True)


@pytest.mark.parametrize("given", [{"pooling": []}, {"modules": {}}, {"modules": [{"idx": 0}]}])
def test_files_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        vector_rule(files(**given), encoder=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["BertModel"]}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": "BertModel"}, False),
        ({}, False),
    ],
)
def test_encoders(config: dict[str, Any], expected: bool) -> None:
    assert is_encoder(config) == expected
