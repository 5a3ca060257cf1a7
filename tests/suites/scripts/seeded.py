"""A plugin of pytest for the tests of OpenAI's SDK that ask for a response of no model, as mocks answer: they
ask `penstock-demo` instead, for a short one."""

import functools

from openai.resources.responses import AsyncResponses, Responses
from openai.resources.responses.input_tokens import AsyncInputTokens, InputTokens


def seeded(method, **defaults):
    @functools.wraps(method)
    def with_defaults(*args, **given):
        return method(*args, **{**defaults, **given})

    return with_defaults


for kind in (Responses, AsyncResponses):
    kind.create = seeded(kind.create, model="penstock-demo", input="Hello", max_output_tokens=64)
for kind in (InputTokens, AsyncInputTokens):
    kind.count = seeded(kind.count, model="penstock-demo", input="Hello")
