"""LangChain's integration tests of chat models, on its client of OpenAI's API."""

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestPenstock(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "gpt-5.4", "stream_usage": True, "max_retries": 0}

    @property
    def model_override_value(self):
        """The name that answers come under, whichever name was asked for."""
        return "demo"

    @property
    def supports_json_mode(self):
        return True
