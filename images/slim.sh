#!/bin/sh
# Take out of a Python environment what no task reads, then byte-compile the rest. Usage: slim.sh FOLDER...
# Kept: every module that is imported, licences, package metadata (Hugging Face libraries read versions from it).
set -eu
for folder in "$@"; do
  # Tests that packages ship, stubs, C sources and static libraries. torch.testing and friends are not tests.
  find "$folder" -type d \( -name tests -o -path '*/sympy/*/tests' \) -prune -exec rm -rf {} +
  # torch ships its own test suite (130 MB); of its programs it starts only the one for shared memory.
  find "$folder" -type d -path '*/torch/test' -prune -exec rm -rf {} +
  find "$folder" -path '*/torch/bin/*' ! -name torch_shm_manager -delete
  find "$folder" -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' -o -name '*.cpp' \) -delete
  find "$folder" -type d -name __pycache__ -prune -exec rm -rf {} +
  # Headers and CMake files serve compilers; the CPU images have none.
  if [ "${VARIANT:-cpu}" = cpu ]; then
    for unused in torch/include torch/share; do
      find "$folder" -type d -path "*/$unused" -prune -exec rm -rf {} +
    done
  fi
  # botocore describes every service of AWS; s3fs speaks to S3, and to those that give credentials.
  find "$folder" -type d -path '*/botocore/data/*' -prune ! -name s3 ! -name sts ! -name sso ! -name sso-oidc \
    -exec rm -rf {} +
  # One .pyc a module, checked by content: a file's date must not make a task compile everything again.
  python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash "$folder" || true
done
