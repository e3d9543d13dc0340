"""Shared parts of the tests of this folder; only `library` imports gridtrain.

library         names of the library under test, to be adapted when they change
dashboard       the same, of an optional part
files           the recorded files, and private copies of them
positions       values as plain JSON, without names
tiny_training   a model, an optimizer and a tracker, of exact numbers
"""
