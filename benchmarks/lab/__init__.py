"""A network laboratory on one Linux machine: hosts, home routers with NAT and slow links, in namespaces.

It needs root, `ip` and `tc` (iproute2), and `iptables` or `nft`; `net.why_not()` says what is missing.  The
machine's own interfaces, routes and firewall are not changed.

    ns.py           namespaces by name, their owners, removal of those that dead processes have left
    net.py          Net, Host, Router; why_not()
    nat.py          a home router's rules, in iptables or nft
    link.py         a host's link: rates, delay, loss
    shape.py        a rate
    arrivals.py     delay and loss; delay.py: a program that delays packets where the kernel has no netem
    environment.py  the environment variables of the processes
    group.py        a coordinator and its workers, each on its own host
    volunteers.py   `make lab`: step times with no, half or all workers behind NAT
    joiner.py       what a worker that joins costs the others
"""
