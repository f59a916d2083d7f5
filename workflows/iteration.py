"""One iteration, and the loop around it: rollout -> reward -> advantage -> update, then evaluate when it is due."""
# pyright: reportReturnType=false, reportArgumentType=false, reportCallIssue=false
# In a dynamic task's body a task call returns a promise of what its annotation says.

from typing import Any

from flytekit import dynamic

from tasks.advantage import advantage
from tasks.contracts.config import RoleConfig
from tasks.contracts.refs import PolicyRef
from tasks.contracts.run import RunPlan, RunSummary
from tasks.eval import evaluate
from tasks.resources import node_overrides, retried, set_pod_template
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.store import Store, open_store
from tasks.update import update
from workflows import tracking


def iteration(run: RunPlan, policy: PolicyRef, number: int, recorded: int) -> tuple[PolicyRef, int]:
    """Draw samples with the policy, score them, compare them within their groups, train on them.

    Args:
        recorded: The iteration whose record comes before this one's.

    Returns:
        The next policy, and `number` once this iteration is recorded.
    """
    roles, common = run.topology, {"scope": run.scope, "store_uri": run.store_uri}

    def on(role: RoleConfig, promise: Any, stage: str) -> Any:
        return _on(role, promise, f"{stage}-{number}")

    trajectories = on(roles.rollout, rollout(
        spec=run.rollout, policy=policy, iteration=number, role=roles.rollout, **common), "rollout")
    rewards = on(roles.reward, reward(
        spec=run.reward, trajectories=trajectories, role=roles.reward, **common), "reward")
    advantages = on(roles.advantage, advantage(
        spec=run.advantage, trajectories=trajectories, rewards=rewards, role=roles.advantage, **common), "advantage")
    trained = on(roles.update, update(
        spec=run.update, policy=policy, trajectories=trajectories, advantages=advantages, iteration=number,
        role=roles.update, **common), "update")
    recorded = on(roles.control, tracking.record(
        run=run, number=number, trajectories=trajectories, rewards=rewards, advantages=advantages, policy=trained,
        previous=recorded), "record")
    return trained, recorded


def _on(role: RoleConfig, promise: Any, node_name: str) -> Any:
    """Give a node the pod that the run's own recipe says, and a name that the console shows."""
    return promise.with_overrides(**node_overrides(role, node_name))


# No time limit: a dynamic task is as long as its children, the whole run.
@dynamic(**{**tracking.OPTIONS, "timeout": 0})
@retried
def train(run: RunPlan) -> RunSummary:
    """Run the iterations that are not yet recorded, evaluating where the plan says; then finish the run."""
    roles = run.topology
    for task, role in ((rollout, roles.rollout), (reward, roles.reward), (advantage, roles.advantage),
                       (update, roles.update), (evaluate, roles.evaluate), (tracking.record, roles.control),
                       (tracking.record_evaluation, roles.control), (tracking.finish, roles.control)):
        set_pod_template(task, role)
    store = open_store(run.store_uri)
    known = tracking.recorded_policies(store, run)
    done = _last_usable(store, known)
    if done:
        print(f"continuing after iteration {done} of {run.iterations}", flush=True)
    tracking.prune(store, run, done - run.retention.keep_iterations)  # in case the last try ended in the middle of it
    policy = tracking.base_policy(run)
    evaluations, recorded, reported = [], done, []
    for number in range(run.iterations + 1):
        if number > done:
            policy, recorded = iteration(run=run, policy=policy, number=number, recorded=recorded)
        elif number > 0:
            policy = known[number]
        # A lengthened run has other evaluation points; a policy that was dropped since cannot be evaluated.
        if number in run.evaluation_iterations and (number > done or tracking.is_kept(store, policy)):
            role = run.topology.evaluate
            evaluation = _on(role, evaluate(
                spec=run.evaluate, policy=policy, previous=list(evaluations), store_uri=run.store_uri, role=role,
                scope=f"{run.scope}-{run.report_key[:16]}"), f"evaluate-{number}")
            evaluations.append(evaluation)
            reported.append(_on(run.topology.control, tracking.record_evaluation(run=run, evaluation=evaluation),
                                f"report-{number}"))
    return _on(run.topology.control, tracking.finish(
        run=run, policy=policy, evaluations=evaluations, recorded=[recorded, *reported]), "finish")


def _last_usable(store: Store, recorded: dict[int, PolicyRef]) -> int:
    """The last iteration of the unbroken series from 1 that can be continued from; 0 = begin again.

    A policy whose data was dropped or damaged cannot: a shortened run, for one, begins again.
    """
    done = 0
    while done + 1 in recorded:
        done += 1
    while done and not tracking.is_resumable(store, recorded[done]):
        done -= 1
    return done
