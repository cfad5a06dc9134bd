"""The gateway's page as one file with its data, which needs no cluster and no network."""

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from services.gateway.core.scene import Change

PAGE = resources.files("services.gateway") / "page"
FIRST = "report.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page_file(title: str, change: Change) -> str:
    """`change`: everything that the page shows. Scripts that are not in the file cannot run."""
    style, script = (PAGE / "page.css").read_text(), one_script(PAGE, FIRST)
    data = msgspec.json.encode(change).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_escaped(title)}</title>
<style>{style}</style>
</head>
<body>
<header><p class="brand">lambdascale</p><p id="state">{_escaped(title)}</p></header>
<main id="content" tabindex="-1"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def one_script(folder: Traversable, first: str) -> str:
    """A module and all that it imports, as one script. It follows the rules of the page's modules:
    they import names from each other as they are, and no two have a name in common."""
    texts = (_EXPORT.sub("", _IMPORT.sub("", text)) for text in _needed(folder, first, set()))
    return "\n" + "\n".join(texts)


def _needed(folder: Traversable, name: str, seen: set[str]) -> Iterator[str]:
    """The texts of a module and of those that it imports, each behind what it imports."""
    seen.add(name)
    text = (folder / name).read_text()
    for imported in _IMPORT.findall(text):
        if imported not in seen:
            yield from _needed(folder, imported, seen)
    yield text


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
