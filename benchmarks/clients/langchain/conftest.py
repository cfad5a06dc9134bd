"""Where the gateway is, and what its model is called."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", required=True)
    parser.addoption("--model", required=True)
