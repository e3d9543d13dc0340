"""One worker's part in training, pipelines included: optimizer, exchange, residual, local steps, pauses.

    backward() -> p.grad -> optimizer (GridOptimizer, local_sgd.LocalSGDOptimizer, overlapped_local_sgd)
        -> exchangers: contribution -> collective buffers -> runtime.group_session: round and vote
        -> worker_residual: keeps what was not sent; the update -> p.grad -> the user's optimizer

All optimizers inherit from wrapping_optimizer; auto_exchanger changes the exchange during a run,
overlap_trial decides whether overlap saves time, and grad_scaler makes workers share the loss scale.

When the worker joins, model_check rejects a model with NaN values; during training it checks the batches.

These modules act during a step: batch_weights, overlap (sends buckets during the backward pass),
single_samples, running_statistics and buffer_averaging (batch norm), hyperparameter_check (after an aborted
attempt), skip_report.  These act between two steps: model_state (checkpoints, leaving, export),
parameter_watch, residual_departure, pause, turn_start_state, absence (applies the steps that a stalled
trainer has missed).  `data` provides the samples of each step, and `checkpoint` serializes and stores the
state.

When a worker leaves, worker_residual returns its residual, residual_departure sends the residual or writes it
to disk, and `gridtrain.core.member.residual_recipients` chooses the member that receives it.
"""
