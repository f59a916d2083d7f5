"""Text rendering, read by a real OCR engine: does the image show the text that the prompt quotes?

In: images and prompts. Out: one minus the normalised edit distance, optionally mixed with the likelihood the engine
gives the target, which tells nearly right from plainly wrong where every reading fails. The engine is the PP-OCRv4
recogniser that ships inside the rapidocr-onnxruntime wheel, driven directly: the image is one line of text, so
detection and rotation are left out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tasks.contracts.config import Fraction, RewardConfig
from tasks.contracts.errors import RewardError
from tasks.contracts.media import Media
from tasks.rewards._text import image_pixels, reading_parts, targets_of

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

_MODEL = ("models", "ch_PP-OCRv4_rec_infer.onnx")
_HEIGHT = 48
_BATCH = 16
"""Images a call of the engine; measured 3.7 CPU-ms an image at 4 to 24, 6.3 at 144. Any size gives the same bits."""
_BLANK = 0
_FLOOR = 1e-12
"""Added to every probability, so that one frame cannot veto a reading."""


class Config(RewardConfig):
    """Settings of the OCR reward."""

    name: Literal["ocr"] = "ocr"
    dense: Fraction = 0.0
    """Share of exp(CTC log-likelihood of the target / its length) in the score; the rest is 1 - NED."""


class Reader:
    """The loaded engine; see `tasks.rewards.base.Scorer`. One ONNX session serves all threads."""

    def __init__(self, config: Config) -> None:
        import importlib.util
        from pathlib import Path

        import onnxruntime

        spec = importlib.util.find_spec("rapidocr_onnxruntime")  # finds the models without importing OpenCV
        model = Path(spec.origin).parent.joinpath(*_MODEL) if spec and spec.origin else None
        if model is None or not model.is_file():
            raise RewardError(f"reward 'ocr' found no {'/'.join(_MODEL)} (looked at {model}); it is part of the wheel: "
                              "pip install rapidocr-onnxruntime==1.4.4.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.config = config
        self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        alphabet = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *alphabet, " "]
        self._classes: dict[str, list[int]] = {}
        for index, character in enumerate(self._characters):
            if character.strip():
                self._classes.setdefault(character.lower(), []).append(index)

    def __call__(self, media: Media, prompts: Sequence[str],
                 metadata: Sequence[Mapping[str, Any]]) -> dict[str, "ndarray"]:
        """``score``, ``exact_match``, ``one_minus_ned`` and ``likelihood``, float64 [N].

        Raises:
            RewardError: not images, or a target that is empty or has a character the engine does not know.
        """
        pixels, targets = image_pixels("ocr", media, prompts), targets_of(prompts)
        for sample, target in enumerate(targets):
            unknown = [character for character in target if character not in self._classes]
            if unknown:
                raise RewardError(f"sample {sample}: the engine of reward 'ocr' cannot read {''.join(unknown)!r} in "
                                  f"the target {target!r} of the prompt {prompts[sample]!r}; change the prompt.")
        probabilities = self.probabilities(pixels)
        parts = reading_parts([self.decode(frames) for frames in probabilities.argmax(-1)], targets)
        likelihood = ctc_likelihood(probabilities, [[self._classes[character] for character in target]
                                                    for target in targets])
        dense = self.config.dense
        return {"score": (1 - dense) * parts["one_minus_ned"] + dense * likelihood, **parts, "likelihood": likelihood}

    def probabilities(self, pixels: "Tensor") -> "ndarray":
        """The engine's output for images uint8 [N, 3, H, W]: float32 [N, frames, classes], class 0 = blank."""
        import numpy as np
        from torch.nn.functional import interpolate

        if not len(pixels):
            return np.zeros((0, 1, len(self._characters)), dtype=np.float32)
        height, width = pixels.shape[-2:]
        size = (_HEIGHT, max(_HEIGHT, round(_HEIGHT * width / height)))
        rows = interpolate(pixels.float() / 255, size=size, mode="bilinear", align_corners=False,
                           antialias=height > _HEIGHT).clamp(0, 1)
        inputs = (rows.flip(1) * 2 - 1).contiguous().numpy()  # the engine was trained on BGR in -1..1
        return np.concatenate([np.asarray(self._session.run(None, {self._input: inputs[start:start + _BATCH]})[0])
                               for start in range(0, len(inputs), _BATCH)])

    def decode(self, frames: "ndarray") -> str:
        """Greedy CTC: the best class of each frame, repeats merged, blanks removed."""
        kept, last = [], _BLANK
        for index in frames.tolist():
            if index not in (_BLANK, last):
                kept.append(self._characters[index])
            last = index
        return "".join(kept)


def ctc_likelihood(probabilities: "ndarray", targets: Sequence[Sequence[Sequence[int]]]) -> "ndarray":
    """exp(log P(target) / length): the geometric mean probability of a target's characters, float64 [N].

    Args:
        probabilities: [N, frames, classes], class 0 = blank.
        targets: For each sample, for each character, the classes that count as it (upper and lower case).

    P sums over all alignments (Graves et al. 2006, eq. 5-8). The forward variables are kept in range by powers of two,
    which is exact, so a sample's bits do not depend on the batch it is in; 0 where the target is over 1e300 times less
    likely than its beginning alone (that is more than 25 characters of which the image shows no trace).
    """
    import numpy as np

    num_samples, num_frames = probabilities.shape[:2]
    lengths = np.array([len(target) for target in targets], dtype=np.int64)
    num_states = 2 * int(lengths.max(initial=0)) + 1
    emissions = np.zeros((num_samples, num_frames, num_states))
    skips = np.zeros((num_samples, num_states), dtype=bool)
    for sample, target in enumerate(targets):
        rows = probabilities[sample].astype(np.float64)
        emissions[sample, :, :2 * len(target) + 1:2] = rows[:, [_BLANK]] + _FLOOR
        for place, classes in enumerate(target):
            emissions[sample, :, 2 * place + 1] = sum(rows[:, index] for index in classes) + _FLOOR
            skips[sample, 2 * place + 1] = place > 0 and list(classes) != list(target[place - 1])
    forward = np.zeros((num_samples, num_states))
    forward[:, 0] = 1.0
    exponents = np.zeros(num_samples, dtype=np.int64)
    for frame in range(num_frames):
        reach = forward.copy()
        reach[:, 1:] += forward[:, :-1]
        if frame:
            reach[:, 2:] += np.where(skips[:, 2:], forward[:, :-2], 0.0)
        forward = reach * emissions[:, frame]
        shift = np.frexp(forward.max(axis=1, initial=0.0))[1]
        forward, exponents = np.ldexp(forward, -shift[:, None]), exponents + shift
    rows = np.arange(num_samples)
    total = forward[rows, 2 * lengths] + forward[rows, 2 * lengths - 1]
    return np.array([math.exp((math.log(value) + int(exponent) * math.log(2)) / int(length)) if value > 0 else 0.0
                     for value, exponent, length in zip(total, exponents, lengths, strict=True)], dtype=np.float64)


def build(config: Config) -> Reader:
    """Load the engine.

    Raises:
        RewardError: the engine's model is not installed.
    """
    return Reader(config)
