"""The console holder: one process per node that reads every VM's serial line, and its client.

It outlives the agent, so that no output is lost and no guest ever blocks on a full serial
buffer while the agent restarts.
"""
