"""Placement and recovery of the stages of a pipeline.  Pure.

reports of checkpoints --> checkpoint_catalog --> checkpoint_quorum    which of them count
                                  |
                                  v
states in memory ---------> whole_state       the step from which to continue
                                  |
                                  v
                            placement         partition and ranks of the next generation
"""
