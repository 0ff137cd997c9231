"""Tells addresses of other machines from those of this machine and of services that only this machine reaches."""

from __future__ import annotations

import ipaddress

#: addresses at which clouds tell a machine its credentials, besides the link-local ones
METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")))


def outside(address: str) -> bool:
    """Whether an IP address may be another machine's, that is neither loopback, link-local (where clouds hand out
    credentials), nor otherwise special. Addresses of private networks may be another machine's."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved
                or ip in METADATA)
