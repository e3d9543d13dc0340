"""The checks of `gridtrain doctor`: whether this machine can join a run, and what it would contribute.

examination           all checks, in order, with deadlines
connection_check      the coordinator's host name, port and clock
doctor_probe          handshake, the run's status, latency and rates of links
machine_check         Python, torch, GPU, memory, disk, packages of the run's script
speedup_prediction    the run's speed with and without this machine
findings              what a check returns: ok, warning or failure, with a text and a remedy
"""
