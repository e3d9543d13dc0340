"""A network laboratory on one Linux machine: hosts, home routers with NAT and slow links, in namespaces.

It needs root, `ip` and `tc` (iproute2) and `iptables`; `net.why_not()` says what is missing.  The machine's
own interfaces, routes and firewall are not changed.

    ns.py           namespaces by name, their owners, removal of those that dead processes have left
    net.py          Net, Host, Router; why_not()
    link.py         a host's link: rates, delay
    delay.py        a program that delays packets
    group.py        a coordinator and its workers, each on its own host, or all on this machine
    volunteers.py   `make lab`: step times with no, half or all workers behind NAT
"""
