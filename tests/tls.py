"""A certificate for 127.0.0.1 that nobody but a test trusts, and its key: no secret, since it protects nothing."""

from __future__ import annotations

import functools
import ssl
import tempfile
from pathlib import Path

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBoDCCAUegAwIBAgIUXrA4xxdeNBswKTN3159l8zDxceYwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMY2twdGZzIHRlc3RzMCAXDTI2MTIwMTE1Mjk0NFoYDzIxMjYx
MTA3MTUyOTQ0WjAXMRUwEwYDVQQDDAxja3B0ZnMgdGVzdHMwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAASXFZkS0c+w0NUV+h65tre5/hL0tfwK04lRjdPXj7HCvwiN
aIJc7+amJsM0C94dgDM9qJ23yOuihTNSBPt5PLODo28wbTAdBgNVHQ4EFgQUiVVO
u7MlLKDkMQlybOJaF1P1LXYwHwYDVR0jBBgwFoAUiVVOu7MlLKDkMQlybOJaF1P1
LXYwGgYDVR0RBBMwEYcEfwAAAYIJbG9jYWxob3N0MA8GA1UdEwEB/wQFMAMBAf8w
CgYIKoZIzj0EAwIDRwAwRAIgQrlFn3SMOavJvqdWY6OJH+b5gTC9URBIc7YBgSJA
SkMCIBNIQxF4fNY9J3PngoxHDej4xMWM+bJ9MuGpF+6aBEcv
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg/VNH6g8tNFr8f3cE
j1cUDIb0nZ0vQ4VwMoyLMcGZCYKhRANCAASXFZkS0c+w0NUV+h65tre5/hL0tfwK
04lRjdPXj7HCvwiNaIJc7+amJsM0C94dgDM9qJ23yOuihTNSBPt5PLOD
-----END PRIVATE KEY-----
"""


@functools.cache
def server_context() -> ssl.SSLContext:
    """For a server on loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(CERTIFICATE + KEY)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def write_bundle(directory: Path) -> str:
    """A file of certificates to trust: its path."""
    file = directory / "ca.pem"
    file.write_text(CERTIFICATE)
    return str(file)
