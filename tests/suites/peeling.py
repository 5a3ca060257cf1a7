"""Requests with every parameter that a specification has, from the tests of an SDK, sent again and again
without what is refused by name, until there is an answer."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from tests.bench.figures import Figure, at_most, figure
from tests.suites.serving import Served

_TESTS: Final = re.compile(r"(create|count|count_tokens)_with_all_params")
_ANSWER_S: Final = 60.0
"""The time in which a request must be answered, in seconds."""


def all_parameters(file: Path, beside: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """The bodies that a file's tests with all parameters send. `beside`: the parameters that are sent beside
    the body."""
    [sync, *_] = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    for test in sync.body:
        if isinstance(test, ast.FunctionDef) and _TESTS.search(test.name):
            calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
            [sent] = [call for call in calls if any(keyword.arg == "model" for keyword in call.keywords)]
            body = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in sent.keywords}
            yield {name: value for name, value in body.items() if name not in beside}


def peeled(served: Served, path: str, bodies: list[dict[str, Any]]) -> Iterator[Figure]:
    """The parameters that are refused, one after another, until the rest of each request is served."""
    refused: Counter[str] = Counter()
    failed = 0
    with httpx.Client(headers={"Authorization": f"Bearer {served.key}"}, trust_env=False) as client:
        for body in bodies:
            while (answer := client.post(served.url + path, json=body, timeout=_ANSWER_S)).status_code == 400:
                param, message = _told(answer.json()["error"])
                name = re.split(r"[.\[]", param)[0]
                if name not in body:
                    break
                refused[message] += 1
                del body[name]
            failed += answer.status_code != 200
    title = f"{path} with all parameters"
    yield figure(f"{title}: parameters served", sum(map(len, bodies)), "parameters")
    for message, count in refused.items():
        yield figure(f"{title}: refused by name: {message}", count, "parameters")
    yield figure(f"{title}: failed", failed, "requests", at_most(0))


def _told(error: Mapping[str, Any]) -> tuple[str, str]:
    """The field that an error names, and its message, in OpenAI's envelope or Anthropic's."""
    return error.get("details", error).get("param") or "", error["message"]
