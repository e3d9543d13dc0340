"""Makes a namespace a home router, with rules of nft or iptables: address translation, and a firewall.

LAN 192.168.1.0/24 --- lan | router | wan --- internet 10.77.0.0/24
    from the LAN to anywhere            forwarded, under the router's own address (masquerade)
    an answer to that                   forwarded back
    all other packets that arrive by wan   dropped without an answer, as home routers do
"""

from __future__ import annotations

import shutil

from lab.ns import LabError, command, write_sysctls

LAN, WAN = "lan", "wan"
"""The names of a router's two interfaces."""

FIREWALLS = ("nft", "iptables")
"""In order of preference."""


def firewall() -> str:
    """Return the firewall to use here.  Raises `LabError` if there is none."""
    for name in FIREWALLS:
        if shutil.which(name):
            return name
    raise LabError("neither nft nor iptables is installed (on Debian or Ubuntu: apt install nftables)")


def masquerade(namespace: str, with_firewall: str = "") -> None:
    """Make the namespace a router with NAT.  Raises `LabError` if the kernel refuses."""
    name = with_firewall or firewall()
    write_sysctls(namespace, {"net/ipv4/ip_forward": "1"})
    if name == "nft":
        command("ip", "netns", "exec", namespace, "nft", "-f", "-", stdin=_NFT)
    else:
        for rule in _IPTABLES:
            command("ip", "netns", "exec", namespace, "iptables", "--wait", *rule.split())


def forward(namespace: str) -> None:
    """Make the namespace a router without NAT: both sides reach each other.  Raises `LabError`."""
    write_sysctls(namespace, {"net/ipv4/ip_forward": "1"})


_NFT = f"""
table ip home {{
    chain outwards {{
        type nat hook postrouting priority 100;
        oifname "{WAN}" masquerade
    }}
    chain inwards {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "{LAN}" accept
    }}
    chain itself {{
        type filter hook input priority 0; policy accept;
        ct state established,related accept
        iifname "{WAN}" drop
    }}
}}
"""

_IPTABLES = (
    f"-t nat -A POSTROUTING -o {WAN} -j MASQUERADE",
    "-P FORWARD DROP",
    "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    f"-A FORWARD -i {LAN} -j ACCEPT",
    "-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    f"-A INPUT -i {WAN} -j DROP",
)
