"""Tensors <-> the bytes of a safetensors file. Next: `Store.put` hashes and writes them. Knows nothing of stores."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.contracts.errors import StoreError
from tasks.store.backend import Chunks

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
           "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
           "F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64"}


def encode(where: str, tensors: "Mapping[str, Tensor]") -> Chunks:
    """The safetensors file of `tensors` as a header and views of their memory: same tensors, same bytes.

    Written here because `safetensors.torch.save` first builds the whole file in new memory, 13-170 ms for 30 MB.
    """
    import torch

    names = {getattr(torch, dtype): name for name, dtype in _DTYPES.items()}
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header: dict[str, Any] = {}
    chunks: list[bytes | memoryview] = []
    offset = 0
    # Widest first, so that every tensor is aligned to its own element size, as the format's readers expect.
    for name, tensor in sorted(flat.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if name == "__metadata__" or tensor.dtype not in names:
            raise StoreError(f"{where}: tensor {name!r} of {tensor.dtype} cannot be stored as safetensors.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        if end > offset:
            chunks.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *chunks]


def decode(data: bytearray) -> "dict[str, Tensor]":
    """The tensors of a file that `encode` made and whose SHA-256 was verified, each in memory of its own."""
    import torch

    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        dtype, (begin, end) = getattr(torch, _DTYPES[entry["dtype"]]), entry["data_offsets"]
        tensor = torch.empty(entry["shape"], dtype=dtype)
        if end > begin:
            tensor.view(-1).copy_(torch.frombuffer(data, dtype=dtype, count=tensor.numel(), offset=start + begin))
        tensors[name] = tensor
    return dict(sorted(tensors.items()))
