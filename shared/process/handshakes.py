"""Why TLS handshakes with clients fail: counted by a few reasons, whatever clients send."""

from __future__ import annotations

import ssl
from typing import Final

from shared.process.metrics import Counter

LEFT: Final = "left"
"""The client has closed the connection. Whoever looks for open ports does, and so does a client that does not
trust the certificate that it is shown."""
LATE: Final = "late"
"""The client took longer than a handshake may."""
OTHER: Final = "other"
_OF_CERTIFICATES: Final = {
    3: "no_revocation_list",
    9: "not_yet_valid",
    10: "expired",
    12: "revocation_list_expired",
    23: "revoked",
    26: "wrong_purpose",
    **dict.fromkeys((2, 7, 18, 19, 20, 21), "unknown_authority"),
}
"""The reasons for which a client's certificate is refused, by OpenSSL's number for each (X509_V_ERR_...). 7
is a signature that is not its authority's: of another one with the same name."""
_OF_TLS: Final = {"PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate", "HTTP_REQUEST": "plain_text"}
"""The reasons for which TLS itself fails, by OpenSSL's name for each."""
FAILED: Final = Counter(
    "penstock_handshakes_failed",
    "TLS handshakes with clients that failed, by the reason: what is wrong with their certificates; left and "
    "late where they did not go on.",
    ["reason"],
)


def reason_of(error: OSError | RuntimeError) -> str:
    """The reason for which a handshake failed, given what the event loop raised."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _OF_CERTIFICATES.get(error.verify_code, OTHER)
    if isinstance(error, ssl.SSLError):
        return _OF_TLS.get(error.reason, OTHER)
    return LATE if isinstance(error, ConnectionAbortedError) else LEFT


def told_by(error: OSError | RuntimeError) -> str:
    """The words of OpenSSL on a failure, for the operator."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(getattr(error, "reason", None) or type(error).__name__)
