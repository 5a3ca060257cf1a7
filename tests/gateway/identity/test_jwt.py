"""Tokens: which open, which do not, and what is granted to those who hold one."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import structs

from gateway.admission.quota import Scope
from gateway.config.edge import HMAC_PREFIX, Algorithm, IssuerConfig
from gateway.config.holders import GrantConfig
from gateway.config.quotas import QuotaLimits
from gateway.config.timeouts import TimeoutsConfig
from gateway.config.whole import ModelConfig, TenantConfig, load
from gateway.directory.accounts import TERMS_MAX, Accounts
from gateway.identity import jwt
from gateway.identity.caller import Principal
from gateway.identity.jwks import KeySources
from gateway.identity.jwt import TOKEN_LEN_MAX, TokenTable, subject_id
from gateway.identity.keys import KeyTable
from gateway.identity.tenant import TenantPolicy
from shared.process.listening import HEADER_LEN_MAX
from shared.wire.errors import Unauthenticated
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open, settings
from tests.gateway.identity.issuers import (
    ALGORITHMS,
    AUDIENCE,
    EC,
    ED,
    EVERYBODY,
    GRANT,
    ISS,
    ISSUER,
    NOW_S,
    RSA,
    SECRET,
    Key,
    as_toml,
    b64,
    claims_at,
    identify,
    issuer,
    jwk_set,
    table,
)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenTable:
    return table(issuer(tmp_path / "keys.json", EC, RSA, ED))


# -- tokens that open -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        *(key.token() for key in (EC, RSA, ED)),
        EC.token(aud=[AUDIENCE, "another"]),
        EC.token(header={"typ": "at+JWT"}),
        EC.token(header={"typ": ...}),
        EC.token(header={"kid": ...}),  # the only key for ES256
        EC.token(header={"jku": "https://evil.test", "x5u": "https://evil.test"}),  # not looked at
        EC.token(exp=NOW_S - 29),
        EC.token(nbf=NOW_S + 30, iat=NOW_S + 30),
        EC.token(exp=NOW_S + 0.5),
    ],
)
def test_a_good_token_names_its_subject(tokens: TokenTable, token: str) -> None:
    principal = identify(tokens, token)
    assert (principal.tenant, principal.models) == ("acme", ("*",))
    digest = hashlib.sha256(f"{ISS}\nuser-1".encode()).hexdigest()
    assert principal.key == f"idp:{digest[:32]}"


def hs256(secret: bytes, header: dict[str, Any], claims: dict[str, Any]) -> str:
    signed = f"{b64(header)}.{b64(claims)}"
    return f"{signed}.{b64(hmac.digest(secret, signed.encode(), 'sha256'))}"


def test_a_shared_secret_signs_too(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    shared = IssuerConfig("hs", ISS, (AUDIENCE,), ("HS256",), secret_file=str(tmp_path / "secret"))
    tokens = table(shared, grants=(GrantConfig("hs", tenant="other"),))
    for header in ({"alg": "HS256"}, {"alg": "HS256", "kid": "any"}):
        assert identify(tokens, hs256(SECRET, header, claims_at(NOW_S))).tenant == "other"
    with pytest.raises(Unauthenticated):
        identify(tokens, hs256(SECRET[:-1] + b"x", {"alg": "HS256"}, claims_at(NOW_S)))
    with pytest.raises(Unauthenticated):
        identify(tokens, hs256(b"", {"alg": "HS256"}, claims_at(NOW_S)))


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_a_token_of_each_algorithm_opens_with_its_issuers_key_alone(tmp_path: Path, algorithm: str) -> None:
    """Each is the only one of its issuer; the other key is of the same kind and has the same id."""
    own, other = Key("own", algorithm), Key("own", algorithm, number=1)
    where: dict[str, Any] = {"algorithms": (algorithm,)}
    if algorithm.startswith(HMAC_PREFIX):
        (tmp_path / "secret").write_bytes(own.private)
        tokens = table(replace(ISSUER, jwks_file=None, secret_file=str(tmp_path / "secret"), **where))
    else:
        tokens = table(issuer(tmp_path / "keys.json", own, **where))
    assert identify(tokens, own.token()).tenant == "acme"
    with pytest.raises(Unauthenticated) as caught:
        identify(tokens, other.token())
    assert "wrong signature" in str(caught.value.detail)


# -- tokens that do not ---------------------------------------------------------------------------


def without_signature(alg: object) -> str:
    return f"{b64({'alg': alg, 'typ': 'JWT'})}.{b64(claims_at(NOW_S))}."


def signed_by_public_key() -> str:
    """The confusion of HMAC and RSA: the public key, which everybody has, as the secret."""
    pem = RSA.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hs256(pem, {"alg": "HS256", "kid": RSA.kid}, claims_at(NOW_S))


def with_signature(signature: bytes) -> str:
    return EC.token().rpartition(".")[0] + "." + b64(signature)


def padded(token: str, length: int) -> str:
    """A good token of exactly this length."""
    for junk in range(length):
        if len(made := EC.token(junk="x" * (length * 3 // 4 - 400 + junk))) >= length:
            return made
    raise AssertionError


def own_key_in_header() -> str:
    """A token of another's key, with that key in its header."""
    own = Key("own", "ES256", 1)
    return own.token(header={"kid": EC.kid, "jwk": own.jwk, "jku": "https://evil.test/jwks.json"})


HOSTILE: dict[str, tuple[str, Callable[[], str]]] = {
    "alg none": ("not three parts", lambda: without_signature("none")),
    "alg None": ("not three parts", lambda: without_signature("None")),
    "alg NONE with a signature": (
        "algorithm 'NONE' is none of the issuer's",
        lambda: without_signature("NONE") + "AAAA",
    ),
    "alg nOnE": ("algorithm 'nOnE' is none of the issuer's", lambda: without_signature("nOnE") + "AAAA"),
    "alg of another spelling": (
        "algorithm 'es256' is none of the issuer's",
        lambda: EC.token(header={"alg": "es256"}),
    ),
    "alg is a list": ("$.alg", lambda: EC.token(header={"alg": ["ES256"]})),
    "alg is missing": ("Object missing required field `alg`", lambda: EC.token(header={"alg": ...})),
    "alg of another key": ("no key ec-1 for RS256", lambda: EC.token(header={"alg": "RS256"})),
    "alg that the issuer has not": (
        "algorithm 'PS256' is none of the issuer's",
        lambda: RSA.token(header={"alg": "PS256"}),
    ),
    "HS256 with the public key": ("algorithm 'HS256' is none of the issuer's", signed_by_public_key),
    "unknown kid": ("no key ec-2 for ES256", lambda: EC.token(header={"kid": "ec-2"})),
    "kid of another key": ("no key rsa-1 for ES256", lambda: EC.token(header={"kid": RSA.kid})),
    "kid is a path": ("kid is not", lambda: EC.token(header={"kid": "../../../../dev/null\0"})),
    "kid is SQL": ("kid is not", lambda: EC.token(header={"kid": "x' UNION SELECT 'key"})),
    "kid is a command": ("kid is not", lambda: EC.token(header={"kid": "x|touch /tmp/pwned"})),
    "kid is a line of the log": ("kid is not", lambda: EC.token(header={"kid": 'x"}\n{"event": "forged"}'})),
    "kid is a number": ("$.kid", lambda: EC.token(header={"kid": 1})),
    "kid is long": ("kid is not", lambda: EC.token(header={"kid": "x" * 129})),
    "own key in the header": ("wrong signature", own_key_in_header),
    "another issuer's key": ("wrong signature", lambda: Key(EC.kid, "ES256", 1).token()),
    "no exp": ("Object missing required field `exp`", lambda: EC.token(exp=...)),
    "no iss": ("Object missing required field `iss`", lambda: EC.token(iss=...)),
    "no aud": ("Object missing required field `aud`", lambda: EC.token(aud=...)),
    "no sub": ("Object missing required field `sub`", lambda: EC.token(sub=...)),
    "expired": ("expired 30 s ago", lambda: EC.token(exp=NOW_S - 30)),
    "not valid yet": ("nbf is 31 s ahead", lambda: EC.token(nbf=NOW_S + 31)),
    "issued in the future": ("iat is 31 s ahead", lambda: EC.token(iat=NOW_S + 31)),
    "another audience": ("another audience", lambda: EC.token(aud="another")),
    "an audience that only begins so": ("another audience", lambda: EC.token(aud=AUDIENCE + "-admin")),
    "a list of other audiences": ("another audience", lambda: EC.token(aud=["another", "third"])),
    "no audience in the list": ("another audience", lambda: EC.token(aud=[])),
    "audiences that are no texts": ("$.aud[1]", lambda: EC.token(aud=[AUDIENCE, 1])),
    "another issuer": ("unknown issuer 'https://evil.test/'", lambda: EC.token(iss="https://evil.test/")),
    "issuer of another case": ("unknown issuer 'HTTPS://IDP.TEST/'", lambda: EC.token(iss=ISS.upper())),
    "longer than 8,000 bytes": ("longer than", lambda: padded("", TOKEN_LEN_MAX + 1)),
    "sub is a number": ("$.sub", lambda: EC.token(sub=1)),
    "sub is an object": ("$.sub", lambda: EC.token(sub={"sub": "user-1"})),
    "sub is empty": ("$.sub", lambda: EC.token(sub="")),
    "a claim's name is half a character": ("no JSON", lambda: EC.token(**cast(Any, {"\ud800": 1}))),
    "sub is half a character": ("no JSON", lambda: EC.token(sub="\ud800x")),
    "sub is long": ("$.sub", lambda: EC.token(sub="x" * 256)),
    "exp is a text": ("$.exp", lambda: EC.token(exp=str(NOW_S + 300))),
    "exp is true": ("$.exp", lambda: EC.token(exp=True)),
    "exp is huge": ("$.exp", lambda: EC.token(exp=10**30)),
    "exp of 5,000 digits": ("no JSON", lambda: EC.sign({"alg": "ES256"}, '{"exp": ' + "9" * 5000 + "}")),
    "exp is infinite": (
        "no JSON",
        lambda: EC.sign({"alg": "ES256"}, json.dumps(claims_at(NOW_S) | {"exp": 1e999})),
    ),
    "a claim that nobody reads is half a character": ("no JSON", lambda: EC.token(zzz={"a": ["\ud800"]})),
    "a claim that nobody reads is 1e400": (
        "no JSON",
        lambda: EC.sign(
            {"alg": "ES256"}, json.dumps(claims_at(NOW_S) | {"zzz": [7]}).replace("[7]", "[1e400]")
        ),
    ),
    "so it is in the header": (
        "no JSON",
        lambda: EC.sign('{"alg": "ES256", "zzz": -1e400}', claims_at(NOW_S)),
    ),
    "exp is 1e999": (
        "no JSON",
        lambda: EC.sign({"alg": "ES256"}, json.dumps(claims_at(NOW_S)).replace(f"{NOW_S + 300}", "1e999")),
    ),
    "exp is NaN": ("no JSON", lambda: EC.token(exp=float("nan"))),
    "exp is null": ("$.exp", lambda: EC.token(exp=None)),
    "nbf is a text": ("$.nbf", lambda: EC.token(nbf="soon")),
    "claims named twice": (
        "no JSON",
        lambda: EC.sign({"alg": "ES256"}, json.dumps(claims_at(NOW_S))[:-1] + ', "sub": "admin"}'),
    ),
    "header named twice": ("no JSON", lambda: EC.sign('{"alg": "none", "alg": "ES256"}', claims_at(NOW_S))),
    "claims within claims": (
        "Object missing required field `iss`",
        lambda: EC.token(claims=claims_at(NOW_S), iss=..., sub=...),
    ),
    "claims are a list": (
        "a part is no JSON object",
        lambda: EC.sign({"alg": "ES256"}, json.dumps([claims_at(NOW_S)])),
    ),
    "claims of depth 2,500": ("no JSON", lambda: EC.sign({"alg": "ES256"}, "[" * 2500 + "]" * 2500)),
    "claims are no UTF-8": (
        "no JSON",
        lambda: ".".join([b64({"alg": "ES256"}), b64(b'{"iss": "\xff"}'), "AAAA"]),
    ),
    "typ of a logout token": (
        "typ 'logout+jwt' is no access token's",
        lambda: EC.token(header={"typ": "logout+jwt"}),
    ),
    "typ of a proof of possession": (
        "typ 'dpop+jwt' is no access token's",
        lambda: EC.token(header={"typ": "dpop+jwt"}),
    ),
    "typ is a number": ("$.typ", lambda: EC.token(header={"typ": 1})),
    "crit": ("an extension", lambda: EC.token(header={"crit": ["exp"], "exp": NOW_S})),
    "crit is empty": ("an extension", lambda: EC.token(header={"crit": []})),
    "b64 is false": ("an extension", lambda: EC.token(header={"b64": False})),
    "signature stripped": ("not three parts", lambda: EC.token().rpartition(".")[0] + "."),
    "signature of zeros": ("wrong signature", lambda: with_signature(bytes(64))),
    "signature with r = 0": ("wrong signature", lambda: with_signature(bytes(32) + b"\1" * 32)),
    "signature of another length": ("wrong signature", lambda: with_signature(b"\1" * 63)),
    "signature in DER": ("wrong signature", lambda: with_signature(b"\x30\x06\x02\x01\x01\x02\x01\x01")),
    "no base64url": ("not three parts", lambda: "!!!!.e30.AAAA"),
    "base64 with padding": ("not three parts", lambda: EC.token() + "=="),
    "base64 of another spelling": ("a part is no base64url", lambda: _respelt(EC.token())),
    "a part too many": ("not three parts", lambda: EC.token() + ".AAAA"),
    "encrypted (five parts)": (
        "not three parts",
        lambda: ".".join(["eyJhbGciOiJkaXIifQ", "", "AAAA", "AAAA", "AAAA"]),
    ),
    "dots alone": ("not three parts", lambda: ".."),
    "not ASCII": ("longer than", lambda: "é.é.é"),
}
"""For each token the detail that the operator is told, in part."""


def _respelt(token: str) -> str:
    """The same bytes, with other bits where base64 has some to spare: 64 bytes leave four."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return token[:-1] + alphabet[alphabet.index(token[-1]) + 1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_token_is_refused_and_the_operator_told_why(tokens: TokenTable, name: str) -> None:
    reason, make = HOSTILE[name]
    token = make()
    with pytest.raises(Unauthenticated) as caught:
        identify(tokens, token)
    told = f"{caught.value.message} {caught.value.detail}"
    assert reason in told
    for part in token.split("."):
        assert len(part) < 8 or part not in told
    assert "\n" not in told
    assert "UNION" not in told
    assert not len(tokens._verified)


@pytest.mark.parametrize("protocol", ["http2"])  # no engine is asked
async def test_every_hostile_token_is_a_401_whose_log_does_not_show_it(
    open_house: Open, tmp_path: Path
) -> None:
    issuers = [as_toml(issuer(tmp_path / "k", EC, RSA, ED))]
    house: House = await open_house(issuers=issuers, grants=[GRANT], clock=VirtualClock())
    made = {name: make() for name, (_, make) in HOSTILE.items()}
    for name, token in made.items():
        async with house.client.get(f"{house.url}/v1/models", headers=bearer(token)) as answer:
            assert answer.status == 401, name
            assert (await answer.json())["error"]["code"] == "invalid_api_key"
    lines = await house.lines(len(made))
    for (name, token), line in zip(made.items(), lines, strict=True):
        assert HOSTILE[name][0] in line["error_detail"]
        assert "key_id" not in line
        assert all(len(part) < 12 or part not in house.log.getvalue() for part in token.split("."))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_as_long_as_may_be_fits_into_a_header(tokens: TokenTable) -> None:
    assert TOKEN_LEN_MAX + len("authorization: Bearer ") < HEADER_LEN_MAX
    longest = next(made for n in range(8) if len(made := padded("", TOKEN_LEN_MAX - n)) <= TOKEN_LEN_MAX)
    assert identify(tokens, longest).tenant == "acme"


def test_what_is_too_long_is_not_decoded(tokens: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt, "_json", lambda data: pytest.fail("decoded"))
    monkeypatch.setattr(hashlib, "sha256", lambda data: pytest.fail("hashed"))
    with pytest.raises(Unauthenticated, match="not valid"):
        identify(tokens, padded("", TOKEN_LEN_MAX + 1))


def test_an_issuer_vouches_for_its_own_tokens_alone(tmp_path: Path) -> None:
    """Two issuers that use the same key id: each one's key checks its own tokens."""
    theirs = Key(EC.kid, "ES256", 1)
    one = issuer(tmp_path / "one", EC)
    two = replace(issuer(tmp_path / "two", theirs), id="two", issuer="https://two.test/")
    tokens = table(one, two, grants=(EVERYBODY, GrantConfig("two", tenant="other")))
    assert identify(tokens, EC.token()).tenant == "acme"
    assert identify(tokens, theirs.token(iss="https://two.test/")).tenant == "other"
    for key, iss in ((theirs, ISS), (EC, "https://two.test/")):
        with pytest.raises(Unauthenticated):
            identify(tokens, key.token(iss=iss))


# -- what is remembered ---------------------------------------------------------------------------


def test_a_busy_tokens_signature_is_checked_once(tokens: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    token = EC.token()
    first = identify(tokens, token)
    monkeypatch.setattr(type(ALGORITHMS["ES256"]), "verify", lambda *_: pytest.fail("checked again"))
    assert identify(tokens, token) is first
    assert identify(tokens, token, NOW_S + 329) is first
    with pytest.raises(Unauthenticated, match="expired"):
        identify(tokens, token, NOW_S + 330)


def test_a_later_token_of_a_subject_is_the_same_caller(tokens: TokenTable) -> None:
    first = identify(tokens, EC.token())
    assert identify(tokens, EC.token(jti="2"), NOW_S) is first
    assert identify(tokens, EC.token(sub="user-2")) is not first


def test_a_key_that_is_gone_takes_its_tokens_with_it(tmp_path: Path) -> None:
    config = issuer(tmp_path / "k", EC)
    sources = KeySources(VirtualClock())
    tokens = TokenTable([config], [EVERYBODY], [TenantId("acme")], sources.of([config]))
    token = EC.token()
    identify(tokens, token)
    newer = Key("ec-2", "ES256", 1)
    (tmp_path / "k").write_bytes(jwk_set(EC, newer))
    sources.reload()
    assert identify(tokens, token) is identify(tokens, newer.token()), "old and new overlap"
    (tmp_path / "k").write_bytes(jwk_set(newer))
    sources.reload()
    with pytest.raises(Unauthenticated):
        identify(tokens, token)
    (tmp_path / "k").write_text("nothing")
    sources.reload()
    assert identify(tokens, newer.token()).tenant == "acme", "a bad file changes nothing"


def test_thousands_of_subjects_are_forgotten_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt, "VERIFIED_MAX", 50)
    tokens = table(issuer(tmp_path / "k", EC))
    made = [EC.token(sub=f"user-{number}") for number in range(120)]
    callers = [identify(tokens, token) for token in made]
    assert (len(tokens._verified), len(tokens._principals)) == (50, 50)
    assert identify(tokens, made[-1]) is callers[-1]
    again = identify(tokens, made[0])
    assert again is not callers[0]
    assert again.key == callers[0].key, "its quota is the same one"


def test_terms_of_thousands_of_subjects_make_room_for_others() -> None:
    policy = TenantPolicy([ModelConfig("tiny", ("http://a",))], [TenantConfig("acme")])
    here = Accounts(KeyTable([]), KeyTable([]), policy, TimeoutsConfig())
    limits = QuotaLimits(requests_per_min=1)

    def caller(number: int) -> Principal:
        return Principal(subject_id(ISSUER, str(number)), TenantId("acme"), ("*",), limits)

    for number in range(TERMS_MAX + 10):
        here.terms(caller(number), "tiny")
    assert (len(here._terms), len(here._subjects)) == (TERMS_MAX, TERMS_MAX)
    late = caller(-1)
    assert here.terms(late, "tiny") is here.terms(late, "tiny"), "who comes late is remembered too"


def test_a_subjects_id_is_its_issuers_and_its_own() -> None:
    other = replace(ISSUER, id="other", issuer="https://other.test/")
    ids = [subject_id(one, sub) for one in (ISSUER, other) for sub in ("a@b.test", "a@b.test ", "\u200b")]
    assert len(set(ids)) == len(ids)
    assert subject_id(ISSUER, "a@b.test") == ids[0]
    assert all(len(one) < 64 and "@" not in one and one.isascii() for one in ids)


# -- grants ---------------------------------------------------------------------------------------

FLEX = QuotaLimits(requests_per_min=3)
GRANTS = (
    GrantConfig("idp", claim=("realm", "roles"), value="research", tenant="acme", models=("big",)),
    GrantConfig("idp", claim=("scope",), value="infer", tenant="acme", service_tier="flex", limits=FLEX),
    GrantConfig("idp", claim=("level",), value="3", tenant="acme", models=("three",)),
    GrantConfig("idp", claim=("staff",), value="true", tenant="acme", models=("staff",)),
    GrantConfig("idp", claim=("org",), value="other", tenant_claim=("org",)),
    GrantConfig("idp", claim=("org",), value="ghost", tenant_claim=("org",)),
)


@pytest.mark.parametrize(
    ("claims", "granted"),
    [
        ({"realm": {"roles": ["x", "research"]}, "scope": "infer"}, ("acme", ("big",), None)),
        ({"scope": "read infer"}, ("acme", ("*",), "flex")),
        ({"level": 3}, ("acme", ("three",), None)),
        ({"level": [1, 3]}, ("acme", ("three",), None)),
        ({"staff": True}, ("acme", ("staff",), None)),
        ({"org": "other"}, ("other", ("*",), None)),
        ({}, None),
        ({"scope": "inference"}, None),
        ({"roles": ["research"]}, None),
        ({"realm": ["research"]}, None),
        ({"realm": {"roles": {"research": True}}}, None),
        ({"staff": "True"}, None),
        ({"level": "3.0"}, None),
        ({"org": "ghost"}, None),
    ],
)
def test_the_first_grant_that_fits_the_claims_is_the_callers(
    tmp_path: Path, claims: dict[str, Any], granted: tuple[Any, ...] | None
) -> None:
    tokens = table(issuer(tmp_path / "k", EC), grants=GRANTS)
    if granted is None:
        with pytest.raises(Unauthenticated, match="not valid here"):
            identify(tokens, EC.token(**claims))
        return
    principal = identify(tokens, EC.token(**claims))
    assert (principal.tenant, principal.models, principal.service_tier) == granted


def test_a_grants_limits_and_tier_are_in_the_callers_terms(tmp_path: Path) -> None:
    config = load(settings("http://a", tenant={"limits": {"requests_per_min": 9}}), {})
    policy = TenantPolicy(config.models, config.tenants)
    tokens = table(issuer(tmp_path / "k", EC), grants=GRANTS)
    here = Accounts(KeyTable([]), KeyTable([]), policy, TimeoutsConfig())
    terms = here.terms(identify(tokens, EC.token(scope="infer")), "tiny")
    assert terms.tenant.service_tier == "flex"
    assert [(s.scope, s.limits.requests_per_min) for s in terms.subjects] == [
        (Scope.KEY, 3),
        (Scope.TENANT, 9),
    ]
    higher = replace(config.tenants[0], service_tier="flex")
    policy = TenantPolicy(config.models, [higher])
    above = structs.replace(identify(tokens, EC.token(scope="infer")), service_tier="priority")
    assert policy.tenant(above).service_tier == "flex", "a grant never widens its tenant"
