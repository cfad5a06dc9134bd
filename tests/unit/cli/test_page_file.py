"""The page in one file: what it needs is in it, and nothing else can run there."""

import base64
import hashlib
import json
import re

import pytest

from services.cli.page_file import FIRST, PAGE, one_script, page_file
from services.gateway.core.scene import Scene

TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|const|let) (\w+)", re.MULTILINE)
IMPORTS = re.compile(r"^import (.*?);$", re.MULTILINE | re.DOTALL)
MODULES = sorted(entry.name for entry in PAGE.iterdir() if entry.name.endswith(".js"))


def a_file(title: str = "ev-1") -> str:
    scene = Scene()
    scene.put("events", {"ev-1": {"cause": "</script><script>alert(1)</script>"}})
    change = scene.since(0)
    assert change is not None
    return page_file(title, change)


def test_data_cannot_end_its_element_and_comes_back_as_it_was() -> None:
    text = a_file()
    assert "alert(1)</script>" not in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    cause = json.loads(data)["put"]["events"]["ev-1"]["cause"]
    assert cause == "</script><script>alert(1)</script>"


def test_only_the_files_own_script_and_style_are_allowed() -> None:
    text = a_file()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    for tag in ("style", r'script type="module"'):
        (inside,) = re.findall(f"<{tag}>(.*?)</", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"(src|href)=", text.split("<script")[0])


def test_a_title_is_text() -> None:
    assert "<title>&lt;b>&amp;&quot;</title>" in a_file('<b>&"')


def test_no_module_is_left_out_and_each_is_there_once() -> None:
    script = one_script(PAGE, FIRST)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    names = TOP_LEVEL.findall(script)
    assert len(set(names)) == len(names)
    assert {"eventParts", "criticalPath", "showReport", "take"} <= set(names)


@pytest.mark.parametrize("name", MODULES)
def test_modules_keep_the_rules_by_which_they_are_joined(name: str) -> None:
    """They import names as they are, from beside them, and no two have a name in common."""
    text = (PAGE / name).read_text()
    for imported in IMPORTS.findall(text):
        assert re.fullmatch(r'\{[\w\s,]*\} from "\./\w+\.js"', imported)
        assert " as " not in imported
    others = (PAGE / other for other in MODULES if other not in (name, "main.js", "report.js"))
    taken = {top for other in others for top in TOP_LEVEL.findall(other.read_text())}
    assert taken.isdisjoint(TOP_LEVEL.findall(text))


def test_what_is_imported_is_exported() -> None:
    for name in MODULES:
        text = (PAGE / name).read_text()
        for names, module in re.findall(r'^import \{([^}]*)\} from "\./(\w+\.js)"', text, re.M):
            exported = re.findall(r"^export (?:async )?(?:function|const) (\w+)",
                                  (PAGE / module).read_text(), re.M)  # fmt: skip
            wanted = {each.strip() for each in names.split(",") if each.strip()}
            assert wanted <= set(exported), (name, module)
            used = IMPORTS.sub("", text)
            assert all(re.search(rf"\b{each}\b", used) for each in wanted), (name, module)
