"""Launch plans: the workflow for each recipe on demand, and on a schedule.

The workflow itself has a launch plan of its own name, `workflows.flowgrpo.flowgrpo`, with every input open. A schedule
runs only once its launch plan is activated: `pyflyte launchplan --project ... --activate flowgrpo_nightly`, or
`flytectl update launchplan ... flowgrpo_nightly --activate`. Registration activates nothing.
"""

from flytekit import CronSchedule, LaunchPlan

from tasks.contracts.recipes import recipe_names
from workflows.flowgrpo import flowgrpo

on_demand = [
    LaunchPlan.get_or_create(flowgrpo, name=f"flowgrpo_{recipe}", fixed_inputs={"recipe": recipe})
    for recipe in recipe_names() if recipe != "base"]
"""One for each recipe, so that the console starts a run in two clicks; `overrides` stays open."""

nightly = LaunchPlan.get_or_create(
    flowgrpo, name="flowgrpo_nightly", fixed_inputs={"recipe": "demo", "overrides": ""},
    schedule=CronSchedule(schedule="0 2 * * *", kickoff_time_input_arg="kickoff_time"))
"""Every night at 02:00 UTC. The kickoff time gives each night its own seed, so no stage is a cache hit of the last."""
