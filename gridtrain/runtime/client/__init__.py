"""Talking to a coordinator from outside a run, and to the programs of this machine.

- `coordinator_client`: one connection, questions and answers; `bundle_fetch` and `operator_client` use it.
- `enrollment`, `invitation_store`: from an invitation to an identity that the coordinator admits.
- `endpoint_file`: how programs on the coordinator's machine find it.
- `agent_link`: the training script's end of the connection to the worker agent.
- `worker_naming`: names and folders of this worker.
"""
