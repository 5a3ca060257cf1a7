"""LangChain's integration tests of embeddings, on its client of OpenAI's API."""

from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests


class TestPenstock(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self):
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self):
        """Texts are sent as they are: else it would send the ids of OpenAI's own tokenizer."""
        return {"model": "text-embedding-3-small", "check_embedding_ctx_length": False, "max_retries": 0}
