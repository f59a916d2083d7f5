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
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.identifier import ResourceType
from flytekit.tools.repo import serialize_get_control_plane_entities, serialize_load_only

from tasks.contracts.config import ROOT, RoleConfig, load_recipe
from tasks.contracts.run import RunPlan
from tasks.resources import uncached_task_options
from workflows import tracking

ROLE_OF = {"rollout": "rollout", "reward": "reward", "advantage": "reward", "update": "update", "evaluate": "evaluate"}
FILE_OF = {"evaluate": "eval"}


@pytest.fixture(scope="module")
def registered():
    """Name -> specification of everything `pyflyte package` finds in workflows/: tasks, workflows, launch plans."""
    image = ImageConfig(default_image=Image("default", "example.org/flowmill", "tag"))
    settings = SerializationSettings(image_config=image, project="p", domain="d", version="v")
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
                                               interruptible=True))
    size = options["requests"]
    assert (size.cpu, size.mem, size.gpu) == ("3.5", "123", "2")
    assert options["limits"] == size
    assert (options["retries"], options["timeout"], options["interruptible"]) == (4, 77, True)
    assert uncached_task_options(RoleConfig())["requests"].gpu is None


def test_resources_holds_no_numbers():
    tree = ast.parse((ROOT / "tasks" / "resources.py").read_text())
    numbers = [ast.unparse(node) for node in ast.walk(tree)
               if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    assert numbers == []


def test_tasks_around_the_stages_always_run(registered):
    for name in ("plan", "record", "record_evaluation", "finish", "fail"):
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


def test_an_iteration_is_rollout_reward_advantage_update_and_its_record(registered):
    nodes = registered.workflows["workflows.iteration.iteration"].nodes
    names = [node.task_node.reference_id.name.split(".")[-1] for node in nodes if node.task_node is not None]
    assert names == ["rollout", "reward", "advantage", "update", "record"]
    feeds = {node.task_node.reference_id.name.split(".")[-1]: set(node.upstream_node_ids) for node in nodes
             if node.task_node is not None}
    ids = {node.task_node.reference_id.name.split(".")[-1]: node.id for node in nodes if node.task_node is not None}
    assert {ids["rollout"], ids["advantage"]} <= feeds["update"]


def test_the_nightly_run_has_a_cron_a_kickoff_argument_and_fixed_inputs(registered):
    spec = registered.launch_plans["flowgrpo_nightly"]
    assert spec.workflow_id.name == "workflows.flowgrpo.flowgrpo"
    schedule = spec.entity_metadata.schedule
    assert len(schedule.cron_schedule.schedule.split()) == 5
    assert schedule.kickoff_time_input_arg == "kickoff_time"
    fixed = {name: literal.scalar.primitive.string_value for name, literal in spec.fixed_inputs.literals.items()}
    assert fixed == {"recipe": "demo", "overrides": ""}
    assert set(spec.default_inputs.parameters) == {"kickoff_time"}


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
    plan = RunPlan(
        name="n", run_key="k", report_key="e", run_id="r", scope="s", store_uri="u", iterations=2,
        evaluation_iterations=[0, 2],
        rollout=config.rollout_spec(), reward=config.reward_spec(), advantage=config.advantage_spec(),
        update=config.update_spec(), evaluate=config.evaluate_spec(), topology=config.topology,
        retention=config.retention, tracking=config.tracking)
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, plan, RunPlan, TypeEngine.to_literal_type(RunPlan))
    again = TypeEngine.to_python_value(context, literal, RunPlan)
    assert again == plan
    assert type(again.update.algorithm) is type(plan.update.algorithm)
    assert again.rollout.seed == 9007199254740993, "2^53 + 1 does not survive a float"
