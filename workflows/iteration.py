"""One iteration, and the loop around it: rollout -> reward -> advantage -> update, then evaluate when it is due."""

# pyright: reportReturnType=false, reportArgumentType=false
# In a workflow's body a task call returns a promise of what its annotation says.
from flytekit import dynamic, workflow

from tasks.advantage import advantage
from tasks.contracts.refs import PolicyRef
from tasks.contracts.run import RunPlan, RunSummary
from tasks.eval import evaluate
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.store import Store, open_store
from tasks.update import update
from workflows import tracking


@workflow
def iteration(run: RunPlan, policy: PolicyRef, number: int) -> PolicyRef:
    """Draw samples with the policy, score them, compare them within their groups, train on them."""
    trajectories = rollout(spec=run.rollout, policy=policy, iteration=number, scope=run.scope,
                           store_uri=run.store_uri, role=run.topology.rollout)
    rewards = reward(spec=run.reward, trajectories=trajectories, scope=run.scope, store_uri=run.store_uri,
                     role=run.topology.reward)
    advantages = advantage(spec=run.advantage, trajectories=trajectories, rewards=rewards, scope=run.scope,
                           store_uri=run.store_uri, role=run.topology.reward)
    trained = update(spec=run.update, policy=policy, trajectories=trajectories, advantages=advantages,
                     iteration=number, scope=run.scope, store_uri=run.store_uri, role=run.topology.update)
    tracking.record(run=run, number=number, trajectories=trajectories, rewards=rewards, advantages=advantages,
                    policy=trained)
    return trained


@dynamic(**tracking.OPTIONS)
def train(run: RunPlan) -> RunSummary:
    """Run the iterations that are not yet recorded, evaluating where the plan says; then finish the run."""
    store = open_store(run.store_uri)
    recorded = tracking.recorded_policies(store, run)
    done = _last_usable(store, recorded)
    if done:
        print(f"continuing after iteration {done} of {run.iterations}", flush=True)
    tracking.prune(store, run, done - run.retention.keep_iterations)  # in case the last try ended in the middle of it
    policy = tracking.base_policy(run)
    evaluations = []
    for number in range(run.iterations + 1):
        if number > done:
            policy = iteration(run=run, policy=policy, number=number)
        elif number > 0:
            policy = recorded[number]
        # A lengthened run has other evaluation points; a policy that was dropped since cannot be evaluated.
        if number in run.evaluation_iterations and (number > done or tracking.is_kept(store, policy)):
            evaluation = evaluate(spec=run.evaluate, policy=policy, previous=list(evaluations),
                                  scope=f"{run.scope}-{run.report_key[:16]}", store_uri=run.store_uri,
                                  role=run.topology.evaluate)
            tracking.record_evaluation(run=run, evaluation=evaluation)
            evaluations.append(evaluation)
    return tracking.finish(run=run, policy=policy, evaluations=evaluations)


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
