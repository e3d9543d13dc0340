"""`gridtrain doctor`: can this machine join a run, and what would that bring?

findings.py  what is found, and how it is said        machine.py     Python, torch, GPU, memory, disk, clock
line.py      name, port, handshake, check-up, bursts  prediction.py  a step with and without this machine
examine.py   all of it within a fixed time
"""
