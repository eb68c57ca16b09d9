"""Keys and policies for tests of trust."""

from functools import cache

from prejit.compiler.signing.signers import parse_private_key


@cache
def signer(name, curve="SECP256R1"):
    """Return a private key; the same one for the same name in one run."""
    return parse_private_key(private_pem(name, curve), name)


@cache
def private_pem(name, curve="SECP256R1"):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(getattr(ec, curve)()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_table(name, key=None, **more):
    pem = (key or signer(name)).public.pem
    lines = "".join(f"{key} = {value}\n" for key, value in more.items())
    return f'[keys.{name}]\npem = """\n{pem}"""\n{lines}\n'


def write_policy(path, *texts):
    path.write_text("\n".join(texts))
    return path
