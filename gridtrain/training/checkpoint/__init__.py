"""Checkpoints on disk and at URLs, the state of a model as bytes, and exported models.

flat_gradient        the gradients of a model as one vector, in a fixed order
frozen_base          the frozen parameters, which no state contains, and their digest
serialization        the replicated state for newcomers, digests to compare replicas; uses
                     nested_values (state_dicts as JSON and tensors), model_buffers, hyperparameters
joint_optimizer      several optimizers of one model as one, with one state_dict
checkpoint_store     checkpoints on a worker's disk; stage_checkpoint_store: those of pipeline stages
remote_store         checkpoints at a URL; checkpoint_upload: uploads them in the background
checkpoint_merge     a stage from checkpoints of another partition
model_export         the model as .safetensors or .pt; pretrained: as a directory that `from_pretrained` loads
"""
