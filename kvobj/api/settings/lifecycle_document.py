"""The document of lifecycle rules, into rows and back. Pure.

Refused is what S3 refuses, with its codes and words where they are known: what no schema allows as MalformedXML, values as
InvalidArgument or InvalidRequest. Source: S3 API reference, LifecycleRule and the types below it.
"""

from __future__ import annotations

import base64
import itertools
import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from kvobj.api import xml
from kvobj.api.errors import S3Error
from kvobj.api.settings.tags import checked_tags
from kvobj.api.timestamps import iso_time
from kvobj.catalog.rows import MAX_KEY_BYTES
from kvobj.catalog.setting_rows import LifecycleRule
from kvobj.gc.lifecycle_rules import DAY_MS

MAX_RULES: Final = 1000
MAX_ID_CHARACTERS: Final = 255
_MAX_SIZE_BYTES: Final = 1_099_511_627_776_000
_MAX_INTEGER: Final = 2**31 - 1
_INTEGER: Final = re.compile(r"-?\d{1,18}\Z", re.ASCII).match
_DATE: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:T(\d\d):(\d\d):(\d\d)(\.\d{1,9})?(?:Z|([+-])(\d\d):(\d\d))?)?\Z", re.ASCII
).match
_TRANSITIONS: Final = ("Transition", "NoncurrentVersionTransition")
_TRANSITION_DAYS: Final = {"Transition": "Days", "NoncurrentVersionTransition": "NoncurrentDays"}
_STORAGE_CLASSES: Final = frozenset(
    {"GLACIER", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "DEEP_ARCHIVE", "GLACIER_IR"}
)
_RULE: Final = frozenset(
    {"ID", "Prefix", "Filter", "Status", "Expiration", "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"}
)
_SIZES: Final = ("ObjectSizeGreaterThan", "ObjectSizeLessThan")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_lifecycle(document: bytes) -> tuple[LifecycleRule, ...]:
    """The rules of a LifecycleConfiguration, in its order; a rule without an id gets one. The caller has bounded `document`.

    Raises `S3Error`: MalformedXML, InvalidArgument, InvalidRequest, InvalidTag, NotImplemented.
    """
    try:
        root = xml.parse(document, root="LifecycleConfiguration")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    if not root.children or any(child.name != "Rule" for child in root.children):
        raise S3Error("MalformedXML")
    if len(root.children) > MAX_RULES:
        raise S3Error(
            "InvalidRequest", f"The number of lifecycle rules must not exceed the allowed limit of {MAX_RULES} rules."
        )
    rules = tuple(_parse_rule(element) for element in root.children)
    if len({rule.id for rule in rules}) < len(rules):
        raise S3Error("InvalidArgument", "Rule ID must be unique. Found same ID for more than one rule")
    _check_forms(rules)
    return rules


def _parse_rule(element: xml.Element) -> LifecycleRule:
    transitions = [child for child in element.children if child.name in _TRANSITIONS]
    parts = _single(element, _RULE, but=_TRANSITIONS)
    status = parts["Status"].text.strip() if "Status" in parts else ""
    if status not in ("Enabled", "Disabled"):
        raise S3Error("MalformedXML")
    if ("Prefix" in parts) is ("Filter" in parts):
        raise S3Error("MalformedXML")
    fields: dict[str, object] = {"id": _parse_id(parts.get("ID")), "enabled": status == "Enabled"}
    if "Prefix" in parts:
        fields |= {"form": "prefix", "key_prefix": _key_prefix(parts["Prefix"])}
    else:
        fields |= _parse_filter(parts["Filter"])
    if "Expiration" in parts:
        fields |= _parse_expiration(parts["Expiration"])
    if "AbortIncompleteMultipartUpload" in parts:
        fields |= _parse_abort(parts["AbortIncompleteMultipartUpload"])
    if "NoncurrentVersionExpiration" in parts:
        fields |= _parse_noncurrent(parts["NoncurrentVersionExpiration"], is_old=fields["form"] == "prefix")
    for transition in transitions:
        _check_transition(transition)
    if transitions:
        name = transitions[0].name
        raise S3Error("NotImplemented", f"{name} is not implemented.", Feature=name)
    rule = LifecycleRule(**fields)  # type: ignore[arg-type] # each field comes from the function that parses it
    _check_actions(rule, parts)
    return rule


def _check_actions(rule: LifecycleRule, parts: dict[str, xml.Element]) -> None:
    """Raise `S3Error` InvalidRequest for a rule that does nothing, and for what its filter does not go with."""
    if not parts.keys() & {"Expiration", "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"}:
        raise S3Error("InvalidRequest", "At least one action needs to be specified in a rule")
    narrowed = "Tags" if rule.tags else None
    if rule.size_over_bytes is not None or rule.size_under_bytes is not None:
        narrowed = narrowed or "Object Size"
    if narrowed is not None:
        if rule.abort_upload_days is not None:
            raise S3Error("InvalidRequest", f"AbortIncompleteMultipartUpload cannot be specified with {narrowed}.")
        if rule.expires_delete_marker is not None:
            raise S3Error("InvalidRequest", f"ExpiredObjectDeleteMarker cannot be specified with {narrowed}.")


def _check_forms(rules: Sequence[LifecycleRule]) -> None:
    """Raise `S3Error` InvalidRequest where old and new forms are mixed, and where old prefixes overlap in one action."""
    old = [rule for rule in rules if rule.form == "prefix"]
    if not old:
        return
    if len(old) < len(rules):
        message = (
            "Filter element can only be used in Lifecycle V2."
            if rules[0].form == "prefix"
            else "Base level prefix cannot be used in Lifecycle V2, prefixes are only supported in the Filter."
        )
        raise S3Error("InvalidRequest", message)
    for action, of_action in (
        ("Expiration", [rule for rule in old if _has_expiration(rule)]),
        ("AbortIncompleteMultipartUpload", [rule for rule in old if rule.abort_upload_days is not None]),
        ("NoncurrentVersionExpiration", [rule for rule in old if rule.noncurrent_days is not None]),
    ):
        ordered = sorted(rule.key_prefix for rule in of_action)
        for one, other in itertools.pairwise(ordered):
            if other.startswith(one):
                raise S3Error(
                    "InvalidRequest",
                    f"Found overlapping prefixes '{one}' and '{other}' for same action type '{action}'",
                )


# -- elements ----------------------------------------------------------------------------------------------------------
def _single(element: xml.Element, names: frozenset[str], *, but: Iterable[str] = ()) -> dict[str, xml.Element]:
    """The children by name, each known and there once; `but` these may be there as often as they like."""
    found: dict[str, xml.Element] = {}
    for child in element.children:
        if child.name in but:
            continue
        if child.name not in names or child.name in found:
            raise S3Error("MalformedXML")
        found[child.name] = child
    return found


def _parse_id(element: xml.Element | None) -> str:
    if element is None or not element.text:
        return base64.b64encode(str(uuid.uuid4()).encode()).decode()
    if len(element.text) > MAX_ID_CHARACTERS:
        raise S3Error("InvalidArgument", f"ID length should not exceed allowed limit of {MAX_ID_CHARACTERS}")
    return element.text


def _key_prefix(element: xml.Element) -> str:
    value = element.text
    if len(value.encode()) > MAX_KEY_BYTES:
        raise S3Error("InvalidRequest", f"The maximum size of a prefix is {MAX_KEY_BYTES}.")
    return value


def _parse_filter(element: xml.Element) -> dict[str, object]:
    """What a Filter says: nothing, one condition, or several in an And."""
    if not element.children:
        return {"form": "empty"}
    if len(element.children) > 1:
        raise S3Error("MalformedXML")
    (only,) = element.children
    if only.name != "And":
        return {"form": "filter"} | _conditions(element.children)
    # S3 counts an empty prefix as a condition; alone no condition makes an And.
    if len(only.children) < 2:  # noqa: PLR2004 - two conditions
        raise S3Error("MalformedXML")
    conditions = _conditions(only.children)
    return {"form": "and-prefix" if conditions.get("key_prefix") == "" else "and"} | conditions


def _conditions(elements: Sequence[xml.Element]) -> dict[str, object]:
    fields: dict[str, object] = {}
    tags: list[tuple[str, str]] = []
    for element in elements:
        if element.name == "Tag":
            parts = _single(element, frozenset({"Key", "Value"}))
            if "Key" not in parts:
                raise S3Error("MalformedXML")
            tags.append((parts["Key"].text, parts["Value"].text if "Value" in parts else ""))
            continue
        name, value = _condition(element)
        if name in fields:
            raise S3Error("MalformedXML")
        fields[name] = value
    if len({name for name, _ in tags}) < len(tags):
        raise S3Error("InvalidRequest", "Duplicate Tag Keys are not allowed.")
    if tags:
        fields["tags"] = checked_tags(tags, tags_max=len(tags))
    over, under = fields.get("size_over_bytes"), fields.get("size_under_bytes")
    if isinstance(over, int) and isinstance(under, int) and under <= over:
        raise S3Error("InvalidRequest", "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan'.")
    return fields


def _condition(element: xml.Element) -> tuple[str, object]:
    if element.name == "Prefix":
        return "key_prefix", _key_prefix(element)
    if element.name not in _SIZES:
        raise S3Error("MalformedXML")
    is_under = element.name == "ObjectSizeLessThan"
    value = _integer(element)
    if not int(is_under) <= value <= _MAX_SIZE_BYTES:
        raise S3Error("InvalidRequest", f"'{element.name}' should be between {int(is_under)} and {_MAX_SIZE_BYTES}.")
    return ("size_under_bytes" if is_under else "size_over_bytes"), value


def _parse_expiration(element: xml.Element) -> dict[str, object]:
    parts = _single(element, frozenset({"Days", "Date", "ExpiredObjectDeleteMarker"}))
    if len(parts) != 1:
        raise S3Error("MalformedXML")
    if "Days" in parts:
        return {"expire_days": _days(parts["Days"], "'Days' for Expiration action")}
    if "Date" in parts:
        return {"expire_date_ms": _date_ms(parts["Date"])}
    marker = parts["ExpiredObjectDeleteMarker"].text.strip().lower()
    if marker not in ("true", "false"):
        raise S3Error("MalformedXML")
    return {"expires_delete_marker": marker == "true"}


def _parse_abort(element: xml.Element) -> dict[str, object]:
    parts = _single(element, frozenset({"DaysAfterInitiation"}))
    if not parts:
        raise S3Error("MalformedXML")
    what = "'DaysAfterInitiation' for AbortIncompleteMultipartUpload action"
    return {"abort_upload_days": _days(parts["DaysAfterInitiation"], what)}


def _parse_noncurrent(element: xml.Element, *, is_old: bool) -> dict[str, object]:
    parts = _single(element, frozenset({"NoncurrentDays", "NewerNoncurrentVersions"}))
    if "NoncurrentDays" not in parts:
        raise S3Error("MalformedXML")
    what = "for NoncurrentVersionExpiration action"
    fields: dict[str, object] = {"noncurrent_days": _days(parts["NoncurrentDays"], f"'NoncurrentDays' {what}")}
    if "NewerNoncurrentVersions" in parts:
        if is_old:
            raise S3Error("InvalidRequest", "NewerNoncurrentVersions element can only be used in Lifecycle V2.")
        fields["noncurrent_kept"] = _days(parts["NewerNoncurrentVersions"], f"'NewerNoncurrentVersions' {what}")
    return fields


def _check_transition(element: xml.Element) -> None:
    """Refuse what would be no transition in S3 either."""
    days = _TRANSITION_DAYS[element.name]
    dates = ("Date",) if element.name == "Transition" else ()
    parts = _single(element, frozenset({days, "StorageClass", "NewerNoncurrentVersions", *dates}))
    storage_class = parts["StorageClass"].text.strip() if "StorageClass" in parts else ""
    if storage_class not in _STORAGE_CLASSES or (days in parts and "Date" in parts):
        raise S3Error("MalformedXML")
    if days in parts and _integer(parts[days]) < 0:
        raise S3Error("InvalidArgument", f"'{days}' in {element.name} action must be nonnegative")
    if "Date" in parts:
        _date_ms(parts["Date"])


# -- values ------------------------------------------------------------------------------------------------------------
def _integer(element: xml.Element) -> int:
    value = element.text.strip()
    if not _INTEGER(value):
        raise S3Error("MalformedXML")
    return int(value)


def _days(element: xml.Element, what: str) -> int:
    days = _integer(element)
    if not 1 <= days <= _MAX_INTEGER:
        raise S3Error("InvalidArgument", f"{what} must be a positive integer")
    return days


def _date_ms(element: xml.Element) -> int:
    """Midnight UTC of a day, in ISO 8601."""
    parsed = _DATE(element.text.strip())
    if parsed is None:
        raise S3Error("MalformedXML")
    year, month, day, hour, minute, second = (int(piece or 0) for piece in parsed.groups()[:6])
    _, fraction, sign, offset_hours, offset_minutes = parsed.groups()[5:]
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as error:
        raise S3Error("MalformedXML") from error
    offset = timedelta(hours=int(offset_hours or 0), minutes=int(offset_minutes or 0))
    milliseconds = (moment - _EPOCH + (offset if sign == "-" else -offset)) // timedelta(milliseconds=1)
    if milliseconds % DAY_MS or int((fraction or ".0")[1:]):
        raise S3Error("InvalidArgument", "'Date' must be at midnight GMT")
    return milliseconds


# -- back into a document ----------------------------------------------------------------------------------------------
def lifecycle_document(rules: Iterable[LifecycleRule]) -> list[xml.Node]:
    """The children of a LifecycleConfiguration that tells of the rules."""
    return [("Rule", _rule_nodes(rule)) for rule in rules]


def _rule_nodes(rule: LifecycleRule) -> list[xml.Node]:
    nodes: list[xml.Node] = [("ID", rule.id)]
    nodes.append(("Prefix", rule.key_prefix) if rule.form == "prefix" else ("Filter", _filter_nodes(rule)))
    nodes.append(("Status", "Enabled" if rule.enabled else "Disabled"))
    if _has_expiration(rule):
        nodes.append(("Expiration", _expiration_nodes(rule)))
    if rule.noncurrent_days is not None:
        noncurrent: list[xml.Node] = [("NoncurrentDays", str(rule.noncurrent_days))]
        if rule.noncurrent_kept is not None:
            noncurrent.append(("NewerNoncurrentVersions", str(rule.noncurrent_kept)))
        nodes.append(("NoncurrentVersionExpiration", noncurrent))
    if rule.abort_upload_days is not None:
        days = [("DaysAfterInitiation", str(rule.abort_upload_days))]
        nodes.append(("AbortIncompleteMultipartUpload", days))
    return nodes


def _filter_nodes(rule: LifecycleRule) -> list[xml.Node]:
    if rule.form == "empty":
        return []
    nodes: list[xml.Node] = []
    if rule.key_prefix or rule.form == "and-prefix":
        nodes.append(("Prefix", rule.key_prefix))
    nodes += [("Tag", [("Key", name), ("Value", value)]) for name, value in rule.tags.items()]
    for name, value in zip(_SIZES, (rule.size_over_bytes, rule.size_under_bytes), strict=True):
        if value is not None:
            nodes.append((name, str(value)))
    if rule.form == "filter":
        return nodes or [("Prefix", "")]
    return [("And", nodes)]


def _has_expiration(rule: LifecycleRule) -> bool:
    return any(each is not None for each in (rule.expire_days, rule.expire_date_ms, rule.expires_delete_marker))


def _expiration_nodes(rule: LifecycleRule) -> list[xml.Node]:
    if rule.expire_days is not None:
        return [("Days", str(rule.expire_days))]
    if rule.expire_date_ms is not None:
        return [("Date", iso_time(rule.expire_date_ms))]
    return [("ExpiredObjectDeleteMarker", "true" if rule.expires_delete_marker else "false")]
