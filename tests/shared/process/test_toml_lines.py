"""The line of a configuration's file that a problem is about."""

from __future__ import annotations

import pytest

from shared.process.toml_lines import lines_of

TEXT = """\
log_level = "info"
[listen]
port = 1
tls.cert = "c"
[[models]]
name = "m.1"
replicas = [
  "http://a",
]
[[models]]
name = "n"
[models.limits]
concurrent = 1
[[admin.keys]]
id = "op"
[[tenants]]
id = "acme"
[[tenants.model_limits]]
model = "m"
[tiers.flex]
hedge = true
"""


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        ("log_level: must be", 1),
        ("listen.port: must be", 3),
        ("listen.tls.cert: must be", 4),
        ("listen.tls.key: is required", 2),
        ("listen: host is reached", 2),
        ("models[0].replicas[0]: must be", 7),
        ("models.m.1: needs exactly one", 5),
        ("models.m.1.fallback: there is", 5),
        ("models[1].limits.concurrent: must be", 13),
        ("models: 'n' is given 2 times", 5),
        ("admin.keys.op.expires: must say", 14),
        ("tenants.acme.models: there is no", 16),
        ("tenants[0].model_limits[0].model: must be", 19),
        ("tiers: this setting is gone", 20),
        ("redis.url: is required", None),
        ("--log-level: must be", None),
    ],
)
def test_a_problem_has_its_line(problem: str, line: int | None) -> None:
    assert lines_of(TEXT, [problem]) == [line]


def test_no_line_is_told_that_may_be_a_wrong_one() -> None:
    assert lines_of('note = """\n[listen]\n"""\n[listen]\nport = 1\n', ["listen.port: no"]) == [None]
    assert lines_of("port = \n", ["f.toml: not valid TOML: Invalid value (at line 1, column 8)"]) == [1]
