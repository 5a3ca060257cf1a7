"""Keys and what they open."""

from __future__ import annotations

import hmac
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.admission.quota import Scope
from gateway.config.quotas import QuotaLimits
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import KeyConfig, ModelConfig, TenantConfig
from gateway.directory.accounts import Accounts
from gateway.identity import keys
from gateway.identity.caller import Principal
from gateway.identity.keys import KeyTable, hash_key, mint_key
from gateway.identity.tenant import TenantPolicy
from shared.wire.errors import InvalidRequest, ModelNotFound, Unauthenticated
from shared.wire.ids import KeyId

NOW_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def key(text: str, id_: str = "k", **more: object) -> KeyConfig:
    return KeyConfig(id=id_, hash=hash_key(text), tenant="acme", **more)  # type: ignore[arg-type]


def authenticate(table: KeyTable, text: str) -> Principal:
    return table.authenticate(f"Bearer {text}", NOW_S)


def test_a_minted_key_opens_under_its_id() -> None:
    minted = mint_key("prod")
    assert re.fullmatch(r"sk_prod_[a-z0-9]{12}_[A-Za-z0-9]{32}", minted.text)
    assert minted.text not in repr(minted)
    table = KeyTable([KeyConfig(id=minted.id, hash=minted.hash, tenant="acme")])
    assert authenticate(table, minted.text).key == minted.id
    with pytest.raises(Unauthenticated):
        authenticate(table, minted.text[:-1] + ("a" if minted.text[-1] != "a" else "b"))
    with pytest.raises(Unauthenticated):
        authenticate(table, minted.text.replace("sk_prod", "sk_test"))


def test_any_string_can_be_a_development_key() -> None:
    table = KeyTable([key("x"), key("sk-openai-like", "k2"), key("My API Key", "k3")])
    assert authenticate(table, "x").key == "k"
    assert authenticate(table, "sk-openai-like").key == "k2"
    assert authenticate(table, "My API Key").key == "k3"


def test_a_key_of_minted_form_may_have_another_id() -> None:
    minted = mint_key("dev")
    assert authenticate(KeyTable([key(minted.text, "laptop")]), minted.text).key == "laptop"


def test_the_secret_of_one_key_does_not_open_another() -> None:
    one, two = mint_key("dev"), mint_key("dev")
    table = KeyTable([KeyConfig(id=m.id, hash=m.hash, tenant="acme") for m in (one, two)])
    crossed = f"sk_dev_{one.id}_{two.text.rpartition('_')[2]}"
    with pytest.raises(Unauthenticated):
        authenticate(table, crossed)


def test_expiry_is_to_the_second() -> None:
    table = KeyTable([key("x", expires=datetime(2026, 1, 1, tzinfo=UTC))])
    assert table.authenticate("Bearer x", NOW_S - 0.001).tenant == "acme"
    with pytest.raises(Unauthenticated, match="expired"):
        table.authenticate("Bearer x", NOW_S)


@given(st.text())
def test_nothing_else_opens_and_nothing_is_echoed(text: str) -> None:
    table = KeyTable([key("the-key")])
    if text.strip(" ") == "the-key":
        return
    with pytest.raises(Unauthenticated) as caught:
        authenticate(table, text)
    shown = caught.value.message + (caught.value.detail or "")
    assert len(text) < 12 or text not in shown


def test_a_miss_is_compared_like_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(len(a) + len(b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    minted = mint_key("dev")
    table = KeyTable([KeyConfig(id=minted.id, hash=minted.hash, tenant="acme")])
    authenticate(table, minted.text)
    for text in (mint_key("dev").text, "nobody", minted.text[:-1] + "!"):
        with pytest.raises(Unauthenticated):
            authenticate(table, text)
    assert compared == [64] * 8, "with the secret, and with the one before"


def test_the_form_is_checked_before_anything_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_digest", lambda text: pytest.fail("looked up"))
    table = KeyTable([])
    for text in ("", "é", "a\tb", "\x00", "x" * 257):
        with pytest.raises(Unauthenticated):
            authenticate(table, text)


# -- tenants --------------------------------------------------------------------------------------

MODELS = [
    ModelConfig(name="big", replicas=("http://a",), aliases=("gpt-4",)),
    ModelConfig(name="small", replicas=("http://a",), aliases=("*",)),
]


def principal(tenant: str, *models: str) -> Principal:
    table = KeyTable([KeyConfig(id="k", hash=hash_key("x"), tenant=tenant, models=models or ("*",))])
    return authenticate(table, "x")


@pytest.fixture
def policy() -> TenantPolicy:
    return TenantPolicy(MODELS, [TenantConfig(id="all"), TenantConfig(id="one", models=("big",))])


def test_names_aliases_and_the_star(policy: TenantPolicy) -> None:
    everyone = principal("all")
    for name, expected in (("big", "big"), ("gpt-4", "big"), ("small", "small"), ("whatever", "small")):
        assert policy.resolve(everyone, name).name == expected
    assert [name for name, _ in policy.visible(everyone)] == ["big", "gpt-4", "small"]


def test_what_a_tenant_may_not_use_is_not_there(policy: TenantPolicy) -> None:
    limited = principal("one")
    assert policy.resolve(limited, "gpt-4").name == "big"
    assert [name for name, _ in policy.visible(limited)] == ["big", "gpt-4"]
    for name in ("small", "whatever"):
        with pytest.raises(ModelNotFound):
            policy.resolve(limited, name)


def test_a_key_narrows_its_tenant_and_never_widens_it(policy: TenantPolicy) -> None:
    assert [name for name, _ in policy.visible(principal("all", "small"))] == ["small"]
    assert policy.visible(principal("one", "small")) == []


def test_without_a_name_the_only_model_is_meant(policy: TenantPolicy) -> None:
    with pytest.raises(InvalidRequest):
        policy.resolve(principal("all"), None)
    single = TenantPolicy(MODELS[:1], [TenantConfig(id="all")])
    assert single.resolve(principal("all"), None).name == "big"


def accounts() -> Accounts:
    tenants = TenantPolicy(
        MODELS,
        [
            TenantConfig(id="all", limits=QuotaLimits(tokens_per_min=60)),
            TenantConfig(id="one", models=("big",)),
        ],
    )
    return Accounts(KeyTable([]), KeyTable([]), tenants, TimeoutsConfig(total_s=9))


def test_terms_are_the_callers_own() -> None:
    here = accounts()
    free, narrow = principal("all"), replace(principal("one"), key=KeyId("k2"))
    metered = replace(free, key=KeyId("k3"), limits=QuotaLimits(requests_per_min=5, tokens_per_min=30))
    for _ in range(2):  # worked out, and known
        terms = here.terms(free, "gpt-4")
        assert (terms.model.name, terms.tenant.id, terms.timeouts.total_s) == ("big", "all", 9)
        assert [(s.scope, s.id) for s in terms.subjects] == [(Scope.TENANT, "all")], "a key without limits"
        assert terms.tokens_max == 60
        assert here.terms(metered, "gpt-4").tokens_max == 30
        assert [s.id for s in here.terms(metered, "gpt-4").subjects] == ["k3", "all"]
        assert here.terms(narrow, "big").subjects == ()
        assert here.terms(narrow, "big").tokens_max is None
        with pytest.raises(ModelNotFound):
            here.terms(narrow, "small")


def test_terms_are_kept_for_names_of_the_configuration_alone() -> None:
    here, caller = accounts(), principal("all")
    for name in ("big", "gpt-4", "small", "whatever", "anything"):
        here.terms(caller, name)
    assert [name for _, name in here._terms._entries] == ["big", "gpt-4", "small"]


def test_a_long_name_is_not_repeated_whole(policy: TenantPolicy) -> None:
    with pytest.raises(ModelNotFound) as caught:
        policy.resolve(principal("one"), "x" * 10_000)
    assert len(caught.value.message) < 300


def test_hundreds_of_keys_do_not_slow_a_lookup() -> None:
    """A lookup is by name or by hash, never a walk."""
    minted = [mint_key("dev") for _ in range(2000)]
    table = KeyTable([KeyConfig(id=m.id, hash=m.hash, tenant="acme") for m in minted])
    assert len({authenticate(table, m.text).key for m in minted}) == 2000
