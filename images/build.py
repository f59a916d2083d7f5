"""Build the container images with docker or podman, whichever is there: `make images`.

    base -> kernels -> train          base -> reward          mlflow

Needs Python only. Prints each image's size; ends with the names to register tasks with. pip's settings of this machine
(PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT) reach the builds; folders and files among them are
mounted, which podman can and docker cannot.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("base", "kernels", "train", "reward", "mlflow")
NEEDS = {"base": (), "kernels": ("base",), "train": ("base", "kernels"), "reward": ("base",), "mlflow": ()}
ENGINES = ("docker", "podman")
"""The first that answers builds the images, and `make stack` looks for them there."""
PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its builds without CUDA; not asked when PIP_FIND_LINKS names a folder that has one."""


def find_engine(wanted: str) -> str:
    """docker or podman: the one asked for, else the first that answers."""
    for name in (wanted,) if wanted else ENGINES:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    raise SystemExit(f"images: {wanted or 'neither docker nor podman'} does not answer to `info`. Start the engine, or "
                     "install one: `apt-get install podman runc`.")


def git_revision() -> str:
    """Commit of the working tree, with `-dirty` if it has changes; 'unknown' outside git."""
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                          capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def pip_options(engine: str) -> list[str]:
    """The build's options that carry this machine's pip settings."""
    options: list[str] = []
    for name in PIP_SETTINGS:
        value = os.environ.get(name)
        if not value:
            continue
        options.append(f"--build-arg={name}={value}")
        for path in {Path(part) for part in value.split() if part.startswith("/") and Path(part).exists()}:
            if engine == "docker":
                raise SystemExit(f"images: {name}={value} is a path, which docker cannot mount into a build. Use "
                                 "podman (`make images BUILD=--engine=podman`), or unset it.")
            options.append(f"--volume={path.resolve()}:{path}:ro")
    return options


def build(name: str, arguments: argparse.Namespace, engine: str, names: dict[str, str]) -> None:
    """Build one image; its parents are built already, or named in the environment of an earlier call."""
    context = ROOT / "kernels" if name == "kernels" else ROOT
    build_args = {"VARIANT": arguments.variant, "VERSION": _version(), "REVISION": git_revision(),
                  "PYTHON_IMAGE": arguments.python_image}
    if name in ("kernels", "reward"):
        build_args["BASE_IMAGE"] = names["base"]
    if name == "train":
        build_args["KERNELS_IMAGE"] = names["kernels"]
    if name == "base" and arguments.variant == "cpu" and not os.environ.get("PIP_FIND_LINKS"):
        build_args["TORCH_INDEX_URL"] = CPU_TORCH
    # Debian's podman 4 runs build steps with runc only where it is told to.
    isolation = ["--isolation=oci", "--format=oci", *(["--runtime=runc"] if shutil.which("runc") else [])]
    command = [engine, "build", *(isolation if engine == "podman" else []), "--network=host", *pip_options(engine),
               *(f"--build-arg={key}={value}" for key, value in build_args.items() if value),
               "--file", str(ROOT / "images" / name / "Dockerfile"), "--tag", names[name], str(context)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=not arguments.verbose, text=True)
    if done.returncode:
        sys.stderr.write((done.stdout or "")[-4000:] + (done.stderr or "")[-4000:])
        raise SystemExit(f"images: building {names[name]} failed; the engine's last words are above, all of them with "
                         "--verbose.")
    size = json.loads(subprocess.run([engine, "image", "inspect", names[name]], check=True, capture_output=True,
                                     text=True).stdout)[0]["Size"]
    print(f"{names[name]:60s} {size / 1e6:7.0f} MB  {time.monotonic() - started:5.0f} s", flush=True)


def build_all(wanted: list[str], build_one: Callable[[str], None]) -> None:
    """Build each image once those it is built on are there, two at a time: a build mostly waits for one pip."""
    started: dict[str, Future[None]] = {}

    def when_ready(name: str) -> None:
        for parent in NEEDS[name]:
            started[parent].result()
        build_one(name)

    with ThreadPoolExecutor(2) as pool:
        # Those without parents first: a worker that waits for a parent then waits for one that another works on.
        for name in sorted(wanted, key=lambda name: bool(NEEDS[name])):
            started[name] = pool.submit(when_ready, name)
        for future in started.values():
            future.result()


def push(name: str, engine: str) -> None:
    """Push an image and print its digest, which the manifests name it by. docker prints it by itself."""
    if engine == "docker":
        subprocess.run([engine, "push", name], check=True)
        return
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([engine, "push", f"--digestfile={file.name}", name], check=True)
        print(f"{name}  digest: {Path(file.name).read_text().strip()}", flush=True)


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="image",
                        help=f"which ones, with what they are built on (default: all): {', '.join(ORDER)}")
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tag", default="", help="default: VERSION-VARIANT, such as 0.1.0-cpu")
    parser.add_argument("--registry", default="localhost", help="prefix, such as registry.example.org/team")
    parser.add_argument("--push", action="store_true", help="push what was built and print digests")
    parser.add_argument("--engine", default="", choices=("", "docker", "podman"))
    parser.add_argument("--python-image", default="", help="another base image than the Dockerfiles' pinned one")
    parser.add_argument("--verbose", action="store_true", help="show the engine's output")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(ORDER)
    if unknown:
        parser.error(f"no image named {', '.join(sorted(unknown))}; found {', '.join(ORDER)}")
    engine = find_engine(arguments.engine)
    tag = arguments.tag or f"{_version()}-{arguments.variant}"
    names = {name: f"{arguments.registry.rstrip('/')}/flowmill-{name}:{tag}" for name in ORDER}
    wanted = set(arguments.names or ORDER)
    wanted |= {parent for name in wanted for parent in NEEDS[name]}
    build_all([name for name in ORDER if name in wanted], lambda name: build(name, arguments, engine, names))
    for name in ORDER:
        if arguments.push and name in wanted and name not in ("base", "kernels"):
            push(names[name], engine)


if __name__ == "__main__":
    main()
