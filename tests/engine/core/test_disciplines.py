"""The disciplines that an operator can choose from."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contract.messages import ServiceClass
from engine.core.queue import policy
from engine.core.queue.policy import Circumstances
from shared.process.settings import settings_of
from tests.engine.core.sequences import COST, handles, sequence, stalled


def test_the_discipline_option_names_all_disciplines() -> None:
    discipline = next(setting for setting in settings_of(EngineConfig) if setting.name == "discipline")
    assert discipline.kind.choices == tuple(policy.DISCIPLINES)
    assert discipline.default == "response-ratio"


def test_fifo_serves_in_the_order_of_arrival_for_every_class_tenant_and_length() -> None:
    waiting = [
        sequence(3, 2.0, service_class=ServiceClass.PRIORITY),
        sequence(1, 1.0, prompt_len=4000, tenant="ahead"),
        sequence(2, 1.0, prompt_len=10),
        sequence(4, 3.0, preempted=True),
        stalled(5, 9.0, resumed=True),
    ]
    order = policy.DISCIPLINES["fifo"].order(waiting, Circumstances(10.0, COST, {"ahead": 9000}))
    assert handles(order) == [5, 1, 2, 3, 4]
