"""Connects to a coordinator without being a member (enrolment, requests, commands), and keeps local files.

- `coordinator_client`: a connection for requests and replies; `bundle_fetch` and `operator_client` use it.
- `enrollment`, `invitation_store`: use an invitation to obtain an identity that the coordinator admits.
- `endpoint_file`: the file in which programs on the coordinator's machine find the coordinator's address.
- `agent_link`: the training script's end of the connection to the worker agent.
- `worker_defaults`: the default name, folders and listening address of this worker.
- `private_file`: files that only their owner can read.
"""
