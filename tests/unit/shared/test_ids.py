import pytest

from shared.errors import BadInput
from shared.ids import check_model_name, check_name, new_id


@pytest.mark.parametrize("value", ["a", "node-0", "A_b-9", "x" * 63])
def test_names_that_may_stand_in_a_subject(value: str) -> None:
    assert check_name("node", value) == value


@pytest.mark.parametrize("value", ["", "-a", "_a", "a.b", "a b", "*", ">", "a\n", "ä", "x" * 64])
def test_names_that_may_not(value: str) -> None:
    with pytest.raises(BadInput, match="node"):
        check_name("node", value)


@pytest.mark.parametrize("value", ["llama", "org/Llama-3.1_8B", "x" * 127])
def test_model_names(value: str) -> None:
    assert check_model_name(value) == value


@pytest.mark.parametrize("value", ["", "/etc", ".hidden", "a b", "a:b", "a\n", "x" * 128])
def test_bad_model_names(value: str) -> None:
    with pytest.raises(BadInput, match="model name"):
        check_model_name(value)


def test_new_ids_are_names_and_differ() -> None:
    ids = {new_id("ev") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(check_name("event", value).startswith("ev-") for value in ids)
