"""The keys that issuers sign tokens with: which are taken, and what becomes of a bad file."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.config.edge import IssuerConfig
from gateway.config.whole import load
from gateway.directory.accounts import AccountsReader
from gateway.identity.caller import Caller, Principal
from gateway.identity.callers import callers_of
from gateway.identity.jwks import TRIED_MAX, FileKeys, KeySources
from gateway.identity.key_set import KEYS_MAX, RSA_BITS_MAX, SET_LEN_MAX, BadKeys, keys_of, secret_of
from shared.process.setting_values import ConfigError, to_toml
from shared.process.shield import Done
from shared.wire.errors import Unauthenticated
from tests.fakes import VirtualClock
from tests.gateway.conftest import settings
from tests.gateway.identity.issuers import (
    ALGORITHMS,
    EC,
    ED,
    GRANT,
    ISSUER,
    NOW_S,
    RSA,
    SECRET,
    Key,
    as_toml,
    b64,
    identify,
    issuer,
    nameless_set,
    table,
)

# -- keys of issuers ------------------------------------------------------------------------------


def changed(key: Key, **members: Any) -> bytes:
    jwk = {name: value for name, value in {**key.jwk, **members}.items() if value is not ...}
    return json.dumps({"keys": [jwk]}).encode()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no JWK set"),
        (b"[]", "no JWK set"),
        (b"\xff", "no JWK set"),
        (b'{"keys": ' + b"[" * 100_000, "no JWK set"),
        (b'{"keys": []}', "no key that can be used"),
        (b'{"keys": [1]}', "no JSON Web Key"),
        (json.dumps({"keys": [EC.jwk] * (KEYS_MAX + 1)}).encode(), "65 keys"),
        (changed(EC, use="enc"), "not for signatures"),
        (changed(EC, key_ops=["encrypt"]), "not for signatures"),
        (changed(EC, alg="RS256"), "does not go with its kind"),
        (changed(EC, alg="HS256"), "does not go with its kind"),
        (changed(EC, x="AAAA"), "malformed"),
        (changed(EC, crv="P-384"), "does not go with its kind"),
        (changed(EC, crv="secp256k1", alg=...), "kind that is not used"),
        (changed(EC, kid="a b"), "128 plain characters"),
        (changed(EC, kty="oct", k="AAAA", crv=...), "kind that is not used"),
        (changed(RSA, n=b64(b"\xff" * 192)), "2048 to 4096 bits"),
        (changed(RSA, n=b64(b"\xff" * (RSA_BITS_MAX // 8 + 1))), "2048 to 4096 bits"),
    ],
)
def test_a_key_that_cannot_be_used_is_told_and_left_out(data: bytes, problem: str) -> None:
    with pytest.raises(BadKeys, match=problem):
        keys_of(data)


def test_one_bad_key_does_not_spoil_the_set() -> None:
    data = json.dumps({"keys": [EC.jwk, {"kty": "oct"}, EC.jwk, ED.jwk]}).encode()
    keys, problems = keys_of(data)
    assert [key.kid for key in keys] == [EC.kid, ED.kid]
    assert len(problems) == 2


def test_keys_of_other_kinds_may_share_an_id_or_have_none(tmp_path: Path) -> None:
    """RFC 7517 section 4.5. The victims are the holders of tokens by the second key."""
    kinds = ("RS256", "ES256", "ES384", "EdDSA")
    keys = [Key("same", kind) for kind in kinds]
    alike = issuer(tmp_path / "alike.json", *keys, algorithms=kinds)
    nameless = issuer(tmp_path / "nameless.json", *keys, algorithms=kinds)
    (tmp_path / "nameless.json").write_bytes(nameless_set(*keys))
    for key in keys:
        assert identify(table(alike), key.token()).tenant == "acme"
        assert identify(table(nameless), key.token(header={"kid": ...})).tenant == "acme"


def test_a_token_without_kid_is_tried_with_the_keys_that_fit(tmp_path: Path) -> None:
    """Also with those of a rotation, which have no ids either. The victims are the holders of its tokens."""
    keys = [Key(f"ec-{number}", "ES256", number) for number in range(TRIED_MAX)]
    several = issuer(tmp_path / "several.json", *keys, ED, algorithms=("ES256", "EdDSA"))
    (tmp_path / "several.json").write_bytes(nameless_set(*keys, ED))
    for key in (*keys, ED):
        assert identify(table(several), key.token(header={"kid": ...})).tenant == "acme"
    stranger = Key("stranger", "ES256", TRIED_MAX)
    assert "no key for ES256" in refusal(several, stranger.token(header={"kid": ...}))


def test_a_token_without_kid_is_refused_where_too_many_keys_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [Key(f"ec-{number}", "ES256", number) for number in range(TRIED_MAX + 1)]
    many = issuer(tmp_path / "many.json", *keys)
    assert identify(table(many), keys[0].token()).tenant == "acme"
    monkeypatch.setattr(type(ALGORITHMS["ES256"]), "verify", lambda *_: pytest.fail("was tried"))
    assert "too many to try" in refusal(many, keys[0].token(header={"kid": ...}))


def test_a_forged_token_costs_a_few_signature_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key(f"ec-{number}", "ES256", number) for number in range(TRIED_MAX)]
    forger = Key(keys[0].kid, "ES256", TRIED_MAX)
    several = issuer(tmp_path / "several.json", *keys)
    checks: list[bytes] = []

    def wrong(_: object, signed: bytes, *__: object) -> bool:
        checks.append(signed)
        return False

    monkeypatch.setattr(type(ALGORITHMS["ES256"]), "verify", wrong)
    for header, most in (({"kid": ...}, TRIED_MAX), ({}, 1)):
        checks.clear()
        refusal(several, forger.token(header=header))
        assert len(checks) == most


def refusal(trusted: IssuerConfig, token: str) -> str:
    """Why a token is refused, as the operator is told."""
    with pytest.raises(Unauthenticated) as caught:
        identify(table(trusted), token)
    return str(caught.value.detail)


def test_a_private_keys_public_part_alone_is_read() -> None:
    private = ALGORITHMS["ES256"].to_jwk(EC.private, as_dict=True) | {"kid": "x"}
    [key], _ = keys_of(json.dumps({"keys": [private]}).encode())
    assert not hasattr(key.material, "private_numbers")
    assert private["d"].encode() not in key.source


@pytest.mark.parametrize(
    ("secret", "problem"),
    [
        (SECRET[:-1], "31 bytes"),
        (b"", "0 bytes"),
        (
            RSA.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "public key",
        ),
        (json.dumps(RSA.jwk).encode(), "JSON Web Key"),
    ],
)
def test_what_is_no_secret_is_told(secret: bytes, problem: str) -> None:
    with pytest.raises(BadKeys, match=problem) as caught:
        secret_of(secret, ["HS256"])
    assert not secret or secret.decode() not in str(caught.value)
    assert SECRET not in repr(secret_of(SECRET, ["HS256"])).encode()


def test_a_bad_file_is_told_at_the_start_and_refused_whole_later(tmp_path: Path, log: io.StringIO) -> None:
    bad, missing = tmp_path / "bad", tmp_path / "missing"
    bad.write_bytes(b"x" * (SET_LEN_MAX + 1))
    configs = [
        replace(ISSUER, jwks_file=str(bad)),
        replace(ISSUER, id="two", issuer="https://two.test/", jwks_file=str(missing)),
    ]
    sources = KeySources(VirtualClock())
    with pytest.raises(ConfigError) as caught:
        sources.of(configs)
    assert len(caught.value.problems) == 2
    good = issuer(tmp_path / "good", EC)
    kept = sources.of([good])
    with pytest.raises(ConfigError):
        sources.of([good, configs[1]])
    assert sources.of([good])["idp"] is kept["idp"], "what was read is kept over a reload"
    assert isinstance(kept["idp"], FileKeys)


async def test_issuers_and_grants_are_read_again_and_a_bad_one_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    own = as_toml(issuer(tmp_path / "k", EC))

    def write(issuers: list[dict[str, Any]], **grant: Any) -> None:
        config = load(settings("http://a", issuers=issuers, grants=[GRANT | grant]), {})
        path.write_text(to_toml(config))

    write([own], models=["tiny"])
    sources = KeySources(VirtualClock())
    reader = AccountsReader(
        load(path, {}),
        path,
        VirtualClock(),
        lambda config, keys, tenants: callers_of(config, keys, tenants, sources, frozenset),
    )

    def models() -> tuple[str, ...]:
        found = reader.now.identity.identify(Caller(f"Bearer {EC.token()}", None), NOW_S)
        assert isinstance(found, Done)
        principal: Principal = found.result
        return principal.models

    assert models() == ("tiny",)
    write([own])
    await reader.reload()
    assert models() == ("*",)
    before = reader.now
    write([own, own | {"id": "two", "issuer": "https://two.test/", "jwks_file": "missing"}], models=["tiny"])
    await reader.reload()
    assert reader.now is before
    assert models() == ("*",)


def test_a_key_of_a_file_is_known_with_its_first_token(tmp_path: Path) -> None:
    """Before the file is looked at by itself, a second later. The victims are the holders of its tokens."""
    path = tmp_path / "keys.json"
    tokens = table(issuer(path, EC))
    assert identify(tokens, EC.token()).tenant == "acme"
    issuer(path, EC, RSA)
    assert identify(tokens, RSA.token()).tenant == "acme"
    issuer(path, RSA)
    assert identify(tokens, RSA.token(jti=1)).tenant == "acme"
    path.write_bytes(b"{")  # half of a file
    assert identify(tokens, RSA.token(jti=2)).tenant == "acme"
    with pytest.raises(Unauthenticated):
        identify(tokens, ED.token())


def test_a_secret_of_a_file_is_known_with_its_first_token(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(Key("s", "HS256").private)
    shared = replace(ISSUER, algorithms=("HS256",), jwks_file=None, secret_file=str(path))
    tokens = table(shared)
    new = Key("s", "HS256", 1)
    assert identify(tokens, Key("s", "HS256").token()).tenant == "acme"
    path.write_bytes(new.private + b"\n")
    assert identify(tokens, new.token()).tenant == "acme"
