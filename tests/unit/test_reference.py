"""Reference pages say what the code does."""

import pytest

from tests.support.reference import DOCS, PAGES, families


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `python -m tests.support.reference`"


def test_names_follow_the_conventions_of_prometheus() -> None:
    for family in [family for found in families().values() for family in found]:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        if family.kind == "histogram":
            assert family.name.endswith("_seconds"), family.name
        assert family.text, family.name
