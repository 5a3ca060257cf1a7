"""The names in client certificates, and in the entries that they fit: their forms and spellings; and
files of revocation lists."""

from __future__ import annotations

import asyncio
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID, ObjectIdentifier
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.certificate_names import subject_of
from gateway.config.holders import CertificateConfig
from gateway.config.whole import load
from gateway.directory.accounts import AccountsReader
from gateway.identity import certificates
from gateway.identity.caller import Caller, Principal
from gateway.identity.callers import callers_of
from gateway.identity.certificates import CRL_LEN_MAX, CertificateTable, revoked_in
from gateway.identity.jwks import KeySources
from shared.process import logs
from shared.process.setting_values import ConfigError, to_toml
from shared.process.shield import Done
from shared.process.tls import UnusableTls
from shared.wire.errors import Unauthenticated
from tests.fakes import VirtualClock
from tests.gateway.conftest import settings
from tests.gateway.listen.test_public_tls import Pki

DAY = timedelta(days=1)
MTLS = {"tls": {"cert": "a", "key": "b", "client_certificates": "optional", "client_ca": "c"}}
OTHER_FORMS = "3009a507a1050c03782e78", "3004a3023000"
"""An ediPartyName and an x400Address as subject alternative names, in DER."""


def with_names(*extensions: tuple[ObjectIdentifier, str], subject: x509.Name | None = None) -> bytes:
    """A certificate with extensions in DER, of CN=batch unless another subject is given."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = subject or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "batch")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, now - DAY, now + DAY)
    for oid, der in extensions:
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, bytes.fromhex(der)), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def twice_named() -> bytes:
    """A certificate whose names are there twice, which no builder makes."""
    names = "30088206782e74657374"
    one, other = ExtensionOID.SUBJECT_ALTERNATIVE_NAME, ExtensionOID.ISSUER_ALTERNATIVE_NAME
    der = with_names((one, names), (other, names))
    return der.replace(bytes.fromhex("551d12"), bytes.fromhex("551d11"))


def test_a_certificate_whose_names_cannot_be_read_names_nobody() -> None:
    """The victim is the holder of a key who shows it, too."""
    entries = [
        CertificateConfig("by-dns", "acme", dns="x.test"),
        CertificateConfig("cn", "acme", subject="CN=batch"),
    ]
    table = CertificateTable(entries, frozenset)
    assert table.check(with_names(), 0) is not None
    names = ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    for der in (*(with_names((names, form)) for form in OTHER_FORMS), twice_named()):
        assert table.check(der, 0) is None


def test_certificates_that_were_read_are_kept_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "KNOWN_MAX", 2)
    table = CertificateTable([CertificateConfig("cn", "acme", subject="CN=batch")], frozenset)
    for der in [with_names() for _ in range(3)]:
        assert table.check(der, 0) is not None
    assert len(table._known) == 2


# -- spellings ------------------------------------------------------------------------------------

CN, ORG, GIVEN = NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME, NameOID.GIVEN_NAME
MAIL = NameOID.EMAIL_ADDRESS
OWN = ObjectIdentifier("1.3.6.1.4.1.99999.1")


def named(*parts: tuple[ObjectIdentifier, str] | list[tuple[ObjectIdentifier, str]]) -> x509.Name:
    """A subject, the last part first, as it is written."""
    several = [part if isinstance(part, list) else [part] for part in parts]
    rdns = [[x509.NameAttribute(oid, value) for oid, value in part] for part in several]
    return x509.Name([x509.RelativeDistinguishedName(rdn) for rdn in reversed(rdns)])


BILLING = named((CN, "billing"), (ORG, "Acme"))
ODD = named((CN, " bill  ing "), (ORG, 'Acme, "Inc" + <x>; #1 \\ y'))
INTERNATIONAL = named((MAIL, "a@b"), (CN, "#x=y"), (ORG, "M\u00fcnch\u00e9n \u20ac"))
OTHERS = named((GIVEN, "v"), (OWN, "custom"), (ORG, ""))
TOGETHER = named([(CN, "b"), (ORG, "Acme")])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("CN=billing,O=Acme", BILLING),
        ("cn=billing,o=Acme", BILLING),
        ("2.5.4.3=billing,2.5.4.10=Acme", BILLING),
        (r"CN=b\69lling,O=\41cme", BILLING),
        ("CN=#130762696C6C696E67,O=Acme", BILLING),
        ("subject=CN=billing,O=Acme", BILLING),
        (r"subject=CN=\ bill  ing\ ,O=Acme\, \"Inc\" \+ \<x\>\; #1 \\ y", ODD),
        (r"subject=emailAddress=a@b,CN=\#x=y,O=M\C3\BCnch\C3\A9n \E2\82\AC", INTERNATIONAL),
        ("1.2.840.113549.1.9.1=a@b,CN=\\#x=y,O=M\u00fcnch\u00e9n \u20ac", INTERNATIONAL),
        ("subject=GN=v,1.3.6.1.4.1.99999.1=#0C06637573746F6D,O=", OTHERS),
        ("2.5.4.42=v,1.3.6.1.4.1.99999.1=custom,O=", OTHERS),
        ("subject=O=Acme+CN=b", TOGETHER),
        ("CN=b+O=Acme", TOGETHER),
    ],
)
def test_a_subject_is_what_it_says_however_it_is_spelled(spelling: str, name: x509.Name) -> None:
    """Those with `subject=` are as `openssl x509 -noout -subject -nameopt RFC2253` prints them."""
    table = CertificateTable([CertificateConfig("by", "acme", subject=spelling)], frozenset)
    assert table.check(with_names(subject=name), 0) is not None
    for other in {BILLING, ODD, INTERNATIONAL, OTHERS, TOGETHER} - {name}:
        assert table.check(with_names(subject=other), 0) is None


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from([CN, ORG, MAIL, GIVEN, OWN]), st.text(max_size=8)),
            min_size=1,
            max_size=2,
            unique=True,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_a_certificates_subject_is_written_as_fits_it(parts: list[list[tuple[Any, str]]]) -> None:
    """As configurations had to have it."""
    rdns = [[x509.NameAttribute(oid, value or "-") for oid, value in part] for part in parts]
    try:
        name = x509.Name([x509.RelativeDistinguishedName(rdn) for rdn in rdns])
    except ValueError:  # an attribute twice
        return
    said = tuple(frozenset((a.oid.dotted_string, str(a.value)) for a in rdn) for rdn in reversed(name.rdns))
    assert subject_of(name.rfc4514_string()) == said


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"subject": "/O=Acme/CN=billing"}, "RFC 4514"),
        ({"subject": "CN = billing, O = Acme"}, "from 'CN = billing, O ' on"),
        ({"subject": "CN=billing, O=Acme"}, "from ' O=Acme' on"),
        ({"subject": "CN=billing ,O=Acme"}, "RFC 4514"),
        ({"subject": "CN=billing;O=Acme"}, "RFC 4514"),
        ({"subject": 'CN="billing"'}, "RFC 4514"),
        ({"subject": "CN=billing,"}, "RFC 4514"),
        ({"subject": "billing"}, "RFC 4514"),
        ({"subject": "nickname=billing"}, "there is no attribute nickname"),
        ({"subject": "CN=#0102"}, "no text in DER"),
        ({"subject": "CN=#xy"}, "RFC 4514"),
        ({"subject": r"CN=\FF"}, "RFC 4514"),
        ({"dns": "https://x"}, "is no DNS name"),
        ({"dns": "a b"}, "is no DNS name"),
        ({"dns": "x."}, "is no DNS name"),
        ({"dns": "-"}, "is no DNS name"),
        ({"dns": "a.*.example"}, "is no DNS name"),
        ({"dns": "m\u00fcnchen.example"}, "is no DNS name"),
        ({"uri": "no-scheme"}, "is no URI with a scheme"),
        ({"uri": "spiffe://a b"}, "is no URI with a scheme"),
        ({"uri": "spiffe:"}, "is no URI with a scheme"),
    ],
)
def test_a_name_that_no_certificate_can_have_is_a_mistake_that_names_its_field(
    fields: dict[str, str], problem: str
) -> None:
    [[field, value]] = fields.items()
    entry = {"id": "by", "tenant": "acme", **fields}
    with pytest.raises(ConfigError) as caught:
        load(settings("http://a", listen=MTLS, certificates=[entry]), {})
    [told] = caught.value.problems
    assert told.startswith(f"certificates[0]: {field} {value!r} ")
    assert problem in told


@pytest.mark.parametrize(
    "fields",
    [
        {"dns": "Billing.Example"},
        {"dns": "xn--mnchen-3ya.example"},
        {"dns": "_a.b-c"},
        {"dns": "localhost"},
        {"uri": "spiffe://prod/billing"},
        {"uri": "urn:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6"},
    ],
)
def test_names_that_certificates_have_are_taken(fields: dict[str, str]) -> None:
    entry = {"id": "by", "tenant": "acme", **fields}
    assert load(settings("http://a", listen=MTLS, certificates=[entry]), {}).certificates[0].id == "by"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dns": "b.test"}, {"dns": "B.TEST"}),
        ({"uri": "spiffe://x/b"}, {"uri": "spiffe://x/b"}),
        ({"subject": "CN=b,O=A"}, {"subject": "2.5.4.3=b,o=\\41"}),
    ],
)
def test_two_entries_with_one_name_are_refused(one: dict[str, str], other: dict[str, str]) -> None:
    """The second would never count, whatever tenant it names."""
    entries = [{"id": id_, "tenant": "acme", **name} for id_, name in (("one", one), ("other", other))]
    with pytest.raises(ConfigError, match="certificates: 'one' and 'other' have the same name"):
        load(settings("http://a", listen=MTLS, certificates=entries), {})


def test_a_star_is_literal_and_the_log_says_so(log: io.StringIO) -> None:
    """Some clients show the certificate of a server, for all names below one."""
    entries = [
        {"id": "star", "tenant": "acme", "dns": "*.x.test"},
        {"id": "b", "tenant": "acme", "dns": "b.test"},
    ]
    config = load(settings("http://a", listen=MTLS, certificates=entries), {})
    table = CertificateTable(config.certificates, frozenset)
    below, star = "300a82086d2e782e74657374", "300a82082a2e782e74657374"
    assert table.check(with_names((ExtensionOID.SUBJECT_ALTERNATIVE_NAME, star)), 0) is not None
    assert table.check(with_names((ExtensionOID.SUBJECT_ALTERNATIVE_NAME, below)), 0) is None
    AccountsReader(config, None)
    logs.close()
    [line] = [line for line in map(json.loads, log.getvalue().splitlines()) if line["level"] == "warning"]
    assert (line["event"], line["ids"]) == ("certificates.star_is_literal", ["star"])


class Shaken:
    """A connection's TLS, whose client has shown a certificate."""

    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def getpeercert(self, *, binary_form: bool) -> bytes:
        return self._certificate


async def test_entries_are_read_again_and_bad_ones_are_refused_whole(
    tmp_path: Path, log: io.StringIO
) -> None:
    path, shown = tmp_path / "gateway.toml", asyncio.BaseTransport({"ssl_object": Shaken(with_names())})

    def write(**entry: Any) -> None:
        entries = [{"id": "by", "tenant": "acme", **entry}]
        path.write_text(to_toml(load(settings("http://a", listen=MTLS, certificates=entries), {})))

    write(subject="CN=batch")
    sources = KeySources(VirtualClock())
    reader = AccountsReader(
        load(path, {}),
        path,
        VirtualClock(),
        lambda config, keys, tenants: callers_of(config, keys, tenants, sources, frozenset),
    )

    def named() -> tuple[str, str]:
        found = reader.now.identity.identify(Caller(None, shown), 0)
        assert isinstance(found, Done)
        principal: Principal = found.result
        return principal.key, principal.tenant

    assert named() == ("by", "acme")
    write(subject="CN=batch", id="other-id", tenant="other")
    assert await reader.reload() == []
    assert named() == ("other-id", "other")
    path.write_text(path.read_text().replace("CN=batch", "/CN=batch"))
    [problem] = await reader.reload()
    assert problem.startswith("certificates[0]: subject '/CN=batch'")
    assert named() == ("other-id", "other")
    write(dns="batch.test")
    assert await reader.reload() == []
    with pytest.raises(Unauthenticated, match="names no caller"):
        named()
    logs.close()
    assert "config.restart_needed" not in log.getvalue()


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_a_subject_may_have_longer_values_than_the_standard_allows() -> None:
    """Some authorities sign them."""
    values = [(ORG, "Acme"), (CN, "x" * 100), (NameOID.COUNTRY_NAME, "USA")]
    name = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in values])
    table = CertificateTable([CertificateConfig("by", "acme", subject=name.rfc4514_string())], frozenset)
    assert table.check(with_names(subject=name), 0) is not None


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def test_a_list_names_whom_its_authority_revokes(pki: Pki) -> None:
    pki.revoke(pki.clients.issue_cert("a.example"), pki.clients.issue_cert("b.example"))
    assert len(revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))) == 2


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"x" * (CRL_LEN_MAX + 1), "larger than"),
        (b"no list", "holds no revocation list"),
        (b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "cannot use"),
        (None, "No such file"),
    ],
    ids=["large", "empty", "broken", "missing"],
)
def test_a_file_that_is_no_list_is_told(pki: Pki, data: bytes | None, told: str) -> None:
    path = Path(pki.path("clients.crl"))
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UnusableTls, match=told):
        revoked_in(str(path), pki.path("clients.ca"))


def test_a_list_of_another_authority_or_by_another_key_is_refused(pki: Pki) -> None:
    other = trustme.CA(organization_name="Clients")
    pki.revoke(signer=other)
    with pytest.raises(UnusableTls, match="no authority"):
        revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))
    pki.revoke()
    pki.trust_clients_of(trustme.CA(organization_name="Others"))
    subject = x509.load_pem_x509_certificate(pki.clients.cert_pem.bytes()).subject.rfc4514_string()
    with pytest.raises(UnusableTls, match=subject.split(",", maxsplit=1)[0].replace("+", r"\+")):
        revoked_in(pki.path("clients.crl"), pki.path("clients.ca"))
