"""Certificates for nodes and engines, made with the package ``cryptography``."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

_CLOCKS_DIFFER = datetime.timedelta(hours=1)

_PURPOSES = {
    "node": [ExtendedKeyUsageOID.SERVER_AUTH],
    "engine": [ExtendedKeyUsageOID.CLIENT_AUTH],
}
"""TLS refuses an engine's certificate from a node, and reverse."""


def certificates(begin: datetime.datetime, end: datetime.datetime) -> dict[str, bytes]:
    """Make an authority and what it signs; its own private key is in none of them.

    Returns:
        PEM files by name: ``authority.pem``, and for each side ``SIDE.pem``, ``SIDE-key.pem``.
    """
    begin -= _CLOCKS_DIFFER
    authority_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ssdkv authority")])
    authority = (
        _builder(name, name, authority_key, begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    files = {"authority.pem": authority.public_bytes(serialization.Encoding.PEM)}
    for side, purposes in _PURPOSES.items():
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ssdkv {side}")])
        certificate = _signed(_builder(subject, name, key, begin, end), authority_key, purposes)
        files[f"{side}.pem"] = certificate.public_bytes(serialization.Encoding.PEM)
        files[f"{side}-key.pem"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    return files


def _signed(
    builder: x509.CertificateBuilder,
    authority_key: ec.EllipticCurvePrivateKey,
    purposes: list[ObjectIdentifier],
) -> x509.Certificate:
    public = authority_key.public_key()
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
