"""What a policy generates, as a tagged union: images, video, audio, mesh or tokens, each with its units."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from tasks.contracts.errors import ContractError

if TYPE_CHECKING:
    from torch import Tensor


def _expect(owner: object, name: str, shape: Sequence[int | str], dtype: str) -> None:
    """Check a tensor: a number of `shape` must be that size, a letter may be any."""
    tensor = getattr(owner, name)
    found = str(tensor.dtype).removeprefix("torch.")
    good = tensor.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, shape, strict=True))
    if not good or found != dtype:
        raise ContractError(f"{type(owner).__name__}.{name}: got {found} {list(tensor.shape)}, expected {dtype} "
                            f"[{', '.join(map(str, shape))}]; the policy's decode() made it.")


@dataclass(frozen=True)
class Images:
    """``pixels`` uint8 [N, 3, H, W], sRGB, 0..255."""

    kind: ClassVar[str] = "image"
    pixels: "Tensor"

    def __post_init__(self) -> None:
        _expect(self, "pixels", ("N", 3, "H", "W"), "uint8")

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class Video:
    """``frames`` uint8 [N, F, 3, H, W], sRGB; ``fps`` frames a second."""

    kind: ClassVar[str] = "video"
    frames: "Tensor"
    fps: float

    def __post_init__(self) -> None:
        _expect(self, "frames", ("N", "F", 3, "H", "W"), "uint8")

    def __len__(self) -> int:
        return len(self.frames)


@dataclass(frozen=True)
class Audio:
    """``samples`` float32 [N, C, L] in -1..1; ``sample_rate_hz`` samples a second."""

    kind: ClassVar[str] = "audio"
    samples: "Tensor"
    sample_rate_hz: int

    def __post_init__(self) -> None:
        _expect(self, "samples", ("N", "C", "L"), "float32")

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Mesh:
    """``vertices`` float32 [N, V, 3] in metres, ``faces`` int64 [N, F, 3] indices; pad by repeating the last one."""

    kind: ClassVar[str] = "mesh"
    vertices: "Tensor"
    faces: "Tensor"

    def __post_init__(self) -> None:
        _expect(self, "vertices", ("N", "V", 3), "float32")
        _expect(self, "faces", (len(self.vertices), "F", 3), "int64")

    def __len__(self) -> int:
        return len(self.vertices)


@dataclass(frozen=True)
class Tokens:
    """``ids`` int64 [N, L] of the vocabulary named ``vocabulary``."""

    kind: ClassVar[str] = "tokens"
    ids: "Tensor"
    vocabulary: str

    def __post_init__(self) -> None:
        _expect(self, "ids", ("N", "L"), "int64")

    def __len__(self) -> int:
        return len(self.ids)


Media = Images | Video | Audio | Mesh | Tokens
_KINDS: dict[str, type[Media]] = {kind.kind: kind for kind in (Images, Video, Audio, Mesh, Tokens)}


def media_parts(media: Media) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """Split media into tensors and JSON values, for the store."""
    values = {field.name: getattr(media, field.name) for field in fields(media)}
    tensors = {name: value for name, value in values.items() if hasattr(value, "ndim")}
    return tensors, {"kind": media.kind, **{name: value for name, value in values.items() if name not in tensors}}


def media_from_parts(tensors: dict[str, "Tensor"], meta: dict[str, Any]) -> Media:
    """Rebuild what `media_parts` split.

    Raises:
        ContractError: unknown kind of media.
    """
    meta = dict(meta)
    kind = meta.pop("kind", None)
    if kind not in _KINDS:
        raise ContractError(f"media of kind {kind!r}; expected one of {', '.join(_KINDS)}.")
    return _KINDS[kind](**tensors, **meta)
