"""OpenAI's guide to structured outputs: an event, parsed into a model of pydantic's."""

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI()


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


completion = client.chat.completions.parse(
    model="gpt-4o-2024-08-06",
    messages=[
        {"role": "system", "content": "Extract the event information."},
        {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
    ],
    response_format=CalendarEvent,
)
event = completion.choices[0].message.parsed
assert isinstance(event, CalendarEvent)
if "Alice" not in event.participants or "Bob" not in event.participants or "Friday" not in event.date:
    raise SystemExit(f"The model does not tell the event: {event!r}")
print(event)
