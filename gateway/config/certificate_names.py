"""Names in client certificates as a configuration writes them: their forms, and what a subject says, however
it is spelled.

Theory. A subject is a list of parts, each with one attribute or more, of a type and a value. RFC 4514 writes
the last part first: `CN=billing,O=Acme`. Types have names, or are numbers (OIDs), and the same value can be
escaped in several ways. Programs differ in both, so spellings are compared by what they say.

cryptography's own reader of RFC 4514 would take the place of this one, but that it knows neither types in
small letters, nor those names of OpenSSL's that RFC 4514 does not list, nor values in DER.

Other ways to write a subject are refused. `/O=Acme/CN=billing` and `O = Acme, CN = billing`, which OpenSSL
prints without options, have the first part first: taken for RFC 4514 they would be other names.
"""

from __future__ import annotations

import re
from typing import Final

Subject = tuple[frozenset[tuple[str, str]], ...]
"""A subject by its meaning: its parts, the last one first, each a set of types (OIDs) and values."""
CertificateName = tuple[str, str | Subject]
"""A name in a certificate: dns, uri or subject, and what it says."""

_PAIR: Final = r'\\(?:[ "#+,;<=>\\]|[0-9A-Fa-f]{2})'
_ATTRIBUTE: Final = re.compile(
    r"(?P<type>[A-Za-z][A-Za-z0-9-]*|[0-9]+(?:\.[0-9]+)+)="
    rf'(?P<value>(?! )(?:[^\\ "+,;<>\0]|{_PAIR}| (?! *(?:[,+]|\Z)))*)'
    r"(?P<end>[,+]|\Z)"
)
_ESCAPED: Final = re.compile(_PAIR.encode())
_TYPES: Final = {
    "cn": "2.5.4.3",
    "sn": "2.5.4.4",
    "serialnumber": "2.5.4.5",
    "c": "2.5.4.6",
    "l": "2.5.4.7",
    "st": "2.5.4.8",
    "street": "2.5.4.9",
    "o": "2.5.4.10",
    "ou": "2.5.4.11",
    "title": "2.5.4.12",
    "description": "2.5.4.13",
    "businesscategory": "2.5.4.15",
    "postaladdress": "2.5.4.16",
    "postalcode": "2.5.4.17",
    "name": "2.5.4.41",
    "gn": "2.5.4.42",
    "initials": "2.5.4.43",
    "generationqualifier": "2.5.4.44",
    "dnqualifier": "2.5.4.46",
    "pseudonym": "2.5.4.65",
    "organizationidentifier": "2.5.4.97",
    "jurisdictionl": "1.3.6.1.4.1.311.60.2.1.1",
    "jurisdictionst": "1.3.6.1.4.1.311.60.2.1.2",
    "jurisdictionc": "1.3.6.1.4.1.311.60.2.1.3",
    "ogrn": "1.2.643.100.1",
    "snils": "1.2.643.100.3",
    "inn": "1.2.643.3.131.1.1",
    "uid": "0.9.2342.19200300.100.1.1",
    "dc": "0.9.2342.19200300.100.1.25",
    "unstructuredname": "1.2.840.113549.1.9.2",
    "emailaddress": "1.2.840.113549.1.9.1",
    "e": "1.2.840.113549.1.9.1",
}
"""The types by their names, in small letters: RFC 4514's, and the short ones that OpenSSL prints."""
_CODINGS: Final = {
    12: "utf-8",
    18: "ascii",
    19: "ascii",
    20: "latin-1",
    22: "ascii",
    26: "ascii",
    28: "utf-32-be",
    30: "utf-16-be",
}
"""The codings of ASN.1's strings, by their tags."""
_LABEL: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+")


def subject_of(text: str) -> Subject:
    """The meaning of a subject that is written as RFC 4514 says, or as `openssl x509 -noout -subject -nameopt
    RFC2253` prints it. Raises ValueError."""
    text = text.removeprefix("subject=")
    parts, part, at = [], set(), 0
    while (found := _ATTRIBUTE.match(text, at)) is not None:
        part.add((_oid_of(found["type"]), _value_of(found["value"])))
        at = found.end()
        if found["end"] != "+":
            parts.append(frozenset(part))
            part.clear()
        if not found["end"]:
            return tuple(parts)
    raise ValueError(f"it cannot be read from {text[at : at + 16]!r} on")


def is_dns_name(text: str) -> bool:
    """True if a certificate may have this DNS name. One for all names below another counts as it is."""
    return _DNS.fullmatch(text) is not None


def is_uri(text: str) -> bool:
    """True if a certificate may have this URI."""
    return _URI.fullmatch(text) is not None


def _oid_of(name: str) -> str:
    if name[0].isdigit():
        return name
    if (oid := _TYPES.get(name.lower())) is None:
        raise ValueError(f"there is no attribute {name}")
    return oid


def _value_of(raw: str) -> str:
    if raw.startswith("#"):
        return _of_der(bytes.fromhex(raw[1:]))
    return _ESCAPED.sub(lambda pair: _byte_of(pair[0][1:]), raw.encode()).decode()


def _byte_of(escaped: bytes) -> bytes:
    return escaped if len(escaped) == 1 else bytes.fromhex(escaped.decode())


def _of_der(data: bytes) -> str:
    """The text of a string in DER, as values of types without a name are written."""
    if len(data) < 2 or data[0] not in _CODINGS or data[1] != len(data) - 2:
        raise ValueError("a value after # is no text in DER")
    return data[2:].decode(_CODINGS[data[0]])
