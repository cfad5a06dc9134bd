"""LangChain's own tests of chat models, on ChatOpenAI."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestGateway(ChatModelIntegrationTests):  # type: ignore[misc]
    supports_json_mode = True
    url: str
    name: str

    @pytest.fixture(autouse=True, scope="class")
    def _at(self, request: pytest.FixtureRequest) -> None:
        type(self).url, type(self).name = (
            request.config.getoption(option) for option in ("--url", "--model")
        )

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        found: type[BaseChatModel] = ChatOpenAI
        return found

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self.url,
            "model": self.name,
            "api_key": "any",
            "temperature": 0,
            "max_retries": 0,
            "timeout": 60,
            "stream_usage": True,
        }

    @property
    def model_override_value(self) -> str:
        return self.name
