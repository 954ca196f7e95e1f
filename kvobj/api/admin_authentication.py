"""Who signed a request of the admin port: the S3 port's verifier over the same users, without its host rules."""

from __future__ import annotations

from kvobj.api.credential import CredentialParser
from kvobj.api.message import RequestHead
from kvobj.api.request import HostRules, parse_fields, parse_target
from kvobj.api.sigv4 import SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.catalog.rows import UserRow
from kvobj.errors import AccessDeniedError


class AdminAuthentication:
    """An `Authenticate` of `admin_api`. May share users and verifier with the S3 service. Event-loop-only."""

    def __init__(self, users: UserDirectory, verifier: SignatureVerifier, *, regions: frozenset[str]) -> None:
        self._users = users
        self._verifier = verifier
        self._credentials = CredentialParser(regions)
        self._rules = HostRules()

    async def __call__(self, head: RequestHead) -> UserRow:
        """The user who signed. `AccessDeniedError` for an unsigned request, `S3Error` for a wrong signature."""
        fields = parse_fields(head)
        # The path is taken apart as bucket and key, which mean nothing here: what counts is that it is signed as it was sent.
        target = parse_target(head.target, fields.get("host", ""), self._rules)
        credential = self._credentials.parse(fields, target)
        if credential is None:
            raise AccessDeniedError("the request is not signed")
        user = await self._users.with_access_key(credential.signer.access_key)
        return self._verifier.verify(credential, user, method=head.method, target=target, fields=fields).user
