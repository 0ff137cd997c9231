"""Tells whether an IP address may belong to another machine. Recipes of strangers may read only from such addresses.
All other addresses lead to this machine itself, or to services that only this machine can reach.
"""

from __future__ import annotations

import ipaddress

#: addresses at which clouds tell a machine its credentials, besides those in SPECIAL and the link-local ones
METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16")))
#: unique local (fd00:ec2::254 and fd20:ce::254 are metadata services), IETF assignments, Teredo, site-local; and NAT64,
#: which leads to any IPv4 address
SPECIAL = tuple(map(ipaddress.ip_network, ("fc00::/7", "192.0.0.0/24", "2001::/32", "fec0::/10", "64:ff9b::/96")))


def outside(address: str) -> bool:
    """Whether an IP address may belong to another machine. Addresses of private IPv4 networks may. Loopback and
    link-local addresses may not, and neither may those of other special ranges, such as the addresses of services
    through which clouds hand out credentials."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved
                or ip in METADATA or any(ip in network for network in SPECIAL))
