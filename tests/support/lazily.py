"""Modules that take seconds to import, and that the tests of a few files use.

All test files are imported before the first test runs.
"""

import importlib.util
import sys
from types import ModuleType


def imported(name: str) -> ModuleType:
    """The module, which is imported when it is first used."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
