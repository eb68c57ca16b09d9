"""A shared store as a build uses it: where it is, in which namespace, who may write and whom it believes."""

from __future__ import annotations

from dataclasses import dataclass

from prejit.compiler.sharing.remote import Remote
from prejit.compiler.signing.private_key import PrivateKey
from prejit.compiler.store.key import Key
from prejit.runtime.trust.public_keys import PublicKey


@dataclass(frozen=True)
class Tier:
    """A shared store, and what a build does with it.

    Attributes:
        remote: where its files are.
        namespace: separates the results of those who may write it from others in the same remote store.
        believed: keys; one of them must have signed a result. None: anyone may have written it.
        writes: whether results that are made here go there.
        signer: signs them; None: nobody does.
    """

    remote: Remote
    namespace: str = ""
    believed: tuple[PublicKey, ...] = ()
    writes: bool = True
    signer: PrivateKey | None = None

    @property
    def label(self) -> str:
        """Name of the remote store and namespace, for people."""
        return f"{self.remote.name} ({self.namespace})" if self.namespace else self.remote.name

    def path_of(self, key: Key) -> str:
        """Return the name of the file with a key's result."""
        return f"ac/{key.digits_in(self.namespace)}"
