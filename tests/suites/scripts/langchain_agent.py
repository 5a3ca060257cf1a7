"""LangChain's quick start: an agent with a tool."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It's always sunny in {city}!"


agent = create_agent(
    model=ChatOpenAI(model="gpt-5.4"),
    tools=[get_weather],
    system_prompt="You are a helpful assistant",
)
result = agent.invoke({"messages": [{"role": "user", "content": "what is the weather in San Francisco"}]})
kinds = [message.type for message in result["messages"]]
if kinds == ["human", "ai"]:
    raise SystemExit(f"The model calls nothing: {result['messages'][-1].content}")
assert kinds[:3] == ["human", "ai", "tool"], kinds
assert kinds[-1] == "ai", kinds
if result["messages"][2].status == "error":
    raise SystemExit(f"The model's arguments are not the tool's: {result['messages'][2].content}")
assert result["messages"][2].content.startswith("It's always sunny in"), result["messages"][2]
answer = result["messages"][-1].content
if "sunny" not in answer:
    raise SystemExit(f"The model does not say what its call brought: {answer}")
print(answer)
