"""XML out and in: a small writer for the documents S3 answers with, and a bounded reader for those clients send.

The reader stands on expat with handlers that refuse: DOCTYPE, entities, processing instructions, encodings other than UTF-8, too
much depth, too many elements or attributes, tags without end. It needs neither a namespace nor a prolog and keeps local names
only. Nothing here touches the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.parsers import expat
from xml.sax.saxutils import escape

Node = tuple[str, "str | Sequence[Node]"]
"""An element to write: its name, and its text or its children."""

PROLOG: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_DEPTH: Final = 8
MAX_ELEMENTS: Final = 100_000
MAX_ATTRIBUTES: Final = 16
MAX_TAG_BYTES: Final = 64 * 1024
"""Of one tag or comment. 4 MiB of attributes in one tag took 1.4 s of the event loop and 53 MiB."""

_PIECE_BYTES: Final = 16 * 1024
_ENCODINGS: Final = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})

# XML 1.0 cannot hold most control characters at all; S3 writes them as character references nevertheless, and so do we:
# a lenient reader gets the key back, a strict one asks with encoding-type=url. Surrogates and U+FFFE, U+FFFF are likewise.
_UNWRITABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0d\x0e-\x1f\ufffe\uffff]")
# Nearly nothing has to be escaped: one look instead of four halves the cost of a page of a listing.
_SPECIAL: Final = re.compile("[&<>\x00-\x08\x0b\x0c\x0d\x0e-\x1f\ufffe\uffff]").search


class XmlSyntaxError(ValueError):
    """The document is not well-formed, or uses what is refused or exceeds a bound."""


@dataclass(slots=True)
class Element:
    """An element that was read: local name, text directly inside it, child elements in order, attributes as they were named."""

    name: str
    text: str = ""
    children: list[Element] = field(default_factory=list)
    attributes: Mapping[str, str] = field(default_factory=dict)

    def child(self, name: str) -> Element | None:
        """The first child of that name, or None."""
        for element in self.children:
            if element.name == name:
                return element
        return None

    def child_text(self, name: str) -> str | None:
        """The text of the first child of that name, or None."""
        element = self.child(name)
        return None if element is None else element.text


def text(value: str) -> str:
    """`value` escaped as element content; control characters become character references."""
    if not _SPECIAL(value):
        return value
    escaped = escape(value)
    if _UNWRITABLE.search(escaped):
        escaped = _UNWRITABLE.sub(lambda match: f"&#x{ord(match[0]):X};", escaped)
    return escaped


def document(root: str, children: Sequence[Node], *, namespace: bool = True) -> bytes:
    """A whole document in UTF-8. Element names come from this program and are not escaped."""
    pieces = [PROLOG, f'<{root} xmlns="{NAMESPACE}">' if namespace else f"<{root}>"]
    _write(children, pieces)
    pieces.append(f"</{root}>")
    return "".join(pieces).encode("utf-8", "xmlcharrefreplace")


def _write(nodes: Sequence[Node], pieces: list[str]) -> None:
    for name, content in nodes:
        if isinstance(content, str):
            pieces.append(f"<{name}>{text(content)}</{name}>" if content else f"<{name}></{name}>")
        else:
            pieces.append(f"<{name}>")
            _write(content, pieces)
            pieces.append(f"</{name}>")


def parse(data: bytes, *, root: str) -> Element:
    """Read a document whose outermost element is `root`. The caller has bounded `data`.

    Raises `XmlSyntaxError` for everything else, and nothing but that.
    """
    reader = _Reader()
    try:
        reader.feed(data)
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise XmlSyntaxError(str(error)) from error
    if reader.root is None or reader.root.name != root:
        raise XmlSyntaxError(f"the document is not a {root}")
    return reader.root


class _Reader:
    __slots__ = ("_count", "_open", "_texts", "root")

    def __init__(self) -> None:
        self.root: Element | None = None
        self._open: list[Element] = []
        self._texts: list[list[str]] = []
        self._count = 0

    def feed(self, data: bytes) -> None:
        if b"\0" in data:  # expat reads UTF-16 whatever it is told
            raise XmlSyntaxError("documents are UTF-8")
        parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.XmlDeclHandler = self._declaration
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.ProcessingInstructionHandler = self._refuse
        parser.ExternalEntityRefHandler = self._refuse
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            parser.Parse(piece, False)  # noqa: FBT003 - expat takes it by position only
            # The index stays where a tag begins whose end has not come yet.
            if start + len(piece) - parser.CurrentByteIndex > MAX_TAG_BYTES:
                raise XmlSyntaxError("a tag is too long")
        parser.Parse(b"", True)  # noqa: FBT003 - likewise

    @staticmethod
    def _declaration(_version: str, encoding: str | None, _standalone: int) -> None:
        if encoding is not None and encoding.lower() not in _ENCODINGS:
            raise XmlSyntaxError("documents are UTF-8")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH or len(attributes) > MAX_ATTRIBUTES:
            raise XmlSyntaxError("too many elements or attributes, or too deep")
        element = Element(name.rpartition(":")[2], attributes=attributes)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._texts.append([])

    def _end(self, _name: str) -> None:
        self._open.pop().text = "".join(self._texts.pop())

    def _characters(self, data: str) -> None:
        self._texts[-1].append(data)

    @staticmethod
    def _refuse(*_: object) -> int:
        raise XmlSyntaxError("document types, entities and processing instructions are refused")
