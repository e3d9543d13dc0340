"""What a hostile member, or 1,500 strangers, cost the honest: real processes on loopback, measured.

    python -m hostile                 the tables of docs/reliability.md, section "Attacks and load"

    processes    starts the coordinator and the workers, reads what they say, samples memory and CPU
    honest       what the honest workers run
    mallory      what the hostile member runs: the same script over the same SDK, with hands that lie
    attacks      what she sends
    strangers    those who have no key: silent connections, half handshakes, handshakes
    undefended   a program of the group without some of its defences

The tests in tests/integration use the same pieces.
"""
