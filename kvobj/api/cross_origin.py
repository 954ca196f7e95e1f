"""Cross-origin requests: what a bucket's rules let pages of other origins send and read.

A preflight (OPTIONS) is answered by the bucket's rules alone: nobody is asked who they are, and no key is looked up, so it tells
nothing of what a private bucket holds. Any other request is answered as ever, refusals too; where a rule fits, headers say that the
page may read the answer. Sources: Fetch standard, "CORS protocol"; S3 User Guide, "Cross-origin resource sharing".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.header_text import Header, is_plain
from kvobj.api.message import Reply, RequestHead
from kvobj.api.operations import Preflight
from kvobj.api.request import Target
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.setting_rows import CorsRule
from kvobj.errors import KvobjError

VARY: Final = ("vary", "Origin, Access-Control-Request-Headers, Access-Control-Request-Method")
_METHOD_HEADER: Final = "access-control-request-method"
_HEADERS_HEADER: Final = "access-control-request-headers"
_NOT_ALLOWED: Final = (
    "CORSResponse: This CORS request is not allowed. This is usually because the evalution of Origin, request method / "
    "Access-Control-Request-Method or Access-Control-Request-Headers are not whitelisted by the resource's CORS spec."
)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the first rule that fits lets a page do. `origin` is the page's, or `*` where the rule lets any in."""

    origin: str
    headers: tuple[str, ...]
    rule: CorsRule

    def reply_headers(self) -> list[Header]:
        """The headers that tell the browser."""
        rule = self.rule
        headers: list[Header] = [
            ("access-control-allow-origin", self.origin),
            ("access-control-allow-methods", ", ".join(rule.methods)),
        ]
        if self.headers:
            headers.append(("access-control-allow-headers", ", ".join(self.headers)))
        if rule.exposed:
            headers.append(("access-control-expose-headers", ", ".join(rule.exposed)))
        if rule.max_age_seconds is not None:
            headers.append(("access-control-max-age", str(rule.max_age_seconds)))
        if self.origin != "*":
            headers.append(("access-control-allow-credentials", "true"))
        headers.append(VARY)
        return headers


def match_rules(rules: Iterable[CorsRule], *, origin: str, method: str, requested: str | None) -> Allowance | None:
    """What the first rule says that has the origin, the method and every header of the `requested` list; None: no rule does.

    Origins are compared as they stand, names of headers without regard to case. An allowed `*` stands for any text, also none.
    """
    names = [name for piece in (requested or "").split(",") if (name := piece.strip().lower())]
    for rule in rules:
        if method not in rule.methods:
            continue
        fitting = next((pattern for pattern in rule.origins if _fits(pattern, origin)), None)
        if fitting is None:
            continue
        patterns = [pattern.lower() for pattern in rule.headers]
        if all(any(_fits(pattern, name) for pattern in patterns) for name in names):
            return Allowance("*" if fitting == "*" else origin, tuple(names), rule)
    return None


def _fits(pattern: str, value: str) -> bool:
    front, star, back = pattern.partition("*")
    if not star:
        return pattern == value
    return len(value) >= len(front) + len(back) and value.startswith(front) and value.endswith(back)


class CrossOrigin:
    """See the module's text. Event-loop-only."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def preflight(self, exchange: Exchange, operation: Preflight) -> Reply:
        """The answer to OPTIONS on a bucket or a key. Raises `S3Error` BadRequest and AccessForbidden."""
        fields = exchange.fields
        origin, method = fields.get("origin"), fields.get(_METHOD_HEADER)
        if origin is None:
            raise S3Error("BadRequest", "Insufficient information. Origin request header needed.")
        bucket = await self._catalog.bucket(operation.bucket) if operation.bucket else None
        if bucket is None or not bucket.cors:
            reason = "Bucket not found" if bucket is None else "CORS is not enabled for this bucket."
            raise S3Error(
                "AccessForbidden", f"CORSResponse: {reason}", Method=method or "OPTIONS", ResourceType="BUCKET"
            )
        if method is None:
            raise S3Error("BadRequest", "Invalid Access-Control-Request-Method: null")
        allowance = _allowance(bucket.cors, fields, origin=origin, method=method)
        if allowance is None:
            resource_type = "OBJECT" if operation.key else "BUCKET"
            raise S3Error("AccessForbidden", _NOT_ALLOWED, Method=method, ResourceType=resource_type)
        return exchange.reply(200, allowance.reply_headers())

    async def let_read(self, reply: Reply, head: RequestHead, target: Target, fields: Mapping[str, str]) -> Reply:
        """The reply to a request with an Origin, with the headers that let the page read it if a rule of the bucket says so."""
        if not target.bucket or head.method == "OPTIONS":
            return reply
        bucket = None
        with suppress(KvobjError):  # the answer is made: that it cannot be shown to a page does not change it
            bucket = await self._catalog.bucket(target.bucket)
        if bucket is None or not bucket.cors:
            return reply
        method = fields.get(_METHOD_HEADER, head.method)
        allowance = _allowance(bucket.cors, fields, origin=fields["origin"], method=method)
        if allowance is None:
            return reply
        return msgspec.structs.replace(reply, headers=(*reply.headers, *allowance.reply_headers()))


def _allowance(rules: tuple[CorsRule, ...], fields: Mapping[str, str], *, origin: str, method: str) -> Allowance | None:
    requested = fields.get(_HEADERS_HEADER)
    if not is_plain(origin) or not is_plain(requested or ""):  # both are told again in the reply
        return None
    return match_rules(rules, origin=origin, method=method, requested=requested)
