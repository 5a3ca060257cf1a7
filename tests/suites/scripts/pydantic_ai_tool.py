"""pydantic-ai's introduction: an agent with a tool."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("gpt-5.4"), instructions="Answer with what the tools bring.")
asked = []


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    asked.append(city)
    return f"It is 14 degrees in {city}."


result = agent.run_sync("What is the weather in Paris?")
if not asked:
    raise SystemExit(f"The model calls nothing: {result.output}")
if asked != ["Paris"] or "14" not in result.output:
    raise SystemExit(f"The model does not say what its call brought: {asked}, {result.output}")
print(asked, result.output)
