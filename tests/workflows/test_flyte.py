"""What Flyte is given: the command line, the protobufs of tasks, workflow and schedule. No cluster, nothing is run."""

import ast
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.core.identifier import ResourceType
from flytekit.tools.repo import serialize_get_control_plane_entities, serialize_load_only

from tasks import advantage, eval, reward, rollout, update
from tasks.contracts.config import ROOT, RoleConfig, load_recipe
from tasks.contracts.errors import ConfigError, StoreUnavailableError
from tasks.contracts.recipes import recipe_names
from tasks.contracts.run import RunPlan
from tasks.resources import set_pod_template, uncached_task_options
from workflows import iteration, tracking

ROLE_OF = {"rollout": "rollout", "reward": "reward", "advantage": "advantage", "update": "update",
           "evaluate": "evaluate"}
CONTROL = ("plan", "record", "record_evaluation", "finish", "fail")
FILE_OF = {"evaluate": "eval"}
IMAGES = ImageConfig.from_images("example.org/unused:tag", {
    "train": "example.org/flowmill-train:tag", "reward": f"example.org/flowmill-reward@sha256:{'1' * 64}"})


@pytest.fixture(scope="module")
def registered():
    """Name -> specification of everything `pyflyte package` finds in workflows/: tasks, workflows, launch plans."""
    settings = SerializationSettings(image_config=IMAGES, project="p", domain="d", version="v")
    serialize_load_only(["workflows"], settings, str(ROOT))
    found = SimpleNamespace(tasks={}, workflows={}, launch_plans={})
    for entity in serialize_get_control_plane_entities(settings, str(ROOT)):
        name = (entity if hasattr(entity, "spec") else entity.template).id
        kind = {ResourceType.TASK: found.tasks, ResourceType.WORKFLOW: found.workflows,
                ResourceType.LAUNCH_PLAN: found.launch_plans}[name.resource_type]
        kind[name.name] = entity.spec if hasattr(entity, "spec") else entity.template
    return found


@pytest.fixture(scope="module")
def topology():
    return yaml.safe_load((ROOT / "workflows" / "recipes" / "base.yaml").read_text())["topology"]


def stage(registered, name: str):
    return registered.tasks[f"tasks.{FILE_OF.get(name, name)}.{name}"]


def test_pyflyte_run_without_a_name_lists_flowgrpo_alone_and_how_to_run_it(tmp_path):
    done = subprocess.run(
        [Path(sys.executable).parent / "pyflyte", "run", "workflows/flowgrpo.py"], cwd=ROOT, capture_output=True,
        text=True, timeout=60, env={**os.environ, "HOME": str(tmp_path), "COLUMNS": "300", "NO_COLOR": "1"})
    output = done.stdout + done.stderr
    listed = re.findall(r"^\W*(\S+)\s+(workflow|task|launch plan)\b", output.partition("Commands")[2], re.MULTILINE)
    assert listed == [("flowgrpo", "workflow")], output
    assert "Run: pyflyte run workflows/flowgrpo.py flowgrpo --recipe smoke" in output


@pytest.mark.parametrize("name", ROLE_OF)
def test_every_stage_is_cached_with_a_version_and_ignores_what_cannot_change_its_result(registered, name):
    metadata = stage(registered, name).metadata
    source = (ROOT / "tasks" / f"{FILE_OF.get(name, name)}.py").read_text()
    assert metadata.discoverable
    assert metadata.discovery_version == re.search(r'^VERSION = "(\S+)"$', source, re.MULTILINE)[1]
    ignored = {"store_uri", "role"} | ({"previous"} if name == "evaluate" else set())
    assert set(metadata.cache_ignore_input_vars) == ignored
    inputs = set(stage(registered, name).interface.inputs)
    assert ignored < inputs
    assert {"spec", "scope"} <= inputs - ignored, "another recipe, run or wiped store is never a hit"


@pytest.mark.parametrize("name", ROLE_OF)
def test_every_stage_asks_for_what_the_topology_says(registered, topology, name):
    role, template = topology[ROLE_OF[name]], stage(registered, name)
    for asked in (template.container.resources.requests, template.container.resources.limits):
        amounts = {entry.name: float(entry.value) for entry in asked}
        names = {1: "cpu", 2: "gpu", 3: "memory"}
        assert {names[key]: value for key, value in amounts.items()} == {
            "cpu": role["cpu"], "memory": role["memory_bytes"]}
    defaults = RoleConfig()
    assert template.metadata.retries.retries == role.get("retries", defaults.retries) > 0
    assert template.metadata.timeout.total_seconds() == role.get("timeout_s", defaults.timeout_s) > 0


def test_a_roles_numbers_become_task_options():
    options = uncached_task_options(RoleConfig(cpu=3.5, memory_bytes=123, gpus=2, retries=4, timeout_s=77,
                                               interruptible=True, shared_memory_bytes=99, image="other"))
    size = options["requests"]
    assert (size.cpu, size.mem, size.gpu) == ("3.5", "123", "2")
    assert options["limits"] == size
    assert (options["retries"], options["timeout"], options["interruptible"]) == (4, 77, True)
    assert (options["shared_memory"], options["container_image"]) == ("99", "{{.image.other}}")
    assert options["pod_template_name"] == "flowmill-gpu"
    assert uncached_task_options(RoleConfig())["requests"].gpu is None
    assert uncached_task_options(RoleConfig())["pod_template_name"] == "flowmill-cpu"
    assert uncached_task_options(RoleConfig(gpus=1, pod_template="mine"))["pod_template_name"] == "mine"
    assert "shared_memory" not in uncached_task_options(RoleConfig())


def test_every_task_runs_in_the_image_of_its_role_and_gets_its_secrets(registered, topology):
    images = {"train": "example.org/flowmill-train:tag", "reward": f"example.org/flowmill-reward@sha256:{'1' * 64}"}
    ours = {name: template for name, template in registered.tasks.items() if name.startswith(("tasks.", "workflows."))}
    assert len(ours) == len(ROLE_OF) + len(CONTROL) + 1
    for name, template in ours.items():
        stage = name.rsplit(".", 1)[-1]
        image = topology[ROLE_OF.get(stage, "control")].get("image", "train")
        assert template.container.image == images[image], name
        assert template.metadata.pod_template_name == "flowmill-cpu", name
        secrets = {(item.group, item.key, item.env_var, item.mount_requirement.name)
                   for item in template.security_context.secrets}
        assert secrets == {("flowmill-s3", "access_key_id", "AWS_ACCESS_KEY_ID", "ENV_VAR"),
                           ("flowmill-s3", "secret_access_key", "AWS_SECRET_ACCESS_KEY", "ENV_VAR")}, name
    assert stage_image(registered, "reward").startswith("example.org/flowmill-reward")
    assert stage_image(registered, "advantage").startswith("example.org/flowmill-train")


def stage_image(registered, name: str) -> str:
    return stage(registered, name).container.image


def test_resources_holds_no_numbers():
    tree = ast.parse((ROOT / "tasks" / "resources.py").read_text())
    numbers = [ast.unparse(node) for node in ast.walk(tree)
               if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    assert numbers == []


def test_tasks_around_the_stages_always_run(registered):
    for name in CONTROL:
        assert not registered.tasks[f"workflows.tracking.{name}"].metadata.discoverable, name
    assert not registered.tasks["workflows.iteration.train"].metadata.discoverable


def test_only_evaluate_writes_a_deck(registered):
    decks = {name for name, template in registered.tasks.items()
             if template.metadata.generates_deck and name.startswith(("tasks.", "workflows."))}
    assert decks == {"tasks.eval.evaluate"}


def test_a_failed_run_is_marked_by_the_failure_node(registered):
    node = registered.workflows["workflows.flowgrpo.flowgrpo"].failure_node
    assert node.task_node.reference_id.name == "workflows.tracking.fail"
    inputs = {binding.var for binding in node.inputs}
    assert {"recipe", "overrides", "kickoff_time"} <= inputs


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """What the loop of a run of three iterations tells the cluster: the nodes that `train` makes when it runs there."""
    store = str(tmp_path_factory.mktemp("store"))
    config = load_recipe("smoke", "iterations=3 evaluation.num_points=2 topology.rollout.gpus=2 topology.rollout.cpu=7 "
                                  "topology.rollout.shared_memory_bytes=1000 topology.update.retries=5 "
                                  "topology.update.timeout_s=99 topology.update.pod_template=mine "
                                  "topology.evaluate.interruptible=true "
                                  "topology.advantage.image=reward")
    settings = SerializationSettings(image_config=IMAGES, project="p", domain="d", version="v")
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    builder = context.with_execution_state(state).with_serialization_settings(settings)
    with FlyteContextManager.with_context(builder):
        yield iteration.train.execute(run=plan_of(config, store))
    for task, role in ((rollout.rollout, config.topology.reward), (update.update, config.topology.reward)):
        set_pod_template(task, role)


def plan_of(config, store_uri: str = "u") -> RunPlan:
    return RunPlan(
        name="n", run_key="k", report_key="e", run_id="r", scope="s", store_uri=store_uri,
        iterations=config.iterations, evaluation_iterations=config.evaluation_iterations(),
        rollout=config.rollout_spec(), reward=config.reward_spec(), advantage=config.advantage_spec(),
        update=config.update_spec(), evaluate=config.evaluate_spec(), topology=config.topology,
        retention=config.retention, tracking=config.tracking)


def test_the_loop_is_rollout_reward_advantage_update_and_their_record_for_each_iteration(loop):
    nodes = {node.id: node for node in loop.nodes}
    names = [name for number in (1, 2, 3) for name in (
        f"rollout-{number}", f"reward-{number}", f"advantage-{number}", f"update-{number}", f"record-{number}")]
    assert [name for name in nodes if name.split("-")[0] not in ("evaluate", "report", "finish")] == names
    assert {"evaluate-0", "evaluate-3"} <= nodes.keys()
    assert {"rollout-2", "advantage-2", "update-1"} <= set(nodes["update-2"].upstream_node_ids)
    assert nodes["rollout-2"].upstream_node_ids == ["update-1"], "the next iteration waits for weights alone"
    assert "record-1" in nodes["record-2"].upstream_node_ids, "records are written in order"
    assert {"record-3", "report-0", "report-3", "evaluate-0", "evaluate-3", "update-3"} == set(
        nodes["finish"].upstream_node_ids), "the run is not finished before its numbers are in"


def test_each_stage_has_the_pod_template_of_the_runs_own_recipe(loop):
    templates = {task.id.name: task.metadata.pod_template_name for task in loop.tasks}
    assert templates == {
        "tasks.rollout.rollout": "flowmill-gpu", "tasks.reward.reward": "flowmill-cpu",
        "tasks.advantage.advantage": "flowmill-cpu", "tasks.update.update": "mine",
        "tasks.eval.evaluate": "flowmill-cpu",
        "workflows.tracking.record": "flowmill-cpu", "workflows.tracking.record_evaluation": "flowmill-cpu",
        "workflows.tracking.finish": "flowmill-cpu"}


@pytest.mark.parametrize(("change", "words"), [
    ("'topology.secrets={\"AWS_ACCESS_KEY_ID\": \"mine/key\"}'", "topology.secrets: "),
    ("topology.control.pod_template=mine", "topology.control: mine; the tasks are registered with the PodTemplate"),
    ("topology.control.gpus=1", "topology.control: flowmill-gpu")])
def test_what_only_a_registration_can_give_is_refused(change, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        tracking.plan(recipe="smoke", overrides=change, kickoff_time=tracking.UNSCHEDULED)
    assert "register again" in str(caught.value)


def test_each_stage_asks_for_what_the_runs_own_recipe_says(loop):
    nodes = {node.id: node for node in loop.nodes}

    def sizes(name: str) -> dict[str, float]:
        resources = nodes[name].task_node.overrides.resources
        assert resources.requests == resources.limits
        return {{1: "cpu", 2: "gpu", 3: "memory"}[entry.name]: float(entry.value) for entry in resources.limits}

    assert sizes("rollout-1") == {"cpu": 7, "gpu": 2, "memory": 2147483648}
    assert sizes("reward-1") == {"cpu": 2, "memory": 2147483648}
    assert nodes["rollout-1"].task_node.overrides.extended_resources.shared_memory.size_limit == "1000"
    assert nodes["update-2"].metadata.retries.retries == 5
    assert nodes["update-2"].metadata.timeout.total_seconds() == 99
    assert nodes["evaluate-3"].metadata.interruptible
    assert not nodes["update-3"].metadata.interruptible
    assert nodes["rollout-1"].task_node.overrides.container_image == "example.org/flowmill-train:tag"
    assert nodes["advantage-1"].task_node.overrides.container_image.startswith("example.org/flowmill-reward@sha256:1")


def test_the_loop_has_no_time_limit_of_its_own(registered):
    """A dynamic task's limit would cover its children: the whole run."""
    assert not registered.tasks["workflows.iteration.train"].metadata.timeout
    assert registered.tasks["workflows.tracking.plan"].metadata.timeout.total_seconds() > 0


def test_the_nightly_run_has_a_cron_a_kickoff_argument_and_fixed_inputs(registered):
    spec = registered.launch_plans["flowgrpo_nightly"]
    assert spec.workflow_id.name == "workflows.flowgrpo.flowgrpo"
    schedule = spec.entity_metadata.schedule
    assert len(schedule.cron_schedule.schedule.split()) == 5
    assert schedule.kickoff_time_input_arg == "kickoff_time"
    fixed = {name: literal.scalar.primitive.string_value for name, literal in spec.fixed_inputs.literals.items()}
    assert fixed == {"recipe": "demo", "overrides": ""}
    assert set(spec.default_inputs.parameters) == {"kickoff_time"}


def test_every_recipe_has_a_launch_plan_that_leaves_the_overrides_open(registered):
    for recipe in set(recipe_names()) - {"base"}:
        spec = registered.launch_plans[f"flowgrpo_{recipe}"]
        assert spec.workflow_id.name == "workflows.flowgrpo.flowgrpo"
        assert [value.scalar.primitive.string_value for value in spec.fixed_inputs.literals.values()] == [recipe]
        assert {"overrides", "kickoff_time"} == set(spec.default_inputs.parameters)
        assert not spec.entity_metadata.schedule
    assert {"workflows.flowgrpo.flowgrpo"} <= set(registered.launch_plans)


def test_each_kickoff_is_a_run_of_its_own_and_a_rerun_of_it_the_same_run(monkeypatch):
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID", raising=False)
    times = [datetime(2026, 11, day, 2, tzinfo=UTC) for day in (29, 30, 30)]
    configs = [tracking.configure("smoke", "", time) for time in times]
    keys = [tracking.identify(config)[0] for config in configs]
    assert configs[0].seed != configs[1].seed
    assert keys[0] != keys[1]
    assert (configs[1], keys[1]) == (configs[2], keys[2])
    assert configs[0].name == "smoke 2026-11-29 02:00"
    assert tracking.identify(configs[0])[-1] != tracking.identify(configs[1])[-1]


def test_a_run_that_no_schedule_started_keeps_its_seed(monkeypatch):
    assert tracking.configure("smoke", "seed=5", tracking.UNSCHEDULED) == load_recipe("smoke", "seed=5")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    assert tracking.identify(load_recipe("smoke"))[-1] == "abc"


def test_a_plan_is_the_same_after_a_flyte_edge():
    config = load_recipe("smoke", "algorithm.clip_range=[1e-4,3e-4] optimizer.learning_rate=3e-4 seed=9007199254740993")
    plan = plan_of(config)
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, plan, RunPlan, TypeEngine.to_literal_type(RunPlan))
    again = TypeEngine.to_python_value(context, literal, RunPlan)
    assert again == plan
    assert type(again.update.algorithm) is type(plan.update.algorithm)
    assert again.rollout.seed == 9007199254740993, "2^53 + 1 does not survive a float"


@pytest.mark.parametrize("task", [
    rollout.rollout, reward.reward, advantage.advantage, update.update, eval.evaluate, tracking.plan, tracking.record,
    tracking.record_evaluation, tracking.finish, iteration.train], ids=lambda task: task.name)
def test_a_store_that_does_not_answer_fails_a_task_so_that_flyte_tries_again(task, monkeypatch):
    def unavailable(*_, **__):
        raise StoreUnavailableError("writing s3://b/x: no answer")

    for place in [module for name, module in sys.modules.items() if name.startswith(("tasks.", "workflows."))]:
        if hasattr(place, "open_store"):
            monkeypatch.setattr(place, "open_store", unavailable)
    arguments = {**dict.fromkeys(task.python_interface.inputs), "policy": SimpleNamespace(weights=0, state=0)}
    arguments = {name: arguments[name] for name in task.python_interface.inputs}
    if task is tracking.plan:
        arguments = {"recipe": "smoke", "overrides": "", "kickoff_time": tracking.UNSCHEDULED}
    elif "run" in arguments:
        arguments["run"] = plan_of(load_recipe("smoke", ""))
    with pytest.raises(StoreUnavailableError):  # on a laptop the error itself is shown
        task.task_function(**arguments)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "e")
    with pytest.raises(FlyteRecoverableException, match="s3://b/x: no answer"):
        task.task_function(**arguments)
