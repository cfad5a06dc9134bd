"""What a page knows after any course of changes is what the scene has."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core import scene
from services.gateway.core.scene import Scene


class Page:
    """As page/state.js does it."""

    def __init__(self) -> None:
        self.serial = 0
        self.items: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, list[Any]]] = {}

    def look(self, shown: Scene) -> None:
        change = shown.since(self.serial)
        if change is None:
            return
        told = json.loads(msgspec.json.encode(change))
        if told["whole"]:
            self.items, self.rows = {}, {}
        for section, items in told["put"].items():
            mine = self.items.setdefault(section, {})
            for key, value in items.items():
                if value is None:
                    mine.pop(key, None)
                else:
                    mine[key] = value
        for section, series in told["add"].items():
            for key, rows in series.items():
                self.rows.setdefault(section, {}).setdefault(key, []).extend(rows)
        self.serial = told["serial"]


KEYS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.dictionaries(KEYS, st.integers(0, 2))),
        st.tuples(st.just("add"), KEYS),
        st.tuples(st.just("look"), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_pages_that_look_now_and_then_know_all(steps: list[tuple[str, Any]]) -> None:
    shown, pages, rows = Scene(), (Page(), Page()), 0
    items: dict[str, int] = {}
    for what, value in steps:
        if what == "put":
            shown.put("nodes", value)
            items = value
        elif what == "add":
            rows += 1
            shown.add("counts", value, [rows], most=1000)
        else:
            pages[value].look(shown)
    for page in pages:
        page.look(shown)
        assert page.items.get("nodes", {}) == items
        added = [row for series in page.rows.get("counts", {}).values() for row in series]
        assert sorted(added) == list(range(1, rows + 1))


def test_nothing_new_is_nothing() -> None:
    shown = Scene()
    assert shown.since(0) is None
    shown.put("nodes", {"a": 1})
    shown.put("nodes", {"a": 1})
    assert shown.serial == 1
    assert shown.since(1) is None


def test_items_that_are_only_some_leave_the_others() -> None:
    shown, page = Scene(), Page()
    shown.put("nodes", {"a": 1, "b": 2})
    shown.put("nodes", {"a": 3}, all_there_are=False)
    page.look(shown)
    assert page.items == {"nodes": {"a": 3, "b": 2}}


def test_rows_are_bounded_and_may_be_dropped() -> None:
    shown, early, late = Scene(), Page(), Page()
    shown.add("counts", "a", [1, 2], most=2)
    early.look(shown)
    shown.add("counts", "a", [3], most=2)
    early.look(shown)
    late.look(shown)
    assert early.rows == {"counts": {"a": [1, 2, 3]}}
    assert late.rows == {"counts": {"a": [2, 3]}}
    shown.drop("counts", "a")
    last = Page()
    last.look(shown)
    assert last.rows == {}


def test_a_page_that_missed_too_much_gets_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "GONE", 2)
    shown, page = Scene(), Page()
    shown.put("nodes", {"a": 1, "b": 1, "c": 1, "d": 1})
    page.look(shown)
    shown.put("nodes", {"d": 1})
    change = shown.since(page.serial)
    assert change is not None
    assert change.whole
    page.look(shown)
    assert page.items == {"nodes": {"d": 1}}


def test_a_page_of_another_process_gets_all_anew() -> None:
    shown = Scene()
    shown.put("nodes", {"a": 1})
    change = shown.since(1000)
    assert change is not None
    assert change.whole
