"""pydantic-ai's page on structured output: a tool's arguments, and the schema of an answer."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel


class CityLocation(BaseModel):
    city: str
    country: str


model = OpenAIChatModel("gpt-5.4")
for output_type in (CityLocation, NativeOutput(CityLocation)):
    result = Agent(model, output_type=output_type).run_sync("Where were the olympics held in 2012?")
    assert isinstance(result.output, CityLocation)
    assert result.usage.output_tokens > 0
    print(result.output)
