"""The worker agent: supervises a training process on a volunteer's machine.

agent.py starts, stops and watches the script; session.py is what the agent knows of its machine.
controls.py decides what the volunteer's rules allow, sensors.py and budget.py say what it decides from,
warden.py tells the script, and control.py is the socket between them and the volunteer.
"""
