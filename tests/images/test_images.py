"""The built images, each started as a task's pod is: user 10001, read-only root, no capabilities, limited memory."""

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
MB = 1_000_000
SIZES = {"train": 2100 * MB, "reward": 1700 * MB, "mlflow": 1300 * MB}
"""The most an image may take, bytes, unpacked; for `train` it is the project's figure."""
TASK_IMAGES = ("train", "reward")


def inside(engine: str, image: str, script: str, scratch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in an image under a task pod's restrictions."""
    volumes = []
    for target in ("/workspace", "/tmp", "/var/cache/flowmill"):
        folder = scratch / target.strip("/").replace("/", "-")
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        volumes.append(f"--volume={folder}:{target}")
    return subprocess.run(
        [engine, "run", "--rm", "--read-only", "--user=10001:10001", "--cap-drop=ALL", "--network=none",
         "--security-opt=no-new-privileges", "--memory=2g", *volumes, *options, image, "sh", "-c", script],
        capture_output=True, text=True, timeout=120)


@pytest.fixture
def run(engine, images, tmp_path):
    """Function: standard output of a script inside an image."""
    def call(name: str, script: str) -> str:
        done = inside(engine, images[name], script, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return call


def test_sizes_are_within_their_limits(engine, images):
    sizes = {}
    for name, image in images.items():
        done = subprocess.run([engine, "image", "inspect", image], check=True, capture_output=True, text=True)
        sizes[name] = json.loads(done.stdout)[0]["Size"]
    print({name: f"{size / MB:.0f} MB" for name, size in sizes.items()})
    assert {name for name, limit in SIZES.items() if sizes[name] > limit} == set(), sizes
    assert sizes["kernels"] - sizes["base"] < 10 * MB, "the kernels are one small layer"


@pytest.mark.parametrize("name", ["train", "reward", "mlflow"])
def test_labels_and_user(engine, images, name):
    done = subprocess.run([engine, "image", "inspect", images[name]], check=True, capture_output=True, text=True)
    config = json.loads(done.stdout)[0]["Config"]
    assert config["User"] == "10001:10001"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"flowmill-{name}"
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert labels["org.opencontainers.image.revision"] not in ("", "unknown")


@pytest.mark.parametrize("name", TASK_IMAGES)
def test_the_root_is_read_only_for_the_user_and_the_caches_are_not(run, name):
    assert run(name, "id -u; touch /opt/flowmill/x 2>&1 | grep -c 'Read-only'; touch /workspace/a /tmp/a "
                     "/var/cache/flowmill/a && echo ok").split() == ["10001", "1", "ok"]


@pytest.mark.parametrize("name", ["train", "reward", "mlflow"])
def test_no_build_tools_are_left(run, name):
    found = run(name, "for tool in gcc g++ cc make git cmake ld; do command -v $tool; done; "
                      "python -m pip --version 2>/dev/null | head -1; true")
    assert found == ""


@pytest.mark.parametrize("name", TASK_IMAGES)
def test_every_module_is_byte_compiled_and_none_twice(run, name):
    report = run(name, "python - <<'E'\n"
                       "from pathlib import Path\n"
                       "roots = [Path(p) for p in ('/opt/venv', '/opt/kernels', '/opt/train', '/opt/reward', "
                       "'/opt/flowmill')]\n"
                       "sources = [p for r in roots if r.exists() for p in r.rglob('*.py')]\n"
                       "made = lambda p: list((p.parent / '__pycache__').glob(p.stem + '.cpython-*.pyc'))\n"
                       "counts = [len(made(p)) for p in sources]\n"
                       "print(len(counts), counts.count(0), sum(count > 1 for count in counts))\n"
                       "E")
    total, missing, double = map(int, report.split())
    assert total > 3000
    assert missing < total / 100, "only files that no Python of this version can compile"
    assert double == 0


@pytest.mark.parametrize("name", TASK_IMAGES)
def test_the_project_is_found_without_pythonpath_and_no_kernels_folder_is(run, name):
    assert run(name, "echo \"[$PYTHONPATH]\"; python -c 'import workflows.flowgrpo as w; print(w.__file__)'; "
                     "python -c 'import importlib.util as u; print(u.find_spec(\"kernels\"))'; "
                     "wc -l < /opt/flowmill/COMMIT").split() == [
                         "[]", "/opt/flowmill/workflows/flowgrpo.py", "None", "1"]


def test_train_holds_the_generators_the_kernels_and_both_readers(run):
    assert run("train", "python -c '\n"
                        "from diffusers import SD3Transformer2DModel\n"
                        "import flowmill_kernels, peft\n"
                        "from tasks.contracts.config import load_recipe\n"
                        "from tasks.reward import scorer_of\n"
                        "from tasks.runtime import load_policy\n"
                        "config = load_recipe(\"smoke\", \"runtime.kernels=consistent\")\n"
                        "load_policy(config.policy, 0, \"fp32\", \"consistent\")\n"
                        "print(len([scorer_of(reader) for reader in config.evaluation.readers]))'") == "3"


def test_reward_holds_the_readers_and_no_generator(run):
    assert run("reward", "python -c '\n"
                         "import importlib.util\n"
                         "from tasks.contracts.config import load_recipe\n"
                         "from tasks.reward import scorer_of\n"
                         "print(len([scorer_of(reader) for reader in load_recipe(\"smoke\").evaluation.readers]))\n"
                         "print(importlib.util.find_spec(\"diffusers\"), importlib.util.find_spec(\"cv2\"))'"
               ).split() == ["3", "None", "None"]


def test_tasks_have_the_small_mlflow_and_the_server_the_whole_one(run):
    find = "python -c 'import importlib.util as u; print([bool(u.find_spec(n)) for n in (\"mlflow\", \"sqlalchemy\")])'"
    assert run("train", find) == "[True, False]"
    assert run("mlflow", find) == "[True, True]"


def test_an_image_without_the_kernels_wheel_says_so(engine, images, tmp_path):
    script = ("python -c 'from tasks.contracts.config import load_recipe; from tasks.runtime import load_policy\n"
              "load_policy(load_recipe(\"smoke\").policy, 0, \"fp32\", \"consistent\")'")
    (tmp_path / "empty").mkdir()
    done = inside(engine, images["train"], script, tmp_path, f"--volume={tmp_path / 'empty'}:/opt/kernels:ro")
    assert done.returncode == 1
    assert "needs the package flowmill-kernels, which is not installed" in done.stderr
    assert "make images" in done.stderr
