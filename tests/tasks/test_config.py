"""Recipes, overrides, the specs of the stages, and prompt files: what is refused, and what changes what."""

import json
import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tasks import plugins
from tasks.contracts import batches, refs
from tasks.contracts import config as config_module
from tasks.contracts import run as run_module
from tasks.contracts.config import RECIPES, ROOT, RunConfig, StrictModel, load_recipe
from tasks.contracts.errors import ConfigError, PluginNotFoundError
from tasks.contracts.recipes import recipe_names
from tasks.contracts.run import RunPlan, run_key_of
from tasks.prompts import draw_positions, read_prompts

SPECS = ("rollout_spec", "reward_spec", "advantage_spec", "update_spec", "evaluate_spec")


def refusal(*overrides: str, recipe: str = "base") -> str:
    """The message of a recipe that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value)


def specs_of(config: RunConfig) -> dict[str, str]:
    return {name: getattr(config, name)().model_dump_json() for name in SPECS}


def changed(one: RunConfig, other: RunConfig) -> set[str]:
    before, after = specs_of(one), specs_of(other)
    return {name for name in SPECS if before[name] != after[name]}


def write(folder: Path, name: str, **content) -> str:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return str(folder / f"{name}.yaml")


# Recipes

@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_loads_and_its_prompts_exist(name):
    config = load_recipe(name)
    assert config.name == name
    for path in (config.prompts.train, config.prompts.evaluate):
        assert len(read_prompts(path)) > 0
    assert name in recipe_names()


def test_a_recipe_inherits_and_overlays_key_by_key(tmp_path):
    write(tmp_path, "parent", extends="base", sampling={"num_groups": 3, "group_size": 5}, seed=4)
    child = load_recipe(write(tmp_path, "child", extends="parent.yaml", sampling={"group_size": 7}))
    base = load_recipe("base")
    assert (child.seed, child.sampling.num_groups, child.sampling.group_size) == (4, 3, 7)
    assert child.sampling.noise_level == base.sampling.noise_level == 0.7
    assert child.name == "child"


def test_another_plugin_name_replaces_the_parents_settings(tmp_path):
    # base sets flow_grpo's clip_range, which sft does not know: merging the two would be refused.
    file = tmp_path / "child.yaml"
    file.write_text("extends: base\nalgorithm: {name: sft}\nsampling: {sde_window: {size: 0}}\n")
    assert load_recipe(str(file)).algorithm.model_dump() == {"name": "sft", "draws": 4}


def test_a_list_replaces_the_parents_list(tmp_path):
    config = load_recipe(write(tmp_path, "one", extends="base", rewards=[{"name": "jpeg_compressibility"}]))
    assert [reward.name for reward in config.rewards] == ["jpeg_compressibility"]


def test_a_cycle_of_recipes_is_refused_and_named(tmp_path):
    one = write(tmp_path, "one", extends="two.yaml")
    write(tmp_path, "two", extends="one.yaml")
    message = refusal(recipe=one)
    assert "one.yaml" in message
    assert "extends itself" in message
    assert "two.yaml" in message


def test_a_recipe_that_extends_itself_is_refused(tmp_path):
    assert "extends itself" in refusal(recipe=write(tmp_path, "one", extends="one.yaml"))


@pytest.mark.parametrize("recipe", ["no_such_recipe", "no/such/file.yaml"])
def test_an_unknown_recipe_lists_those_that_exist(recipe):
    message = refusal(recipe=recipe)
    assert recipe in message
    for name in ("base", "demo", "smoke"):
        assert name in message


def test_a_missing_parent_is_refused(tmp_path):
    assert "no recipe 'lost'" in refusal(recipe=write(tmp_path, "one", extends="lost"))


@pytest.mark.parametrize(("text", "expected"), [
    (b"a: [1, 2", "cannot be read"), (b"- 1\n- 2\n", "holds list, expected a mapping"), (b"", "holds NoneType"),
    (b"name: \xff\xfe", "cannot be read")])
def test_an_unreadable_recipe_is_refused(tmp_path, text, expected):
    (tmp_path / "bad.yaml").write_bytes(text)
    message = refusal(recipe=str(tmp_path / "bad.yaml"))
    assert expected in message
    assert "bad.yaml" in message


# Overrides

@pytest.mark.parametrize("overrides", [
    'seed=3 rewards.ocr.weight=2 sampling.group_size=6 optimizer.learning_rate=1e-4 optimizer.betas="[0.8, 0.9]"',
    ["seed=3", "rewards.ocr.weight=2", "sampling.group_size=6", "optimizer.learning_rate=1e-4",
     "optimizer.betas=[0.8, 0.9]"],
    {"seed": 3, "rewards.ocr.weight": 2, "sampling.group_size": 6, "optimizer.learning_rate": 1e-4,
     "optimizer.betas": [0.8, 0.9]},
], ids=["text", "sequence", "mapping"])
def test_overrides_have_three_forms_that_mean_the_same(overrides):
    config = load_recipe("base", overrides)
    assert config.seed == 3
    assert config.rewards[0].weight == 2.0
    assert config.sampling.group_size == 6
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == [0.8, 0.9]
    assert config.advantage_spec().reward_weights == {"ocr": 2.0}


def test_overrides_reach_a_section_the_recipe_does_not_name_and_readers_by_name():
    config = load_recipe("base", "retention.keep_iterations=5 evaluation.readers.ocr.dense=0.25 topology.tool.cpu=1")
    assert config.retention.keep_iterations == 5
    assert next(reader for reader in config.evaluation.readers if reader.name == "ocr").dense == 0.25
    assert config.topology.tool.cpu == 1


def test_an_override_leaves_the_recipe_of_the_next_load_alone():
    load_recipe("base", "rewards.ocr.weight=2 sampling.group_size=6")
    assert load_recipe("base").rewards[0].weight == 1.0
    assert load_recipe("base").sampling.group_size == 12


@pytest.mark.parametrize(("override", "expected"), [
    ("seed", "is not key=value"),
    ("=3", "is not key=value"),
    ("rewards.pickscore.weight=2", "no section 'pickscore'"),
    ("rewards.weight=2", "name the list item"),
    ("policy.name.a=2", "no section 'name'"),
    ("sampling.group_size=[1", "not YAML"),
])
def test_an_override_that_cannot_be_placed_is_refused(override, expected):
    message = refusal(override)
    assert expected in message
    assert override.split("=")[0] in message


def test_overrides_with_an_open_quote_are_refused():
    with pytest.raises(ConfigError, match="cannot be split"):
        load_recipe("base", 'name="half')


# What is refused, and the reason

@pytest.mark.parametrize(("override", "suggestion"), [
    ("sampling.group_sze=2", "'group_size'"),
    ("optimiser.learning_rate=1", "'optimizer'"),
    ("algorithm.clip_rnge=1", "'clip_range'"),
    ("policy.chekpoint=x", "'checkpoint'"),
    ("rewards.ocr.wieght=2", "'weight'"),
    ("evaluation.readers.ocr.dens=2", "'dense'"),
    ("topology.rollout.cpus=2", "'cpu'"),
    ("topology.tool.cpus=2", "'cpu'"),
    ("sampling.sde_window.sise=2", "'size'"),
])
def test_a_misspelt_key_is_refused_with_a_suggestion(override, suggestion):
    message = refusal(override)
    assert f"did you mean {suggestion}?" in message
    assert "unknown key" in message


def test_a_key_like_no_other_lists_the_known_ones():
    message = refusal("sampling.zzz=1")
    assert "sampling.zzz: unknown key (value 1); known keys: num_inference_steps, schedule" in message
    assert "lora_targets" in refusal("policy.zzz=1"), "a plugin's own keys are listed"


@pytest.mark.parametrize(("override", "expected"), [
    ("sampling.group_size=1.5", "sampling.group_size: got 1.5"),
    ("sampling.group_size=many", "sampling.group_size: got 'many'"),
    ("iterations=[1]", r"iterations: got [1]"),
    ("policy=tiny_text", "expected a mapping with a `name`"),
    ("rewards=3", "rewards: got 3"),
    ("name=3", "name: got 3"),
    ("algorithm.clip_range=wide", "algorithm.clip_range"),
    ("sampling.sde_kind=ito", "sampling.sde_kind: got 'ito'"),
])
def test_a_wrong_type_is_refused(override, expected):
    assert expected in refusal(override)


@pytest.mark.parametrize("override", [
    "iterations=0", "seed=-1", "seed=9223372036854775808", "sampling.num_groups=0", "sampling.noise_level=0",
    "sampling.num_inference_steps=1", "sampling.guidance_scale=0.5", "sampling.shift=0", "sampling.shift=.nan",
    "sampling.noise_level=.inf", "optimizer.learning_rate=-1", "optimizer.ema_decay=1", "optimizer.max_grad_norm=0",
    "optimizer.updates_per_rollout=0", "optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9]", "evaluation.num_points=1",
    "runtime.micro_batch_size=0", "topology.update.parallelism=0", "topology.update.cpu=0",
    "topology.update.sm_share=1.5", "algorithm.clip_range=0", "algorithm.kl_coef=-1", "sampling.sde_window.size=-1",
    "rewards=[]", "retention.keep_iterations=0",
])
def test_a_number_out_of_range_is_refused(override):
    message = refusal(override)
    assert override.split("=")[0].split(".")[-1] in message
    assert "base" in message


@pytest.mark.parametrize(("override", "axis"), [
    ("policy.name=sd33", "policies"), ("algorithm={name: flow_gpro}", "algorithms"),
    ("rewards=[{name: pikscore}]", "rewards"), ("evaluation.readers=[{name: pikscore}]", "rewards")])
def test_an_unknown_plugin_lists_what_exists_and_where_a_new_one_goes(override, axis):
    message = refusal(override)
    existing = [path.stem for path in (ROOT / "tasks" / axis).glob("*.py")
                if path.stem != "base" and not path.stem.startswith("_")]
    assert existing
    for name in existing:
        assert name in message
    assert f"tasks/{axis}/" in message


def test_plugins_are_looked_up_by_file_and_never_by_path():
    with pytest.raises(PluginNotFoundError, match="rewards"):
        plugins.load("reward", "ocr")
    for name in ("base", "_text", "os", "../ocr", "tasks.rewards.ocr", ""):
        with pytest.raises(PluginNotFoundError):
            plugins.load("rewards", name)


@pytest.mark.parametrize(("overrides", "reason"), [
    (["sampling.group_size=1"], "every advantage is 0"),
    (["sampling.sde_window.size=0"], "nothing would be trained"),
    (["sampling.weights=old"], "keeps no 'old' policy"),
    (["sampling.sde_window.size=8"], "larger than its range [0, 7)"),
    (["sampling.sde_window.range=[0, 9]"], "does not fit num_inference_steps 8"),
    (["sampling.sde_window.range=[5, 5]"], "does not fit"),
    (["sampling.sde_window.range=[-1, 5]"], "does not fit"),
    (["sampling.sde_window.range=[0, 8]"], "includes the last step 7"),
    (["sampling.sde_window.range=[1, 4]"], "sde_window.size 4 is larger"),
    (["sampling.sde_kind=cps", "sampling.noise_level=1.2"], "above 1, which sde_kind cps cannot use"),
    (["sampling.sde_kind=cps", "sampling.last_step_noise=true"], "no effect with sde_kind cps"),
    (["topology.rollout.dtype=bf16"], "the ratio before the first update would not be 1"),
    (["rewards=[{name: ocr}, {name: ocr, weight: 2}]"], "name one reward twice"),
    (["prompts.evaluate=workflows/recipes/prompts/tiny_text_train.txt"], "never seen in training"),
    (["policy.trainable=lora", "policy.lora_rank=96"], "not low-rank"),
])
def test_an_impossible_combination_is_refused_with_its_reason(overrides, reason):
    assert reason in refusal(*overrides)


@pytest.mark.parametrize("path", ["./workflows/recipes/prompts/tiny_text_train.txt",
                                  str(RECIPES / "prompts" / "tiny_text_train.txt")])
def test_the_training_file_under_another_spelling_is_refused_too(path):
    assert "never seen in training" in refusal(f"prompts.evaluate={path}")


def test_several_mistakes_are_told_at_once():
    message = refusal("sampling.group_sze=2", "optimizer.learning_rate=-1", "policy.name=sd33")
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize(("overrides", "low", "high", "size"), [
    ([], 0, 7, 4),
    (["sampling.sde_window.size=null"], 0, 7, 7),
    (["sampling.sde_window.size=null", "sampling.last_step_noise=true"], 0, 8, 8),
    (["sampling.sde_window.size=2", "sampling.sde_window.range=[1, 4]"], 1, 4, 2),
])
def test_the_sde_window_leaves_out_the_last_step_unless_asked(overrides, low, high, size):
    sampling = load_recipe("base", overrides).sampling
    assert (sampling.window_range, sampling.window_size) == ((low, high), size)


# Frozen, described, and the same after a trip through JSON

def test_a_config_is_frozen():
    config = load_recipe("base")
    with pytest.raises(ValidationError):
        config.seed = 1
    with pytest.raises(ValidationError):
        config.sampling.group_size = 1


def _models() -> list[type[BaseModel]]:
    found = [value for module in (config_module, run_module, batches, refs) for value in vars(module).values()
             if isinstance(value, type) and issubclass(value, StrictModel) and value.__module__ == module.__name__]
    found += [plugins.load(axis, name).Config for axis in plugins.AXES for name in plugins.names(axis)]
    return found


@pytest.mark.parametrize("model", _models(), ids=lambda model: f"{model.__module__.split('.')[-1]}.{model.__name__}")
def test_every_field_says_what_it_means(model):
    # A plugin narrows `name` to its own; what it means stands at PluginConfig. `kind` of a ref stands at ArtifactRef.
    inherited = {"name"} if issubclass(model, config_module.PluginConfig) else {"kind"}
    silent = [name for name, field in model.model_fields.items()
              if not (field.description or (name in inherited and model.__base__.model_fields[name].description))]
    assert silent == []


@pytest.fixture
def plan():
    config = load_recipe("smoke", "algorithm.clip_range=[1e-4,3e-4] policy.lora_targets=[to_q]")
    return RunPlan(
        name="n", run_key="k", report_key="e", run_id="r", scope="s", store_uri="u", iterations=2,
        evaluation_iterations=[0, 2],
        rollout=config.rollout_spec(), reward=config.reward_spec(), advantage=config.advantage_spec(),
        update=config.update_spec(), evaluate=config.evaluate_spec(), topology=config.topology,
        retention=config.retention, tracking=config.tracking)


def test_a_run_plan_keeps_its_plugins_settings_through_json(plan):
    again = RunPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert type(again.update.algorithm) is plugins.load("algorithms", "flow_grpo").Config
    assert again.update.algorithm.clip_range == (1e-4, 3e-4)
    assert again.rollout.policy.lora_targets == ("to_q",)
    assert again.reward.rewards[0].dense == 0.5


@given(seed=st.integers(0, 2**63 - 1), rate=st.floats(0, 1), noise=st.floats(1e-300, 1e3), weight=st.floats(-1e9, 1e9))
@settings(max_examples=25, deadline=None)
def test_a_config_is_the_same_after_json(seed, rate, noise, weight):
    config = load_recipe("smoke", {"seed": seed, "optimizer.learning_rate": rate, "sampling.noise_level": noise,
                                   "rewards.ocr.weight": weight})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_the_flat_form_names_plugins_and_covers_every_setting():
    flat = load_recipe("base").flat()
    assert flat["rewards.ocr.dense"] == "0.5"
    assert flat["algorithm.clip_range"] == "0.001"
    assert flat["sampling.sde_window.size"] == "4"
    assert flat["topology.update.parallelism"] == "2"


@pytest.mark.parametrize("make", [
    lambda: load_recipe("lost"), lambda: load_recipe("base", "sampling.group_size=1"),
    lambda: plugins.load("rewards", "x")])
def test_errors_survive_pickling(make):
    with pytest.raises(ConfigError) as caught:
        make()
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


# What reruns when something changes

def test_the_number_of_iterations_changes_only_an_update_whose_learning_rate_decays():
    constant = [load_recipe("base", f"optimizer.decay=none iterations={number}") for number in (10, 20)]
    assert changed(*constant) == set()
    cosine = [load_recipe("base", f"optimizer.decay=cosine iterations={number}") for number in (10, 20)]
    assert changed(*cosine) == {"update_spec"}


@pytest.mark.parametrize("override", [
    "topology.rollout.parallelism=7 topology.update.parallelism=1 topology.reward.parallelism=3",
    "topology.update.cpu=9 topology.rollout.memory_bytes=1 topology.rollout.retries=0 topology.update.timeout_s=5",
    "topology.reward.image=other topology.update.gpus=1 topology.evaluate.sm_share=0.5",
    "tracking.experiment=other retention.keep_iterations=9 name=other",
])
def test_where_a_run_works_changes_no_spec_and_no_run_key(override):
    base, other = load_recipe("base"), load_recipe("base", override)
    assert other != base
    assert changed(base, other) == set()
    assert run_key_of(base, "p", "b") == run_key_of(other, "p", "b")


@pytest.mark.parametrize(("override", "expected"), [
    ("seed=1", {"rollout_spec", "update_spec"}),
    ("sampling.group_size=6", {"rollout_spec"}),
    ("rewards.ocr.weight=2", {"reward_spec", "advantage_spec"}),
    ("rewards.ocr.dense=0.25", {"reward_spec"}),
    ("algorithm.kl_coef=0.1", {"advantage_spec", "update_spec"}),
    ("optimizer.learning_rate=1e-4", {"update_spec"}),
    ("evaluation.num_inference_steps=4", {"evaluate_spec"}),
    ("runtime.micro_batch_size=12", {"rollout_spec", "update_spec", "evaluate_spec"}),
    ("topology.rollout.dtype=bf16 topology.update.dtype=bf16", {"rollout_spec", "update_spec"}),
])
def test_a_change_reaches_only_the_stages_that_use_it(override, expected):
    base, other = load_recipe("base"), load_recipe("base", override)
    assert changed(base, other) == expected
    decides_weights = expected != {"evaluate_spec"}
    assert (run_key_of(base, "p", "b") != run_key_of(other, "p", "b")) == decides_weights


def test_the_run_key_depends_on_the_content_of_prompts_and_checkpoint():
    config = load_recipe("base")
    assert len({run_key_of(config, *content) for content in (("p", "b"), ("q", "b"), ("p", "c"))}) == 3


def test_evaluations_are_spread_evenly_from_before_to_after():
    assert load_recipe("base", "iterations=120 evaluation.num_points=4").evaluation_iterations() == [0, 40, 80, 120]
    assert load_recipe("base", "iterations=1 evaluation.num_points=5").evaluation_iterations() == [0, 1]


# Prompts

def bad_prompts(folder: Path, content: bytes, name: str = "p.txt") -> str:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(str(folder / name))
    assert name in str(caught.value)
    return str(caught.value)


def test_a_missing_prompts_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lost\.txt: cannot be read.*prompts\.train"):
        read_prompts(str(tmp_path / "lost.txt"))


@pytest.mark.parametrize(("content", "expected"), [
    (b"", "is empty"), (b" \n\n", "is empty"),
    (b"a cat\na do", "truncated after 'a do'"),
    (b"a cat\n\na dog\n", "line 2: the prompt is empty"),
    (b"a cat\n\xff\xfe\n", "cannot be read"),
])
def test_a_damaged_prompts_file_is_refused(tmp_path, content, expected):
    assert expected in bad_prompts(tmp_path, content)


@pytest.mark.parametrize(("content", "expected"), [
    (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
    (b'{"prompt": "a"}\n\n', "line 2: not JSON"),
    (b'{"promt": "a"}\n', "line 1: the prompt is empty"),
    (b'"a"\n', "line 1: the prompt is empty"),
    (b'{"prompt": 3}\n', "line 1: the prompt is empty"),
    (b'{"prompt": " "}\n', "line 1: the prompt is empty"),
    (b'{"prompt": "a", "metadata": [1]}\n', "line 1: metadata is [1]"),
    (b'{"prompt": "a"}\n{"prompt": "b"}', "truncated"),
])
def test_a_bad_line_of_a_jsonl_file_is_refused_by_number(tmp_path, content, expected):
    assert expected in bad_prompts(tmp_path, content, "p.jsonl")


def test_prompts_are_read_with_their_metadata(tmp_path):
    # A byte order mark, Windows line ends, and U+2028, which is no line end in JSON.
    text = '\ufeff{"prompt": "a\u2028b", "metadata": {"target": "7K"}}\r\n{"prompt": " c "}\r\n'
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    prompts = read_prompts(str(tmp_path / "p.jsonl"))
    assert prompts.texts == ("a\u2028b", "c")
    assert prompts.metadata == ({"target": "7K"}, {})


def test_the_prompts_digest_follows_the_content(tmp_path):
    digests = set()
    for number, content in enumerate(("a\nb\n", "b\na\n", "a\n")):
        (tmp_path / f"{number}.txt").write_text(content)
        digests.add(read_prompts(str(tmp_path / f"{number}.txt")).digest)
    (tmp_path / "again.txt").write_text("a\nb\n")
    assert len(digests) == 3
    assert read_prompts(str(tmp_path / "again.txt")).digest in digests


@given(num_prompts=st.integers(1, 30), count=st.integers(1, 40), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=40, deadline=None)
def test_every_prompt_is_drawn_once_an_epoch(num_prompts, count, seed):
    epochs = 2
    drawn = [position for iteration in range(-(-num_prompts * epochs // count))
             for position in draw_positions(num_prompts, count, seed, iteration)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


def test_draws_need_no_history_and_differ_between_iterations_epochs_and_seeds():
    straight = [draw_positions(64, 8, 5, iteration) for iteration in range(16)]
    assert [draw_positions(64, 8, 5, iteration) for iteration in reversed(range(16))] == straight[::-1]
    for iteration in range(7):
        assert not set(straight[iteration]) & set(straight[iteration + 1]), "within an epoch, no prompt twice"
    assert straight[:8] != straight[8:], "each epoch has its own order"
    assert draw_positions(64, 8, 6, 0) != straight[0]
