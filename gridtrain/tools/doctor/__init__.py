"""The checks of `gridtrain doctor`: whether this machine can join a run, and what it would contribute.

examination           all checks, in order, with deadlines
connection_check      host name, port, key pair of the invitation
doctor_probe          handshake, status, bursts
machine_check         Python, torch, GPU, memory, disk, clock, packages of the run's script
speedup_prediction    a step with and without this machine
findings              results and their wording
"""
