"""What a hostile member, or 1,500 strangers, cost honest workers, measured with real processes on loopback.

    python -m hostile                 the tables of docs/reliability.md, section "Attacks and load"

    group        the coordinator, honest workers (`observed`), attackers
    mallory      the script of the hostile member: the same training, with some messages replaced or added
    attacks      the messages of each attack
    strangers    clients without a key: silent connections, partial handshakes, handshakes
    newcomer     measures how long an honest join takes
    undefended   runs a program of the group without some of its defences
    wire         a CURVE client

tests/integration uses the same modules (`make hostile`).
"""
