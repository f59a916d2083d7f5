"""Launch plans: the same workflow on a schedule. Activate one with `flytectl update launchplan ... --activate`."""

from flytekit import CronSchedule, LaunchPlan

from workflows.flowgrpo import flowgrpo

nightly = LaunchPlan.get_or_create(
    flowgrpo, name="flowgrpo_nightly", fixed_inputs={"recipe": "demo", "overrides": ""},
    schedule=CronSchedule(schedule="0 2 * * *", kickoff_time_input_arg="kickoff_time"))
"""Every night at 02:00 UTC. The kickoff time gives each night its own seed, so no stage is a cache hit of the last."""
