"""Fuzzing of everything that reads bytes from others.

targets/     what is fuzzed, and what must hold afterwards     bytes -> accepted, refused, or an exception
source       bytes as a sequence of choices                    how bytes become messages and schedules
drawing      a value for every field type, from choices
mutate       one input from others
trial        one input: its time, memory and exceptions        used by both fuzzers
own, guided  two fuzzers: this package's loop, or atheris      both guided by coverage
reach        which lines of the product an input reaches
corpus       the inputs in the repository, beside this package
commands     `make fuzz`
"""
