"""Which identity is asked about a request, and which configurations of them contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config.whole import GatewayConfig, load
from gateway.identity import callers
from gateway.identity.caller import Caller
from gateway.identity.callers import Callers, KnownCallers
from gateway.identity.keys import KeyTable, hash_key
from shared.process.setting_values import ConfigError
from shared.process.shield import Done
from shared.wire.errors import Unauthenticated
from shared.wire.ids import TenantId
from tests.gateway.conftest import settings
from tests.gateway.identity.issuers import EC, GRANT, ISS, NOW_S, issuer, table

# -- who is asked ---------------------------------------------------------------------------------


def test_a_token_is_told_from_a_key_by_its_form(tmp_path: Path) -> None:
    dotted = {"id": "dotted", "hash": hash_key("a.dotted.key"), "tenant": "acme"}
    config = load(
        settings("http://a", keys=[{"id": "k1", "hash": hash_key("dev-key"), "tenant": "acme"}, dotted]), {}
    )
    both = Callers(KeyTable(config.keys), table(issuer(tmp_path / "k", EC)), None)

    def key_of(authorization: str) -> str:
        found = both.identify(Caller(authorization, None), NOW_S)
        assert isinstance(found, Done)
        return str(found.result.key)

    assert key_of("Bearer dev-key") == "k1"
    assert key_of("Bearer a.dotted.key") == "dotted"
    assert key_of(f"bearer  {EC.token()} ").startswith("idp:")
    for wrong in ("", "Basic a.b.c", "Bearer a.b", "Bearer a.b.c", f"Bearer {EC.token()}x"):
        with pytest.raises(Unauthenticated):
            key_of(wrong)


def test_callers_of_late_are_kept_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "CALLERS_MAX", 3)
    known = KnownCallers()
    for number in range(4):
        known.note(f"Bearer {number}", TenantId("acme"))
    assert [known.tenant_of(f"Bearer {number}") for number in range(4)] == [None, *["acme"] * 3]


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"issuers": [{"jwks_file": ..., "jwks_url": "http://a/keys"}]}, "no https URL"),
        ({"issuers": [{"jwks_file": ..., "jwks_url": "https://u:p@a/keys"}]}, "no https URL"),
        ({"issuers": [{"jwks_url": "https://a/keys"}]}, "exactly one of"),
        ({"issuers": [{"jwks_file": ...}]}, "exactly one of"),
        ({"issuers": [{"algorithms": ["HS256"]}]}, "need secret_file"),
        ({"issuers": [{"algorithms": ["HS256", "ES256"]}]}, "need secret_file"),
        ({"issuers": [{"algorithms": ["none"]}]}, "one of"),
        ({"issuers": [{"jwks_file": ..., "secret_file": "s"}]}, "need secret_file"),
        ({"issuers": [{"skew_s": 20}]}, r"issuers\[0\].skew_s: this setting is gone: it is 30 seconds"),
        ({"issuers": [{"audiences": []}]}, "audiences"),
        ({"issuers": [{}, {}]}, "2 times"),
        ({"grants": [{"issuer": "nobody"}]}, "no issuer 'nobody'"),
        ({"grants": [{"tenant": "nobody"}]}, "no tenant 'nobody'"),
        ({"grants": [{"tenant": ...}]}, "exactly one of tenant"),
        ({"grants": [{"tenant_claim": ["t"]}]}, "exactly one of tenant"),
        ({"grants": [{"claim": ["t"]}]}, "belong together"),
        ({"grants": [{"models": ["ghost"]}]}, "no model 'ghost'"),
        ({"certificates": [{"id": "c", "tenant": "acme", "dns": "a"}]}, "client_certificates must be"),
        ({"listen": {"host": "0.0.0.0"}}, "plaintext = true"),
        ({"listen": {"host": "gateway.test"}}, "plaintext = true"),
        ({"listen": {"plaintext": True, "tls": {"cert": "c", "key": "k"}}}, "exclude each other"),
        ({"listen": {"port": 8010}, "admin": {"port": 8010}}, "admin.port: 8010 is the port of"),
        ({"admin": {"host": "0.0.0.0", "port": 0}}, "admin: host '0.0.0.0'.*plaintext = true"),
        ({"admin": {"plaintext": True, "tls": {"cert": "c", "key": "k"}}}, "exclude each other"),
        (
            {"listen": {"tls": {"cert": "c", "key": "k", "client_certificates": "optional"}}},
            "client_ca belongs",
        ),
        ({"listen": {"tls": {"cert": "c", "key": "k", "client_ca": "a"}}}, "client_ca belongs"),
        ({"listen": {"tls": {"cert": "c", "key": "k", "crl": "a"}}}, "crl needs client_ca"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_told(sections: dict[str, Any], problem: str) -> None:
    base = {"id": "idp", "issuer": ISS, "audiences": ["a"], "algorithms": ["ES256"], "jwks_file": "k"}
    full: dict[str, Any] = {"issuers": [base], "grants": [GRANT]}
    for name, value in sections.items():
        defaults: Any = {"issuers": base, "grants": GRANT}.get(name)
        full[name] = value if defaults is None else [_without({**defaults, **one}) for one in value]
    with pytest.raises(ConfigError, match=problem):
        load(settings("http://a", **full), {})


def _without(section: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if value is not ...}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_plain_text_is_served_to_this_machine_without_asking(host: str) -> None:
    config = load(settings("http://a", listen={"host": host}, admin={"host": host, "port": 0}), {})
    assert isinstance(config, GatewayConfig)
    for listener in ("listen", "admin"):
        section: dict[str, Any] = {listener: {"host": "0.0.0.0", "plaintext": True}}
        asked = load(settings("http://a", **section), {})
        assert getattr(asked, listener).plaintext
