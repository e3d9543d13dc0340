"""A network laboratory on one Linux machine: hosts, home routers with real NAT, slow lines, an eavesdropper.

Needs root, `ip` and `tc` (iproute2), and `iptables` or `nft`; `net.why_not()` says what is missing.  Never
touches the machine's own interfaces, routes or firewall: everything is in namespaces of its own.

    ns.py          namespaces by name, who owns them, what dead processes have left
    net.py         Net, Host, Router; why_not()
    nat.py         a home router's rules, in iptables or nft
    line.py        a cable: rates, delay, loss
    shape.py       a rate
    arrivals.py    delay and loss; delay.py: the program that holds packets where the kernel has no netem
    group.py       a coordinator and its workers, each on a host of its own
    volunteers.py  `make lab`: step times with nobody, half and everybody behind NAT
"""
