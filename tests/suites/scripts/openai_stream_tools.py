"""The stream helper of OpenAI's SDK, with the tool of its guide to function calling, which must be called."""

import openai
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI()


class GetWeather(BaseModel):
    city: str
    country: str


with client.chat.completions.stream(
    model="gpt-4o-2024-08-06",
    messages=[{"role": "user", "content": "What's the weather like in Paris, France?"}],
    tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
    tool_choice="required",
    stream_options={"include_usage": True},
) as stream:
    events = list(stream)
    final = stream.get_final_completion()
[done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
assert "".join(event.arguments_delta for event in deltas) == done.arguments
assert len(deltas) > 1, "the arguments come in pieces"
[call] = final.choices[0].message.tool_calls
assert isinstance(call.function.parsed_arguments, GetWeather)
assert final.choices[0].finish_reason == "tool_calls"
assert final.usage.completion_tokens > 0
if call.function.parsed_arguments.city != "Paris":
    raise SystemExit(f"The model asks for another city: {done.arguments}")
print(done.arguments)
