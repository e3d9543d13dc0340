"""Fuzzing: bytes that nobody would send on purpose, into everything that reads bytes from others.

targets/     what is fed, and what must hold afterwards        bytes -> accepted, refused, or an exception
source       bytes as a row of choices                         how bytes become messages and schedules
drawing      a value of every field of the schema from choices
mutate       one input from others
trial        one input, watched: time, memory, exceptions      used by both roads
own, guided  two roads: this package's loop, or atheris        guided by coverage, both
reach        which lines of the product an input reaches
corpus       the inputs that are kept, beside this package
commands     `make fuzz`
"""
