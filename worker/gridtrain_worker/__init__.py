"""The worker agent: supervises a training script on a volunteer's machine.

agent              starts, stops and restarts the script
script_processes   finds and signals all processes of the script
watchdog           ends the script if the agent is killed, and stops it while the agent is stopped
bundle_consent     fetches the run's script, and asks the volunteer to accept it
training_policy    decides whether the volunteer's rules allow training (pure)
sensors            reads this machine's sensors, and decides which load counts as GPU use
budget             counts the day's traffic
policy_enforcer    applies the decision to the running script
control_socket     connects the agent to its script and to its owner's commands
saved_settings     stores rules and pauses, so that they survive a restart
console            shows messages and contributions to the volunteer
contribution_stats adds up this machine's contributions
"""
