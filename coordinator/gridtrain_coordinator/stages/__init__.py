"""The placement and recovery of a pipeline's stages by the coordinator, without I/O.

reports of checkpoints --> checkpoint_catalog --> checkpoint_quorum    which of them count
                                  |
                                  v
states in memory ---------> whole_state       the step from which to continue
                                  |
                                  v
                            placement         partition and ranks of the next generation
"""
