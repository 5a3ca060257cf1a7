"""A plugin of pytest for the tests of OpenAI's SDK that ask for a response of no model, as mocks answer: they
ask `demo` instead, for a short one. Those that ask for a response by an id which mocks know ask for
one that is made for them.
Those of embeddings ask for numbers, as mocks answer: the SDK itself asks for base64, and a client that
validates strictly then refuses what it asked for."""

import functools

import openai
from openai.resources.embeddings import AsyncEmbeddings, Embeddings
from openai.resources.responses import AsyncResponses, Responses
from openai.resources.responses.input_items import AsyncInputItems, InputItems
from openai.resources.responses.input_tokens import AsyncInputTokens, InputTokens

SHORT = {"model": "demo", "input": "Hello", "max_output_tokens": 64}


def seeded(method, **defaults):
    @functools.wraps(method)
    def with_defaults(*args, **given):
        return method(*args, **{**defaults, **given})

    return with_defaults


def of_one_that_is_made(method):
    @functools.wraps(method)
    def with_id(self, response_id, **given):
        if response_id:  # an empty one is refused by the SDK itself
            client = openai.OpenAI(base_url=str(self._client.base_url), api_key=self._client.api_key)
            response_id = client.responses.create(**SHORT).id
        return method(self, response_id, **given)

    return with_id


for kind in (Responses, AsyncResponses):
    kind.create = seeded(kind.create, **SHORT)
    for name in ("retrieve", "delete", "cancel"):
        setattr(kind, name, of_one_that_is_made(getattr(kind, name)))
for kind in (Embeddings, AsyncEmbeddings):
    kind.create = seeded(kind.create, encoding_format="float")
for kind in (InputItems, AsyncInputItems):
    kind.list = of_one_that_is_made(kind.list)
for kind in (InputTokens, AsyncInputTokens):
    kind.count = seeded(kind.count, model="demo", input="Hello")
