"""The worker agent: supervises a training process on a volunteer's machine.

agent.py starts, stops and watches the script; session.py is what the agent knows of its machine.
"""
