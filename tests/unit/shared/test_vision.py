"""preprocessor_config.json and id2label, as transformers reads them."""

from typing import Any

import pytest

from shared.errors import CorruptCheckpoint, UnsupportedModel
from shared.vision import ImageInput, image_input, is_classifier, labels

THIRD = (1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read(**changes: Any) -> ImageInput:
    return image_input({"preprocessor_config": changes})


def test_defaults_are_those_of_transformers() -> None:
    assert read() == read(size=None, resample=None, do_resize=None)
    found = read()
    assert (found.size, found.resample) == (224, 2)
    assert (found.factor, found.mean, found.std) == THIRD


def test_all_that_is_given() -> None:
    found = read(
        image_processor_type="ViTImageProcessor",
        size={"height": 384, "width": 384},
        resample=3,
        rescale_factor=0.5,
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.4, 0.5, 0.6],
        return_tensors="pt",
    )
    assert found == ImageInput(
        size=384, resample=3, factor=0.5, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )
    assert found.nbytes == 384 * 384 * 3


def test_what_older_checkpoints_say() -> None:
    found = read(feature_extractor_type="ViTFeatureExtractor", size=32, image_mean=0.25)
    assert (found.size, found.mean) == (32, (0.25, 0.25, 0.25))


def test_steps_that_are_left_out() -> None:
    assert read(do_resize=False).resample is None
    assert read(do_rescale=False).factor == 1
    plain = read(do_normalize=False, image_mean=[1, 2, 3], image_std=[4, 5, 6])
    assert (plain.mean, plain.std) == ((0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor' is not supported"),
        ({"do_center_crop": True}, "do_center_crop is not supported"),
        ({"do_pad": True}, "do_pad is not supported"),
        ({"size": {"shortest_edge": 224}}, "size .*shortest_edge.* is not supported"),
        ({"size": {"height": 224, "width": 192}}, "only height and width alike"),
        ({"size": 1025}, "at most 1024 pixels"),
        ({"size": 0}, "size 0 is not supported"),
    ],
)
def test_unsupported_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_mean": [0.5, 0.5]}, r"image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std must be positive"),
        ({"resample": 9}, r"\$.resample"),
        ({"do_resize": "yes"}, r"\$.do_resize"),
        ({"size": {"height": "large"}}, r"\$.size"),
    ],
)
def test_damaged(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=says):
        read(**changes)


def test_missing() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"preprocessor_config.json is missing"):
        image_input({})


def test_labels() -> None:
    assert labels({"id2label": {"1": "dog", "0": "cat"}}) == ("cat", "dog")
    assert labels({}) == ("LABEL_0", "LABEL_1")
    assert labels({"num_labels": 3}) == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {}},
        {"id2label": {"0": "cat", "2": "dog"}},
        {"id2label": {"zero": "cat"}},
        {"id2label": {"0": 5}},
        {"id2label": ["cat"]},
        {"num_labels": 0},
        {"num_labels": True},
        {"num_labels": "3"},
    ],
)
def test_damaged_labels(config: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"id2label|num_labels"):
        labels(config)


def test_which_models_are_classifiers() -> None:
    assert is_classifier({"architectures": ["ViTForImageClassification"]})
    assert not is_classifier({"architectures": ["LlamaForCausalLM"]})
    assert not is_classifier({"architectures": "ViTForImageClassification"})
    assert not is_classifier({})
