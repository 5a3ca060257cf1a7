"""LangChain's page on tool calling with ChatOpenAI, and that on structured output."""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(description="The city and state, e.g. San Francisco, CA")


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke")
    punchline: str = Field(description="The punchline to the joke")


model = ChatOpenAI(model="gpt-5.4")
required = model.bind_tools([GetWeather], strict=True, tool_choice="any").invoke(
    "what is the weather like in San Francisco"
)
[call] = required.tool_calls
assert call["name"] == "GetWeather"
assert list(call["args"]) == ["location"], call
assert call["id"]
for method in ("json_schema", "function_calling"):
    joke = model.with_structured_output(Joke, method=method).invoke("Tell me a joke about cats")
    assert isinstance(joke, Joke)
free = model.bind_tools([GetWeather]).invoke("what is the weather like in San Francisco")
if not free.tool_calls:
    raise SystemExit(f"The model calls nothing: {free.content}")
print(call, joke, free.tool_calls)
