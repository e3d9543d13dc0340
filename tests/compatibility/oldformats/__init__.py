"""What the tests of this folder share; `library` has all that they use of gridtrain, in one place.

library         names of the library under test, to be adapted when they change
dashboard       the same, of an optional part
files           where the recorded files lie, and private copies of them
positions       values as plain JSON, without names
tiny_training   a model, an optimizer and a tracker, of exact numbers
"""
