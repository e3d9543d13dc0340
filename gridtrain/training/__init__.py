"""A worker's part in training a whole model, and what it shares with a stage of a pipeline.

    backward() -> p.grad -> optimizer (GridOptimizer, local_sgd.LocalSGDOptimizer)
        -> exchangers: contribution -> collective buffers -> session_interface.TrainingSession: round and vote
        -> worker_residual: what was not sent stays; the update -> p.grad -> the user's optimizer

Around a step: overlap (buckets during backward), buffer_averaging (batch norm), hyperparameter_check (after
an abort), skip_report.  Between two steps: model_state (checkpoints, leaving, export), residual_departure,
pause, turn_start_state. `data` has the samples of each step, `checkpoint` the serialization of the state and
its stores.
"""
