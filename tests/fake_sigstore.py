"""A sigstore of our own: a CA, a log of certificates and a log of signatures, with keys made for the test."""

import base64
import contextlib
import hashlib
import json
import struct
import time
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.http_serving import QuietHandler, serving

from prejit.runtime.format.names import SIGNATURE_MEDIA_TYPE, STATEMENT_MEDIA_TYPE
from prejit.runtime.trust.signed_statements import pae

ISSUER = "https://issuer.example"
IDENTITY = "https://ci.example/acme/models/release.yml@refs/heads/main"
_START = "2020-01-01T00:00:00Z"
_ISSUER_OID = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS_OID = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_HASH = hashes.SHA256()
_SHA256 = ec.ECDSA(_HASH)


def b64(content):
    return base64.b64encode(content).decode("ascii")


def pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


def _der(key):
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _raw(certificate):
    return {"rawBytes": b64(certificate.public_bytes(serialization.Encoding.DER))}


def _log_id(key):
    return hashlib.sha256(_der(key)).digest()


def _key():
    return ec.generate_private_key(ec.SECP256R1())


class FakeSigstore:
    """A sigstore whose clock can be ahead."""

    def __init__(self):
        self._late_seconds = 0.0
        self._ca, self._ct, self._rekor = _key(), _key(), _key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake sigstore")])
        years = (datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2090))
        critical = [x509.BasicConstraints(ca=True, path_length=0), _usage(key_cert_sign=True)]
        builder = _builder(name, name, self._ca.public_key(), 1, *years, critical=critical)
        self._root = builder.sign(self._ca, _HASH)

    def trusted_root(self):
        authority = {
            "subject": {"organization": "fake", "commonName": "fake"},
            "uri": "http://fulcio.invalid",
            "certChain": {"certificates": [_raw(self._root)]},
            "validFor": {"start": _START},
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            **{"tlogs": [_log(self._rekor)], "ctlogs": [_log(self._ct)]},
            **{"certificateAuthorities": [authority], "timestampAuthorities": []},
        }

    @property
    def now(self):
        return time.time() + self._late_seconds

    def certificate(self, public, identity, issuer, *, stamped=True):
        """Return a certificate for ten minutes from now on, with the log's time stamp or without one."""
        start = datetime.fromtimestamp(int(self.now), UTC)
        end, number = start + timedelta(minutes=10), x509.random_serial_number()
        who = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        builder = _builder(
            *(x509.Name([]), self._root.subject, public, number, start, end),
            critical=[_usage(digital_signature=True), who],
            other=[
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]),
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.public_key()),
                x509.UnrecognizedExtension(_ISSUER_OID, issuer.encode()),
            ],
        )
        if not stamped:
            return builder.sign(self._ca, _HASH)
        body = builder.sign(self._ca, hashes.SHA256()).tbs_certificate_bytes
        moment = int(self.now * 1000)
        issuer_id = hashlib.sha256(_der(self._ca)).digest()
        entry = struct.pack("!BBQH", 0, 0, moment, 1) + issuer_id
        entry += len(body).to_bytes(3, "big") + body + struct.pack("!H", 0)
        signature = self._ct.sign(entry, _SHA256)
        stamp = struct.pack("!B32sQHBBH", 0, _log_id(self._ct), moment, 0, 4, 3, len(signature))
        stamp += signature
        listed = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        length = bytes([len(listed)]) if len(listed) < 128 else bytes([0x81, len(listed)])
        value = x509.UnrecognizedExtension(_TIMESTAMPS_OID, b"\x04" + length + listed)
        return builder.add_extension(value, critical=False).sign(self._ca, _HASH)

    def log(self, envelope, certificate):
        """Log an envelope and return what Rekor's API returns for it. `certificate` is in PEM."""
        payload = base64.b64decode(envelope["payload"])
        plain = json.dumps(envelope, sort_keys=True).encode()
        spec = {
            "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(plain).hexdigest()},
            "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
            "signatures": [
                {"signature": each["sig"], "verifier": b64(certificate)}
                for each in envelope["signatures"]
            ],
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}, sort_keys=True)
        leaf = hashlib.sha256(b"\x00" + body.encode()).digest()
        before = hashlib.sha256(b"\x00an entry before").digest()
        root = hashlib.sha256(b"\x01" + before + leaf).digest()
        note = f"rekor.invalid - 1\n2\n{b64(root)}\n"
        signature = _log_id(self._rekor)[:4] + self._rekor.sign(note.encode(), _SHA256)
        found = {"body": b64(body.encode()), "integratedTime": int(self.now)}
        found |= {"logID": _log_id(self._rekor).hex(), "logIndex": 1}
        promised = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
        proof = {
            **{"logIndex": 1, "treeSize": 2, "rootHash": root.hex(), "hashes": [before.hex()]},
            "checkpoint": f"{note}\n\u2014 rekor.invalid {b64(signature)}\n",
        }
        promise = b64(self._rekor.sign(promised, _SHA256))
        return {**found, "verification": {"inclusionProof": proof, "signedEntryTimestamp": promise}}

    def sign(
        self,
        payload,
        *,
        identity=IDENTITY,
        issuer=ISSUER,
        stamped=True,
        late_seconds=0,
        payload_type=STATEMENT_MEDIA_TYPE,
    ):
        key = _key()
        certificate = self.certificate(key.public_key(), identity, issuer, stamped=stamped)
        signature = key.sign(pae(payload, payload_type), _SHA256)
        envelope = {"payload": b64(payload), "payloadType": payload_type}
        envelope["signatures"] = [{"sig": b64(signature)}]
        self._late_seconds = late_seconds
        entry = self.log(envelope, pem(certificate))
        self._late_seconds = 0.0
        proof = entry["verification"]["inclusionProof"]
        promise = {"signedEntryTimestamp": entry["verification"]["signedEntryTimestamp"]}
        logged = {
            "logIndex": str(entry["logIndex"]),
            "logId": {"keyId": b64(bytes.fromhex(entry["logID"]))},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(entry["integratedTime"]),
            "inclusionPromise": promise,
            "inclusionProof": {
                **{name: str(proof[name]) for name in ("logIndex", "treeSize")},
                "rootHash": b64(bytes.fromhex(proof["rootHash"])),
                "hashes": [b64(bytes.fromhex(each)) for each in proof["hashes"]],
                "checkpoint": {"envelope": proof["checkpoint"]},
            },
            "canonicalizedBody": entry["body"],
        }
        return {
            "mediaType": SIGNATURE_MEDIA_TYPE,
            "verificationMaterial": {"certificate": _raw(certificate), "tlogEntries": [logged]},
            "dsseEnvelope": envelope,
        }

    @contextlib.contextmanager
    def serving(self):
        """Answer as Fulcio and Rekor, and give the configuration of a client as JSON."""
        with serving(type("Handler", (_Handler,), {"sigstore": self})) as place:
            yield json.dumps(client_config(f"http://{place}", self.trusted_root()))


def client_config(url, trusted_root):
    """Return a ClientTrustConfig of sigstore: where its services are, and its trusted root."""
    service = {"url": url, "majorApiVersion": 1, "validFor": {"start": _START}, "operator": "fake"}
    return {
        "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
        "trustedRoot": trusted_root,
        "signingConfig": {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            **{"caUrls": [service], "oidcUrls": [], "rekorTlogUrls": [service], "tsaUrls": []},
            **{"rekorTlogConfig": {"selector": "ANY"}, "tsaConfig": {"selector": "ANY"}},
        },
    }


def token(*, identity=IDENTITY, issuer=ISSUER, audience="sigstore", seconds=600):
    """Return an identity token that is good for some seconds. Only its issuer would check its signature."""
    now = int(time.time())
    claims = {"iss": issuer, "sub": identity, "aud": audience, "iat": now, "exp": now + seconds}
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*texts, b"c2ln"]).decode("ascii")


class _Handler(QuietHandler):
    sigstore: FakeSigstore

    def do_POST(self):
        asked = json.loads(self.content())
        if self.path == "/api/v2/signingCert":
            found = self._certificate(asked)
        else:
            assert self.path == "/api/v1/log/entries"
            proposed = asked["spec"]["proposedContent"]
            certificate = base64.b64decode(proposed["verifiers"][0])
            found = {"0" * 64: self.sigstore.log(json.loads(proposed["envelope"]), certificate)}
        self.reply(201, json.dumps(found).encode(), content_type="application/json")

    def _certificate(self, asked):
        claims = self.headers["Authorization"].removeprefix("Bearer ").split(".")[1]
        who = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        request = x509.load_pem_x509_csr(base64.b64decode(asked["certificateSigningRequest"]))
        public = request.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        made = self.sigstore.certificate(public, who["sub"], who["iss"])
        chain = [pem(each).decode() for each in (made, self.sigstore._root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}


def _builder(subject, issuer, public, number, start, end, critical, other=()):
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(number)
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    for each in (*critical, *other):
        builder = builder.add_extension(each, critical=each in critical)
    return builder


def _usage(*, digital_signature=False, key_cert_sign=False):
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )


def _log(key):
    return {
        "baseUrl": "http://log.invalid",
        "hashAlgorithm": "SHA2_256",
        "publicKey": {
            "rawBytes": b64(_der(key)),
            "keyDetails": "PKIX_ECDSA_P256_SHA_256",
            "validFor": {"start": _START},
        },
        "logId": {"keyId": b64(_log_id(key))},
    }
