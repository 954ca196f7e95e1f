"""Where a request comes from: the socket's address, or what a trusted proxy says of it. Pure.

X-Forwarded-For is anybody's to write, so it counts only where the socket's other end is a configured proxy, and then from the
right: the last address that is no proxy of ours is the first that none of them vouches for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from functools import lru_cache

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def source_address(remote: str, fields: Mapping[str, str], trusted_proxies: Sequence[Network]) -> str:
    """The client's address: `remote`, the socket's, unless that is a trusted proxy's."""
    if not trusted_proxies or not _is_any_of(remote, trusted_proxies):
        return remote
    source = remote
    for hop in reversed(fields.get("x-forwarded-for", "").split(",")):
        address = parse_address(hop.strip())
        if address is None:  # a proxy of ours writes addresses: from here on it is the client's own text
            return source
        source = str(address)
        if not _is_any_of(source, trusted_proxies):
            return source
    return source


def came_by_tls(remote: str, fields: Mapping[str, str], trusted_proxies: Sequence[Network]) -> bool:
    """Whether a trusted proxy says (X-Forwarded-Proto) that the client spoke TLS with it."""
    if not trusted_proxies or not _is_any_of(remote, trusted_proxies):
        return False
    return fields.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower() == "https"


@lru_cache(maxsize=1024)
def parse_address(text: str) -> Address | None:
    """The address, None for what is none. IPv4 inside IPv6 is IPv4; zones are left out."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_any_of(text: str, networks: Sequence[Network]) -> bool:
    address = parse_address(text)
    return address is not None and any(address in network for network in networks)
