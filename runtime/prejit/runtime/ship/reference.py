"""References: where a bundle is, in one line that people type.

oci://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]      a registry; without both, the tag `latest`
s3://BUCKET/PATH[:TAG][@DIGEST]                  also gs:// and az://, and https:// for a static server
hf://OWNER/REPOSITORY[/PATH][:REVISION]          a repository of the Hugging Face hub, to read from
DIRECTORY, FILE.tar                              an OCI image layout; as a tar, for sites without a network
wheel:DISTRIBUTION                               the directory in a package that `prejit wheel` wrote
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from urllib.parse import urlsplit, urlunsplit

from prejit.runtime.base.files import is_digest
from prejit.runtime.errors import UsageError

REGISTRY = "oci"
HUB = "hf"
WHEEL = "wheel:"
_BUCKETS = ("s3", "gs", "az")
_OBJECTS = (*_BUCKETS, "https", "http")
SCHEMES = (REGISTRY, HUB, *_OBJECTS)
MOST_TAG_LETTERS = 128
_TAG = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MOST_TAG_LETTERS - 1}}}")
"""A tag, as the OCI distribution specification has it."""
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")
_LOGIN = re.compile(r"://[^/\s]*@(?!sha256:)")
"""A user and a password before the host of a URL."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_FORMS = (
    "give oci://HOST/REPOSITORY:TAG, s3://BUCKET/PATH, gs://, az://, hf://OWNER/REPOSITORY, https://, "
    "wheel:NAME, a directory or a .tar"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a bundle is.

    Attributes:
        scheme: how it is reached: one of `SCHEMES`, or `dir` or `tar` on this machine.
        place: the URL without tag and digest, or the path.
        tag: the name of a version; empty: none is named.
        digest: the bundle must have this digest; empty: whatever the tag leads to.
    """

    scheme: str
    place: str
    tag: str = ""
    digest: str = ""

    @property
    def is_remote(self) -> bool:
        """True if it is a URL."""
        return self.scheme in SCHEMES

    @property
    def host(self) -> str:
        """The host and the port of a URL, without a password."""
        return urlsplit(self.place).netloc.rpartition("@")[2]

    @property
    def path(self) -> str:
        """The path of a URL: a registry's repository, or what stands before every name in a bucket."""
        return urlsplit(self.place).path.strip("/")

    @property
    def is_loopback(self) -> bool:
        """True if the host is this machine, which may be asked without TLS."""
        return self.host.rpartition(":")[0] in _LOCAL_HOSTS or self.host in _LOCAL_HOSTS

    def at(self, digest: str) -> Reference:
        """Return the reference that can mean one bundle only."""
        return replace(self, digest=digest)

    def __str__(self) -> str:
        place = self.place
        if self.is_remote:
            place = urlunsplit(urlsplit(place)._replace(netloc=self.host))
        tag = f":{self.tag}" if self.tag else ""
        return f"{place}{tag}{f'@{self.digest}' if self.digest else ''}"


def is_reference(text: str | os.PathLike[str]) -> bool:
    """Return whether a text is no path: it is a URL, or names a wheel."""
    return "://" in os.fspath(text) or os.fspath(text).startswith(WHEEL)


def without_login(text: str) -> str:
    """Return a text without the user and the password of each URL in it, for messages and logs."""
    return _LOGIN.sub("://", text)


def refuse_query(url: str) -> None:
    """Raise UsageError if a URL has a query or a fragment: requests for what is below it have none."""
    place, sign, _ = re.split(r"([?#]|$)", url, maxsplit=1)
    if sign:
        raise UsageError(
            f"{without_login(place):.200}: expected a URL without a query or a fragment, found one "
            f"behind a {sign!r}",
            hint="leave it out; give a signature of a bucket in the environment, as AZURE_STORAGE_SAS_TOKEN",
        )


def parse_reference(text: str) -> Reference:
    """Return the reference that a text means; of a wheel, that of its directory.

    Raises:
        UsageError: it has no form of a reference, or the wheel is not installed.
    """
    if text.startswith(WHEEL):
        return Reference("dir", _installed(text.removeprefix(WHEEL)))
    if not is_reference(text):
        if not text:
            raise UsageError("expected a reference to a bundle, found an empty text", hint=_FORMS)
        scheme, colon, rest = text.partition(":")
        if colon and scheme in SCHEMES:  # `oci:` of skopeo, or a lost slash
            shown = without_login(f"{scheme}://{rest.lstrip('/')}")[:200]
            raise UsageError(
                f"{shown}: expected {scheme}://, found {scheme}:",
                hint=f"give {shown}, or begin with ./ for a directory",
            )
        return Reference("tar" if text.endswith(".tar") else "dir", text)
    scheme = text.partition("://")[0]
    shown = without_login(text)[:200]
    if scheme not in SCHEMES:
        raise UsageError(
            f"{shown}: expected one of {', '.join(f'{each}://' for each in SCHEMES)}, "
            f"found {scheme}://",
            hint=_FORMS,
        )
    refuse_query(text)
    place, at, digest = text.partition("@sha256:")
    digest = f"sha256:{digest}" if at else ""
    if digest and not is_digest(digest):
        raise UsageError(
            f"{shown}: expected 64 digits of 0-9a-f after @sha256:, found {digest[7:]!r:.80}"
        )
    before, slash, last = place.rpartition("/")
    colon = tag = ""
    if scheme in _BUCKETS or not before.endswith(":/"):  # behind a host stands a port
        last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(
            f"{shown}: expected a tag of up to {MOST_TAG_LETTERS} letters, digits, `.`, `_` and `-` "
            f"after the last colon, found {tag!r:.80}"
        )
    found = Reference(scheme, f"{before}{slash}{last}".rstrip("/"), tag, digest)
    try:
        is_place = bool(found.host) and bool(found.path or scheme not in (REGISTRY, HUB))
    except ValueError:  # of urlsplit: brackets that are no IPv6 address
        is_place = False
    if not is_place:
        raise UsageError(f"{shown}: expected a host and a path behind it", hint=_FORMS)
    if scheme == REGISTRY:
        if not _REPOSITORY.fullmatch(found.path):
            raise UsageError(
                f"{shown}: expected a repository of lower-case letters, digits and `.`, `_`, `-` "
                f"between them, found {found.path!r:.80}"
            )
        if not tag and not digest:
            return replace(found, tag="latest")
    return found


def _installed(name: str) -> str:
    """Return the directory of the bundle in an installed package."""
    from importlib import metadata  # few references need it

    try:
        package = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:  # of an empty name
        raise UsageError(
            f"{WHEEL}{name:.200}: expected the name of an installed package, found none of this name",
            hint=f"{sys.executable} -m pip install {name:.200}",
        ) from error
    for file in package.files or ():
        if file.name == "oci-layout":
            return os.path.dirname(str(package.locate_file(file)))
    raise UsageError(
        f"{WHEEL}{name:.200}: expected a package that `prejit wheel` wrote, found one without a bundle",
        hint="write one with: prejit wheel BUNDLE",
    )
