"""JSON-Schema-Test-Suite, drafts 7 and 2020-12 without their optional parts, as the sources of `jsonschema`
ship it: every document against its schema, by our door and matcher, beside llguidance as it comes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Final

from tests.bench.figures import Figure
from tests.suites.cache import SuiteFailed, sdist
from tests.suites.held import Document, figures_of, llguidances, ours

SUMMARY: Final = "JSON-Schema-Test-Suite, against our door and matcher"
SOURCE: Final = ("jsonschema", "4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326")
DRAFTS: Final = ("draft7", "draft2020-12")


def run(cache: Path) -> list[Figure]:
    tests = sdist(cache, *SOURCE) / "json/tests"
    files = sorted(path for draft in DRAFTS for path in (tests / draft).glob("*.json"))
    if not files:
        raise SuiteFailed(f"{tests} has no tests")
    counts, theirs, strict = Counter[str](), Counter[str](), Counter[str]()
    for path in files:
        for case in json.loads(path.read_text()):
            documents = [Document(test["data"], test["valid"]) for test in case["tests"]]
            counts.update(ours(case["schema"], documents))
            theirs.update(llguidances(case["schema"], documents))
            strict.update(ours(case["schema"], documents, strict=True))
    return figures_of(counts, theirs, strict, "documents")
