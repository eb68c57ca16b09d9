"""Logins that docker, podman and oras keep, and the tokens that registries give for them.

A login is used as the distribution specification's token authentication wants it, or as HTTP's Basic.
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.typed_json import parse_object
from prejit.runtime.errors import PrejitError, StoreError
from prejit.runtime.ship.repository import arriving

if TYPE_CHECKING:
    from requests import Response, Session

_HELPER_SECONDS = 60.0
"""How long a credential helper may take. Some ask a person."""
HUB, HUB_HOST, HUB_LOGIN = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
"""Docker's Hub: how people and tools call it, the host of its registry, and how docker names its login."""
_IDENTITY = "<token>"
"""The user name with which credential helpers mark a secret that is an identity token."""


@dataclass(frozen=True, slots=True)
class Login:
    """A login to a registry.

    Attributes:
        user, secret: name and password.
        identity: a token that a token service takes instead of them (OAuth2's refresh token); empty: none.
        source: the file that has it, for messages.
    """

    user: str
    secret: str
    identity: str
    source: str


def find_login(host: str, repository: str) -> Login | None:
    """Return the login that a tool keeps for a repository; None: nobody has logged in.

    The first file that has one counts: podman's, skopeo's and buildah's (containers-auth.json(5)), then
    docker's, which is that of oras too.

    Raises:
        StoreError: a file is not JSON, the helper that it names fails, or $REGISTRY_AUTH_FILE cannot be read.
    """
    host, names = _host_of(host), repository.split("/")
    keys = [host, *("/".join((host, *names[: end + 1])) for end in range(len(names)))]
    for path in _login_files():
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            if path == os.environ.get("REGISTRY_AUTH_FILE"):
                raise StoreError(
                    f"{path}: cannot read the logins: {error.strerror}",
                    hint="correct REGISTRY_AUTH_FILE, or unset it",
                ) from error
            continue
        config = parse_object(content)
        is_empty = b"".join(content.split()) in (b"", b"{}")  # of who has logged in nowhere
        if not config and not is_empty:
            raise StoreError(f"{path}: expected logins as JSON, found none", hint="log in again")
        server = HUB_LOGIN if host == HUB else host
        helpers = _object(config, "credHelpers")
        helper = helpers.get(server) or helpers.get(host) or config.get("credsStore")
        if helper and (found := _ask_helper(str(helper), server, path)):
            return found
        auths = _object(config, "auths")
        auths = {_host_of(key): auths[key] for key in auths} | auths
        for key in reversed(keys):
            entry = _object(auths, key)
            if entry.get("auth") or entry.get("identitytoken"):
                return _decode(entry, path)
    return None


def _host_of(key: str) -> str:
    """Return the host of a key that is a URL, as old versions of docker and its Hub have it."""
    host = key.partition("://")[2].partition("/")[0] or key
    return HUB if host in ("index.docker.io", HUB_HOST) else host


def _login_files() -> Iterator[str]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield named
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    docker = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    yield f"{runtime}/containers/auth.json"
    yield f"{config}/containers/auth.json"
    yield f"{docker}/config.json"


def _unread_logins() -> str:
    """Return which files may have a login that we cannot read, in words; empty: none."""
    found = []
    for path in _login_files():
        try:
            open(path, "rb").close()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    return f" (cannot read {'; '.join(found)})" if found else ""


def _ask_helper(helper: str, host: str, path: str) -> Login | None:
    """Return the login that a credential helper of docker keeps; None: it has none for this host."""
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(
            command, input=host.encode(), capture_output=True, timeout=_HELPER_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise StoreError(
            f"{path}: its helper {command[0]} did not answer in {_HELPER_SECONDS:g} s",
            hint=f"try it: echo {host} | {' '.join(command)}",
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path}: expected its helper {command[0]}, found none that runs: {error.strerror}",
            hint="put it on the PATH, or log in with another tool",
        ) from error
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).decode(errors="replace")
        if "not found" in said:  # helpers say so of a host that they do not know
            return None
        raise StoreError(
            f"{path}: its helper {command[0]} gives no login: {said:.300}",
            hint="log in again with the tool that it belongs to",
        )
    found = parse_object(done.stdout)
    user, secret = str(found.get("Username", "")), str(found.get("Secret", ""))
    if not secret:
        return None
    return Login(user, secret, secret if user == _IDENTITY else "", f"{command[0]} of {path}")


def _decode(entry: dict[str, Any], path: str) -> Login:
    try:
        pair = base64.b64decode(str(entry.get("auth", "")), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise StoreError(
            f"{path}: expected a login in base64: {error}", hint="log in again"
        ) from error
    user, _, secret = pair.partition(":")
    return Login(user, secret, str(entry.get("identitytoken") or ""), path)


class RegistryLogin:
    """Answers one registry that asks who we are. Its caller sees to it that one thread does so at a time.

    Attributes:
        header: the header to send; empty: nobody has asked yet.
        realm: the URL of the registry's token service; empty: it has none.
    """

    def __init__(self, host: str, repository: str, session: Session, seconds: float) -> None:
        """Read and ask nothing yet. The token service may take `seconds` to answer."""
        self.header: dict[str, str] = {}
        self.realm = ""
        self._host, self._repository, self._session = host, repository, session
        self._seconds = seconds
        self._again = f"docker login {host}, podman login or oras login"
        self._login: Login | None = None
        self._refused: Response | None = None
        self._scopes: dict[str, None] = {}

    def answer(self, asked: Response) -> Response | None:
        """Set the header for an answer that wants a login.

        Returns:
            None: ask again. Or the answer that is final: the registry's, or that of its token service.

        Raises:
            StoreError: the login must not be sent, or cannot be read.
            OSError: the token service does not answer.
        """
        from requests.utils import parse_dict_header

        if self._refused is not None:
            # A wrong password that is sent again and again locks accounts.
            return self._refused
        scheme, _, rest = asked.headers.get("www-authenticate", "").partition(" ")
        self._login = login = find_login(self._host, self._repository)
        if scheme.lower() == "basic" and login is not None:
            pair = base64.b64encode(f"{login.user}:{login.secret}".encode()).decode("ascii")
            header = {"Authorization": f"Basic {pair}"}
            if header == self.header:
                return asked
            self.header = header
            return None
        wanted = parse_dict_header(rest)
        self.realm = wanted.get("realm") or ""
        if scheme.lower() != "bearer" or not self.realm:
            return asked
        if not self.realm.lower().startswith("https://") and not asked.url.startswith("http://"):
            raise StoreError(
                f"{self._host}: the registry wants a password sent to {self.realm:.200}, without TLS",
                hint="ask who runs the registry to give its token service a certificate",
            )
        # Those of before, too: a mount wants two, and threads share the token.
        self._scopes |= dict.fromkeys((wanted.get("scope") or "").split())
        given = self._ask_token(wanted.get("service") or "")
        if given.status_code in (401, 403):
            self._refused = given
        if given.status_code in (401, 403, 429) or given.status_code >= 500:
            return given
        try:
            # An error that cuts the answer is raised where a second piece is asked for.
            content = b"".join(islice(arriving(given, self.realm), 2))
        except PrejitError:
            raise
        except Exception as error:  # urllib3's own, which are no OSErrors
            raise ConnectionError(f"{self.realm:.200}: {error}") from error
        found = parse_object(content)
        token = found.get("token") or found.get("access_token")
        if not token:
            raise StoreError(
                f"{self._host}: expected a token of its token service {self.realm:.200}, found "
                f"{given.status_code} {given.reason}",
                hint=f"log in again: {self._again}",
            )
        self.header = {"Authorization": f"Bearer {token}"}
        return None

    def _ask_token(self, service: str) -> Response:
        login = self._login
        # A redirect would carry the refresh token along.
        options: dict[str, Any] = {
            "timeout": self._seconds,
            "stream": True,
            "allow_redirects": False,
        }
        if login is not None and login.identity:
            form = {
                "grant_type": "refresh_token",
                "client_id": "prejit",
                "service": service,
                "scope": " ".join(self._scopes),
                "refresh_token": login.identity,
            }
            return self._session.post(self.realm, data=form, **options)
        query = [("service", service), *(("scope", scope) for scope in self._scopes)]
        pair = None if login is None else (login.user, login.secret)
        return self._session.get(self.realm, params=query, auth=pair, **options)

    def refusal(self, response: Response) -> tuple[str, str]:
        """Return why a registry or its token service refuses us (401, 403), and the next step, in words."""
        unread = _unread_logins() if self._login is None else ""
        who = (
            f"nobody{unread}"
            if self._login is None
            else f"{self._login.user} ({self._login.source})"
        )
        is_service = bool(self.realm) and response.url.startswith(self.realm)
        if self._login is None and (is_service or response.status_code == 401):
            return f"no login is kept for this host{unread}", f"log in: {self._again}"
        is_token = self.header.get("Authorization", "").startswith("Bearer ")
        if is_service or (response.status_code == 401 and not is_token):
            return (
                f"the login of {who} is refused: a wrong password, or it has ended",
                f"log in again: {self._again}",
            )
        times = self._token_times(response) if is_token else ""
        if times:
            return times, "set the clocks of the registry and of its token service: they differ"
        return (
            f"{who} may not do this here",
            f"ask for the right, or log in as another: {self._again}",
        )

    def _token_times(self, response: Response) -> str:
        """Return how the token and the registry's clock differ; empty: they do not, or nobody can say."""
        try:
            body = self.header["Authorization"].split(".")[1]
            claims = parse_object(base64.urlsafe_b64decode(body + "=="))
            now = parsedate_to_datetime(response.headers["Date"]).timestamp()
            ended, begins = now - float(claims["exp"]), float(claims.get("nbf", 0)) - now
        except (LookupError, TypeError, ValueError):
            return ""
        given = "the token that the registry's token service has just given"
        if ended > 0:
            return f"{given} ended {ended:.0f} s ago by the registry's clock"
        if begins > 0:
            return f"{given} begins in {begins:.0f} s by the registry's clock"
        return ""


def _object(of: dict[str, Any], key: str) -> dict[str, Any]:
    found = of.get(key)
    return found if isinstance(found, dict) else {}
