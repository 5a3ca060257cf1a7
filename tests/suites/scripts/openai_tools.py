"""OpenAI's guide to function calling: a call, its result, an answer."""

import json

from openai import OpenAI

client = OpenAI()


def get_weather(location):
    return f"It is 14 degrees and cloudy in {location}."


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"}
                },
                "required": ["location"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
messages = [{"role": "user", "content": "What is the weather like in Paris today?"}]
completion = client.chat.completions.create(model="gpt-4.1", messages=messages, tools=tools)
message = completion.choices[0].message
if not message.tool_calls:
    raise SystemExit(f"The model calls nothing: {message.content}")
assert completion.choices[0].finish_reason == "tool_calls"
messages.append(message)
for tool_call in message.tool_calls:
    assert tool_call.function.name == "get_weather"
    arguments = json.loads(tool_call.function.arguments)
    assert list(arguments) == ["location"], arguments
    messages.append(
        {"role": "tool", "tool_call_id": tool_call.id, "content": get_weather(arguments["location"])}
    )
second = client.chat.completions.create(model="gpt-4.1", messages=messages, tools=tools)
answer = second.choices[0].message
if not answer.content or "14" not in answer.content or "Paris" not in arguments["location"]:
    raise SystemExit(f"The model does not say what its call brought: {answer}")
print(arguments, answer.content)
