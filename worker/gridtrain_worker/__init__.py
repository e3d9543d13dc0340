"""The worker agent: supervises a training script on a volunteer's machine.

agent              starts, stops and restarts the script
bundle_consent     fetches the run's script, and asks the volunteer to accept it
training_policy    decides whether the volunteer's rules allow training (pure)
sensors, budget    readings and the day's traffic, from which it decides
policy_enforcer    applies the decision to the running script
control_socket     connects the agent with its script and its owner's commands
saved_settings     rules and pauses that outlast a restart
console, contribution_stats    what the volunteer is shown
machine_info       name and CPU cores of this machine
"""
