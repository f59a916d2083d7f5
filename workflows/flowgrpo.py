"""The RL run: its algorithm, policy and rewards are the recipe's. `flowgrpo` is the only entity in this file."""

# pyright: reportReturnType=false
# In a workflow's body a task call returns a promise of what its annotation says.
from datetime import datetime

from flytekit import workflow

from tasks.contracts import run as _contracts
from workflows import iteration as _stages
from workflows import tracking as _tracking


@workflow(on_failure=_tracking.fail)
def flowgrpo(recipe: str = "demo", overrides: str = "",
             kickoff_time: datetime = _tracking.UNSCHEDULED) -> _contracts.RunSummary:
    """Run: pyflyte run workflows/flowgrpo.py flowgrpo --recipe smoke --overrides "seed=1 optimizer.learning_rate=1e-4"

    Args:
        recipe: A name in workflows/recipes, or the path of a YAML file.
        overrides: Changes to it, such as "seed=1 sampling.group_size=16".
        kickoff_time: Set by a schedule; every scheduled run draws its own seed from it.
    """
    plan = _tracking.plan(recipe=recipe, overrides=overrides, kickoff_time=kickoff_time)
    return _stages.train(run=plan)
