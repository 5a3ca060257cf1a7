"""The stream helper of OpenAI's SDK, with the event of its guide to structured outputs."""

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI()


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


with client.chat.completions.stream(
    model="gpt-4o-2024-08-06",
    messages=[
        {"role": "system", "content": "Extract the event information."},
        {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
    ],
    response_format=CalendarEvent,
) as stream:
    events = list(stream)
[done] = [event for event in events if event.type == "content.done"]
deltas = [event for event in events if event.type == "content.delta"]
assert "".join(event.delta for event in deltas) == done.content
assert any(event.parsed for event in deltas), "what is there so far is parsed on the way"
assert isinstance(done.parsed, CalendarEvent)
if "Alice" not in done.parsed.participants:
    raise SystemExit(f"The model does not tell the event: {done.parsed!r}")
print(done.parsed)
