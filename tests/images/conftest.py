"""The engine and the built images that the tests marked `cluster` start; who asks for these tests has both."""

import os
import subprocess

import pytest

from k8s.stack.pod import StackError, find_engine


@pytest.fixture(scope="session")
def engine() -> str:
    """podman or docker."""
    try:
        return find_engine()
    except StackError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def images(engine) -> dict[str, str]:
    """Name -> reference of the images that `make images` built; FLOWMILL_TEST_TAG names another tag."""
    tag = os.environ.get("FLOWMILL_TEST_TAG", "0.1.0-cpu")
    found = {name: f"localhost/flowmill-{name}:{tag}" for name in ("base", "kernels", "train", "reward", "mlflow")}
    for image in found.values():
        if subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode:
            pytest.fail(f"needs the image {image}: `make images`", pytrace=False)
    return found
