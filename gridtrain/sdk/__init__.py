"""The objects that a user's script uses: `Grid` from `gridtrain.join()`, and a whole group in one process.

join() --> Grid                 join.py; grid.py: optimizer(), pipeline(), batches(), mean(), report(), ...
            |-- argument_checks.py, checkpoint_options.py, run_facts.py (what all workers must have in common)
            |-- Turns           batches.py: the samples of each step, and pauses between two steps
            |-- run_end.py: the last checkpoint and the final model
            |-- ModelState      gridtrain.training, gridtrain.pipeline: checkpoints, residual, export
            |-- GroupSession    gridtrain.runtime: rounds, votes, the I/O thread
            '-- ReportedFigures reported_figures.py: checks of figures and names
local() --> LocalGroup          local_group.py: coordinator and workers in threads
"""
