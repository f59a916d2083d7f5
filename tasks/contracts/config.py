"""A run's configuration: one YAML recipe, parsed and refused here, before anything costs time.

In: a recipe file (`extends:` a parent) and overrides such as ``sampling.group_size=12``. Out: a frozen `RunConfig`,
and from it one small `*Spec` a stage, so that a cached stage reruns only when something it uses has changed.
Imports neither torch nor flytekit: registration and `--help` stay fast.
"""

import ast
import hashlib
import inspect
import json
import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tasks.contracts.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
"""The project folder; relative paths in a recipe start here."""
RECIPES = ROOT / "workflows" / "recipes"

Dtype = Literal["fp32", "bf16", "fp16"]
SDEKind = Literal["flow", "dance", "cps"]
Schedule = Literal["linear", "sd3", "flux", "dance"]
KernelMode = Literal["reference", "consistent"]

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@cache
def _attribute_docs(path: str) -> dict[str, dict[str, str]]:
    """``{class name: {attribute: docstring}}`` of a source file's top-level classes; none without the source."""
    module = ast.parse("".join(linecache.getlines(path)))
    return {
        node.name: {field.target.id: inspect.cleandoc(doc.value.value)
                    for field, doc in pairwise(node.body)
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                    and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
                    and isinstance(doc.value.value, str)}
        for node in module.body if isinstance(node, ast.ClassDef)
    }


@cache
def _schema_of(model: "type[StrictModel]") -> str:
    return json.dumps(super(StrictModel, model).model_json_schema())


class StrictModel(BaseModel):
    """Frozen; an unknown key is an error; attribute docstrings are the field descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Pydantic's own use_attribute_docstrings goes through `inspect`, which touches every module in sys.modules and
        # so loads what flytekit left for later, pandas and numpy among it: a third of the workflow's import.
        super().__init_subclass__(**kwargs)
        path = getattr(sys.modules.get(cls.__module__), "__file__", None)
        docs = _attribute_docs(path).get(cls.__qualname__, {}) if path else {}
        for name, doc in docs.items():
            cls.__annotations__[name] = Annotated[cls.__annotations__[name], Field(description=doc)]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As pydantic's. The plain form is kept: flytekit asks for it again for each task that takes the model."""
        if args or kwargs:
            return super().model_json_schema(*args, **kwargs)
        return json.loads(_schema_of(cls))

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError(f"got {value}, expected a number")
        return value


class PluginConfig(StrictModel):
    """Base of every plugin's own config. A plugin's defaults are its vetted setting."""

    name: str
    """The plugin's module name on its axis."""


class PolicyConfig(PluginConfig):
    """What every policy understands; a policy module's `Config` extends it."""

    checkpoint: str = ""
    """Base weights: a path, or empty for the one the policy ships."""
    trainable: Literal["full", "lora"] = "full"
    """Train all weights of the denoiser, or low-rank adapters on top of frozen ones."""
    lora_rank: PositiveInt = 8
    """Rank of the adapters; used only with ``trainable: lora``."""
    lora_alpha: PositiveInt = 16
    """Adapter scale numerator: the adapter's output is multiplied by lora_alpha / lora_rank."""


class AlgorithmConfig(PluginConfig):
    """What every algorithm understands; an algorithm module's `Config` extends it."""


class RewardConfig(PluginConfig):
    """What every reward understands; a reward module's `Config` extends it."""

    weight: float = 1.0
    """Factor of this reward in the weighted sum."""


def _as_plugin(axis: str) -> BeforeValidator:
    def convert(value: Any) -> Any:
        if isinstance(value, PluginConfig):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ValueError(f"expected a mapping with a `name`, such as {{name: ...}}, got {value!r}")
        from tasks.plugins import load

        return load(axis, value["name"]).Config.model_validate(dict(value))

    return BeforeValidator(convert)


AnyPolicy = Annotated[SerializeAsAny[PolicyConfig], _as_plugin("policies")]
AnyAlgorithm = Annotated[SerializeAsAny[AlgorithmConfig], _as_plugin("algorithms")]
AnyReward = Annotated[SerializeAsAny[RewardConfig], _as_plugin("rewards")]


class SDEWindow(StrictModel):
    """Which denoising steps are stochastic and trained; the others are deterministic (ODE)."""

    size: Annotated[int, Field(ge=0)] | None = None
    """Number of consecutive SDE steps; None = every step of `range`; 0 = none, pure ODE sampling, for algorithms that
    train on the final latents."""
    range: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """First (inclusive) and last (exclusive) step the window may cover; None = all steps but the last."""
    placement: Literal["first", "random"] = "first"
    """`first` puts the window at the start of `range`; `random` draws its start once an iteration."""


class SamplingConfig(StrictModel):
    """How rollouts are drawn. The part that defines the Markov chain is stored with every trajectory."""

    num_inference_steps: Annotated[int, Field(ge=2, le=1000)] = 10
    """Denoising steps T of a training rollout."""
    schedule: Schedule = "linear"
    """Sigma schedule, see `tasks.sde.sigma_schedule`."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Static shift of the schedule, dimensionless; `flux` reads it as mu (the exponent)."""
    guidance_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance; 1 = off (one forward a step). Rollout and update use the same."""
    sde_kind: SDEKind = "flow"
    """Stochastic transition: Flow-GRPO's, DanceGRPO's or coefficients-preserving sampling."""
    noise_level: Annotated[float, Field(gt=0)] = 0.7
    """Scale `a` (or eta) of the injected noise, dimensionless."""
    sde_window: SDEWindow = SDEWindow()
    """Which steps are stochastic and trained."""
    last_step_noise: bool = False
    """Let the window cover the last step; its likelihood explodes as sigma goes to 0, so it is off."""
    num_groups: PositiveInt = 8
    """Prompts P an iteration."""
    group_size: PositiveInt = 12
    """Samples G a prompt; N = P * G."""
    share_initial_noise: bool = False
    """Members of a group start from the same noise; their step noise always differs."""
    weights: Literal["raw", "old"] = "raw"
    """Which weights draw: `raw` = the ones being trained; `old` = the behaviour policy that the algorithm keeps."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_steps = self.num_inference_steps
        low, high = self.window_range
        if not 0 <= low < high <= num_steps:
            raise ValueError(f"sde_window.range {self.sde_window.range or []} does not fit "
                             f"num_inference_steps {num_steps}: need 0 <= first < last <= {num_steps}")
        if high == num_steps and not self.last_step_noise:
            raise ValueError(f"sde_window.range ends at {high}, which includes the last step {num_steps - 1}; its "
                             "log-prob explodes as sigma goes to 0. End it earlier, or set last_step_noise: true")
        if self.sde_window.size is not None and self.sde_window.size > high - low:
            raise ValueError(f"sde_window.size {self.sde_window.size} is larger than its range [{low}, {high})")
        if self.sde_kind == "cps" and self.noise_level > 1:
            raise ValueError(f"noise_level {self.noise_level} is above 1, which sde_kind cps cannot use: its std is "
                             "sigma_next * sin(noise_level * pi / 2)")
        if self.sde_kind == "cps" and self.last_step_noise:
            raise ValueError("last_step_noise: true has no effect with sde_kind cps, whose last step has no noise; "
                             "set it to false")
        return self

    @property
    def window_range(self) -> tuple[int, int]:
        """The steps the SDE window may cover, first inclusive, last exclusive."""
        last = self.num_inference_steps if self.last_step_noise else self.num_inference_steps - 1
        low, high = self.sde_window.range or (0, last)
        return low, high

    @property
    def window_size(self) -> int:
        """The number S of SDE steps of each sample."""
        low, high = self.window_range
        return high - low if self.sde_window.size is None else self.sde_window.size

    @property
    def num_samples(self) -> int:
        """N = num_groups * group_size."""
        return self.num_groups * self.group_size


class PromptsConfig(StrictModel):
    """Prompt files: `.txt` with one prompt a line, or `.jsonl` with `{"prompt": ..., "metadata": {...}}` a line."""

    train: str
    """Prompts of the rollouts; a path, relative ones from the project folder."""
    evaluate: str
    """Prompts of the evaluation, never used for training."""


class OptimizerConfig(StrictModel):
    """AdamW, its schedule and the averaging of weights."""

    learning_rate: Annotated[float, Field(ge=0)] = 3e-4
    """Peak learning rate; 0 is the control that changes nothing."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations of linear warm-up."""
    decay: Literal["none", "cosine"] = "none"
    """Decay of the learning rate over the run, after the warm-up."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of a cosine decay, as a fraction of the peak."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's moment decays."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator offset."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global L2 norm."""
    updates_per_rollout: PositiveInt = 2
    """Optimiser steps an iteration: the rollout is split into this many minibatches. 1 = purely on-policy."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay an iteration of the exponential moving average of the weights; 0 = the raw weights."""
    max_skipped_updates: Annotated[int, Field(ge=0)] = 3
    """An iteration with more non-finite (skipped) optimiser steps than this stops the run."""


class EvaluationConfig(StrictModel):
    """Evaluation has its own steps, guidance and seed, stored with each number. Always ODE sampling."""

    num_points: Annotated[int, Field(ge=2)] = 3
    """Evaluations in a run, spread evenly: the first before training, the last after it."""
    num_inference_steps: PositiveInt = 10
    """Denoising steps."""
    guidance_scale: Annotated[float, Field(ge=1)] = 1.0
    """Classifier-free guidance; 1 = off."""
    seed: int = 7
    """Seed of the fixed initial noise: the same for every evaluation of every run."""
    num_prompts: Annotated[int, Field(ge=0)] = 0
    """Use only the first so many prompts; 0 = all."""
    weights: Annotated[list[Literal["raw", "ema"]], Field(min_length=1)] = ["ema", "raw"]
    """Which weights are evaluated; the first is the headline."""
    readers: list[AnyReward] = []
    """Scorers of the evaluation; name at least one that is not a training reward."""
    diversity_prompts: Annotated[int, Field(ge=0)] = 8
    """Prompts for the diversity measure; 0 = none."""
    diversity_draws: Annotated[int, Field(ge=2)] = 8
    """Samples a prompt for the diversity measure."""
    grid_images: PositiveInt = 32
    """Images in the grid."""


class RuntimeConfig(StrictModel):
    """How the arithmetic is done. Part of the sampling contract: rollout and update share it."""

    micro_batch_size: PositiveInt = 24
    """Rows of every forward pass of the denoiser, in rollout and update alike; the last batch is padded with
    zero-weight rows, because a row's bits may depend on the number of rows. When memory runs out, a rollout goes on
    with half of it, and the update of its samples follows."""
    kernels: KernelMode = "reference"
    """Kernel mode: `reference` is plain torch; `consistent` is `flowmill-kernels`, whose rows depend on nothing but
    themselves: fast on a GPU, some 5 times slower than `reference` on a CPU."""


class RoleConfig(StrictModel):
    """Where and with what a role runs. Never changes a result's bits, except `dtype`, which is checked."""

    host: Literal["pod"] = "pod"
    """A pod (or process) of its own for each task."""
    image: str = "train"
    """Image name under images/."""
    cpu: Annotated[float, Field(gt=0)] = 2
    """CPU cores."""
    memory_bytes: Annotated[int, Field(gt=0)] = 2 * 1024**3
    """Memory limit, bytes."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Whole GPUs."""
    shared_memory_bytes: Annotated[int, Field(gt=0)] | None = None
    """Size of /dev/shm, bytes, part of the memory limit; None = the container engine's 64 MB."""
    pod_template: str = ""
    """Kubernetes PodTemplate of the pod; empty = flowmill-gpu with GPUs, else flowmill-cpu."""
    sm_share: Fraction | None = None
    """Fraction of one GPU's SMs; None = not shared."""
    parallelism: PositiveInt = 2
    """Lanes that work side by side. Any number gives the same bits."""
    dtype: Dtype = "fp32"
    """Compute type of the denoiser."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Retries after a lost node; bad input is not retried."""
    timeout_s: PositiveInt = 3600
    """Time limit of one task."""
    interruptible: bool = False
    """May run on preemptible nodes."""


class Topology(StrictModel):
    """Role -> where it runs."""

    rollout: RoleConfig = RoleConfig()
    """Stage 1."""
    reward: RoleConfig = RoleConfig(image="reward")
    """Stage 2."""
    advantage: RoleConfig = RoleConfig(cpu=1)
    """Stage 3."""
    update: RoleConfig = RoleConfig()
    """Stage 4."""
    evaluate: RoleConfig = RoleConfig()
    """Stage 5."""
    control: RoleConfig = RoleConfig(cpu=1)
    """The tasks around the stages: plan, record, finish."""
    pe: RoleConfig | None = None
    """Prompt enhancement; None = not used."""
    tool: RoleConfig | None = None
    """Tool calls; None = not used."""
    secrets: dict[str, str] = {}
    """Environment variable of every task's pod -> `group/key` of a Flyte secret (on Kubernetes: secret and key)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for variable, source in self.secrets.items():
            if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable):
                raise ValueError(f"secrets: {variable!r} is no environment variable such as AWS_ACCESS_KEY_ID")
            if not re.fullmatch(r"[^/\s]+/[^/\s]+", source):
                raise ValueError(f"secrets.{variable}: {source!r}; expected group/key, such as "
                                 "flowmill-s3/access_key_id")
        for name, role in self.roles().items():
            if role.shared_memory_bytes and role.shared_memory_bytes >= role.memory_bytes:
                raise ValueError(f"{name}.shared_memory_bytes {role.shared_memory_bytes} leaves nothing of its "
                                 f"memory_bytes {role.memory_bytes}: what lies in /dev/shm counts as memory")
        return self

    def roles(self) -> dict[str, RoleConfig]:
        """Name -> setting of the roles that are used."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in found.items() if isinstance(value, RoleConfig)}


class TrackingConfig(StrictModel):
    """MLflow. Its address is the environment's MLFLOW_TRACKING_URI, else a sqlite file in the project folder."""

    experiment: str = "flowmill"
    """MLflow experiment."""
    register_as: str = ""
    """Registered model name that gets a version with alias `best`; empty = do not register."""


class RetentionConfig(StrictModel):
    """Which data stays in the store. Manifests always stay, so a resumed run still knows what was made."""

    keep_iterations: PositiveInt = 2
    """Trajectories, policies and train states of the newest so many iterations; evaluated policies are kept."""
    trajectory_days: PositiveInt = 30
    """S3 only: days after which the bucket's lifecycle rule expires trajectories, and nothing else."""


class RolloutSpec(StrictModel):
    """All that decides a rollout's bits."""

    seed: int
    """The run's seed."""
    policy: AnyPolicy
    """The policy that draws."""
    sampling: SamplingConfig
    """How it draws."""
    prompts: str
    """Prompts file."""
    runtime: RuntimeConfig
    """How the arithmetic is done."""
    dtype: Dtype
    """Compute type of the denoiser."""


class RewardSpec(StrictModel):
    """All that decides the scores."""

    rewards: list[AnyReward]
    """The rewards and their weights."""


class AdvantageSpec(StrictModel):
    """All that decides the advantages."""

    algorithm: AnyAlgorithm
    """Whose advantage rule is used."""
    reward_weights: dict[str, float]
    """Reward name -> factor."""


class UpdateSpec(StrictModel):
    """All that decides the next weights."""

    seed: int
    """The run's seed."""
    iterations: int
    """Length of the run when the learning rate decays over it; 0 when it does not matter."""
    policy: AnyPolicy
    """The policy that is trained."""
    algorithm: AnyAlgorithm
    """Whose loss is used."""
    optimizer: OptimizerConfig
    """How its gradient becomes new weights."""
    runtime: RuntimeConfig
    """How the arithmetic is done; as in the rollout."""
    dtype: Dtype
    """Compute type of the denoiser; as in the rollout."""


class EvaluateSpec(StrictModel):
    """All that decides an evaluation."""

    policy: AnyPolicy
    """The policy that is evaluated."""
    evaluation: EvaluationConfig
    """Steps, guidance, seed and scorers."""
    schedule: Schedule
    """Sigma schedule; as in the rollout."""
    shift: float
    """Its shift, dimensionless."""
    prompts: str
    """Prompts file, never used for training."""
    runtime: RuntimeConfig
    """How the arithmetic is done."""
    dtype: Dtype
    """Compute type of the denoiser."""


class RunConfig(StrictModel):
    """One training run."""

    name: str = "run"
    """Name of the run in MLflow."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed from which every draw of the run derives."""
    iterations: Annotated[int, Field(ge=1, le=5000)] = 100
    """Iterations: rollout -> reward -> advantage -> update."""
    policy: AnyPolicy
    """What is trained: `name` is a file of tasks/policies, the rest are its settings."""
    algorithm: AnyAlgorithm
    """Advantage and loss: `name` is a file of tasks/algorithms."""
    rewards: Annotated[list[AnyReward], Field(min_length=1)]
    """What is rewarded: each `name` is a file of tasks/rewards, each `weight` its factor in the sum."""
    prompts: PromptsConfig
    """Training and evaluation prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are drawn."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser, learning rate and weight averaging."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How often and how policies are evaluated."""
    runtime: RuntimeConfig = RuntimeConfig()
    """How the arithmetic is done."""
    topology: Topology = Topology()
    """Where each role runs."""
    tracking: TrackingConfig = TrackingConfig()
    """MLflow."""
    retention: RetentionConfig = RetentionConfig()
    """What stays in the store."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for label, plugins in (("rewards", self.rewards), ("evaluation.readers", self.evaluation.readers)):
            names = [plugin.name for plugin in plugins]
            if len(set(names)) != len(names):
                raise ValueError(f"{label} {names} name one reward twice; merge them into one entry")
        if self.optimizer.updates_per_rollout > self.sampling.num_samples:
            raise ValueError(f"optimizer.updates_per_rollout {self.optimizer.updates_per_rollout} is more than the "
                             f"{self.sampling.num_samples} samples of an iteration: some updates would have none")
        if self.optimizer.warmup_iterations >= self.iterations > 1:
            raise ValueError(f"optimizer.warmup_iterations {self.optimizer.warmup_iterations} leaves none of the "
                             f"{self.iterations} iterations at the full learning rate")
        rollout, update = self.topology.rollout, self.topology.update
        if rollout.dtype != update.dtype:
            raise ValueError(f"topology.rollout.dtype {rollout.dtype} differs from topology.update.dtype "
                             f"{update.dtype}: the ratio before the first update would not be 1")
        if (ROOT / self.prompts.train).resolve() == (ROOT / self.prompts.evaluate).resolve():
            raise ValueError(f"prompts.evaluate is the training file {self.prompts.train!r}; evaluation needs "
                             "prompts never seen in training")
        from tasks.plugins import load

        algorithm = self.algorithm.name
        if self.sampling.weights == "old" and not hasattr(load("algorithms", algorithm), "old_policy_decay"):
            raise ValueError(f"algorithm {algorithm!r} keeps no 'old' policy that could draw the rollouts; set "
                             "sampling.weights: raw")
        for axis, plugin in (("policies", self.policy), ("algorithms", self.algorithm)):
            check = getattr(load(axis, plugin.name), "check", None)
            if check is not None:
                check(self)
        return self

    def rollout_spec(self) -> RolloutSpec:
        return RolloutSpec(seed=self.seed, policy=self.policy, sampling=self.sampling, prompts=self.prompts.train,
                           runtime=self.runtime, dtype=self.topology.rollout.dtype)

    def reward_spec(self) -> RewardSpec:
        return RewardSpec(rewards=self.rewards)

    def advantage_spec(self) -> AdvantageSpec:
        return AdvantageSpec(algorithm=self.algorithm, reward_weights={r.name: r.weight for r in self.rewards})

    def update_spec(self) -> UpdateSpec:
        # A decaying learning rate depends on the length of the run; a constant one must not rerun when it changes.
        iterations = self.iterations if self.optimizer.decay != "none" else 0
        return UpdateSpec(seed=self.seed, iterations=iterations, policy=self.policy, algorithm=self.algorithm,
                          optimizer=self.optimizer, runtime=self.runtime, dtype=self.topology.update.dtype)

    def evaluate_spec(self) -> EvaluateSpec:
        return EvaluateSpec(policy=self.policy, evaluation=self.evaluation, schedule=self.sampling.schedule,
                            shift=self.sampling.shift, prompts=self.prompts.evaluate, runtime=self.runtime,
                            dtype=self.topology.evaluate.dtype)

    def evaluation_iterations(self) -> list[int]:
        """The iterations after which the policy is evaluated; 0 = before training."""
        points = self.evaluation.num_points - 1
        return sorted({round(self.iterations * point / points) for point in range(points + 1)})

    def flat(self) -> dict[str, str]:
        """The whole recipe as dotted key -> value text, for MLflow parameters."""
        return dict(_flatten("", self.model_dump(mode="json")))


def _flatten(prefix: str, value: Any):
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for item in value:
            yield from _flatten(f"{prefix}.{item.get('name', value.index(item))}", item)
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def digest_of(value: BaseModel | Mapping[str, Any]) -> str:
    """SHA-256, hex, of the canonical JSON of a config or mapping."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_recipe(name_or_path: str, overrides: str | Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a recipe, follow `extends:`, apply overrides and validate.

    Args:
        name_or_path: A name in workflows/recipes, or a path to a YAML file.
        overrides: ``"a.b=1 c=2"`` (split like a shell line), a sequence of such items, or a mapping of dotted keys.
            Values are YAML. ``rewards.ocr.weight=2`` reaches the list item of that name.

    Raises:
        ConfigError: unknown recipe, unreadable YAML, unknown key, wrong type, out of range, impossible combination.
    """
    from tasks.contracts import recipes

    data = recipes.read(name_or_path, overrides)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(recipes.explain(name_or_path, error, data)) from None
