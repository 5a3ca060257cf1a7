"""What the endpoints that generate no token have in common: decisions, embeddings and rankings."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import pytest

from shared.apis.decisions import QUESTIONS_MAX
from tests.gateway.conftest import House, Open, error_of
from tests.gateway.endpoints import test_decisions, test_embeddings, test_rerank
from tests.gateway.fake_engine import Script

pytestmark = pytest.mark.hop("http2")
LARGE: Final[dict[ModuleType, dict[str, Any]]] = {
    test_decisions: {"questions": [test_decisions.PREDICATE] * QUESTIONS_MAX},
    test_embeddings: {"input": ["a b c d e f"] * 500},
    test_rerank: {"documents": ["a b c d e f"] * 500},
}
"""A request of each that takes more than 1,000 tokens, in the words of its own tests."""
each = pytest.mark.parametrize("endpoint", LARGE, ids=["decisions", "embeddings", "rankings"])


@each
async def test_tokens_are_reserved_before_they_are_computed(open_house: Open, endpoint: Any) -> None:
    for make in (endpoint.ours, endpoint.theirs):
        house: House = await make(open_house, tenant={"limits": {"tokens_per_min": 1000}})
        async with endpoint.ask(house, **LARGE[endpoint]) as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (429, "request_exceeds_quota")
        assert not house.engine.seen
        await house.at_rest()


@each
async def test_a_model_that_does_nothing_of_the_kind_refuses_by_name(open_house: Open, endpoint: Any) -> None:
    for capabilities in (None, dict.fromkeys(endpoint.ABLE, False)):
        own: House = await open_house(capabilities=capabilities)
        async with endpoint.ask(own) as answer:
            assert (answer.status, (await error_of(answer))["code"]) == (404, "path_not_served")
        assert not own.engine.seen
        await own.at_rest()
    house: House = await endpoint.theirs(open_house)
    house.engine.script = Script([b'{"detail":"Not Found"}'], 404, "application/json")
    async with endpoint.ask(house) as answer:
        assert (answer.status, (await error_of(answer))["code"]) == (404, "path_not_served")
