"""The rewards that read text or weigh files, against hand-worked and brute-force values."""

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tasks.contracts.errors import RewardError
from tasks.contracts.media import Images
from tasks.policies._pretrain_tiny_text import training_set
from tasks.rewards import jpeg_compressibility, ocr, tesseract
from tasks.rewards._text import edit_distance, normalise, reading_parts, target_text, targets_of


@pytest.fixture(scope="module")
def clean():
    images, captions = training_set(48, seed=11)
    return Images(pixels=images), captions


@pytest.fixture(scope="module")
def reader():
    return ocr.build(ocr.Config(dense=0.25))


@pytest.mark.parametrize(("prompt", "target"), [
    ('a sign "HELLO"', "HELLO"),
    ('"HELLO" on a wall', "HELLO"),
    ('first "ONE" then "TWO"', "ONE"),
    ("a sign “HELLO” here", "HELLO"),
    ("HELLO world", "HELLO world"),
    ('a 5" pipe', 'a 5" pipe'),
    ("it's 'HELLO'", "it's 'HELLO'"),
])
def test_target_is_the_quoted_text_or_the_whole_prompt(prompt, target):
    assert target_text(prompt) == target


def test_white_space_and_case_do_not_count():
    assert normalise(" He\tLL o\n") == "hello"
    parts = reading_parts(["h e l l o"], targets_of(['a sign "HELLO"']))
    assert {name: values.tolist() for name, values in parts.items()} == {"one_minus_ned": [1.0], "exact_match": [1.0]}


@pytest.mark.parametrize(("reading", "target", "expected"), [
    ("7k", "7k", 1.0), ("7x", "7k", 0.5), ("", "7k", 0.0), ("k7", "7k", 0.0), ("7k7", "7k", 0.5),
    ("something long", "7k", 0.0), ("helo", "hello", 0.8),
])
def test_one_minus_ned_of_hand_worked_readings(reading, target, expected):
    parts = reading_parts([reading], [target])
    assert parts["one_minus_ned"][0] == pytest.approx(expected, abs=1e-15)
    assert parts["exact_match"][0] == float(reading == target)


@pytest.mark.parametrize(("one", "other", "distance"), [
    ("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2),
])
def test_edit_distance_of_textbook_pairs(one, other, distance):
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@pytest.mark.parametrize("prompt", ["", "  ", 'a sign that says ""', 'a sign that says " "'])
def test_a_prompt_without_text_is_refused(prompt):
    with pytest.raises(RewardError, match="sample 1"):
        targets_of(['"A"', prompt])


def test_ocr_reads_every_clean_render(reader, clean):
    media, captions = clean
    parts = reader(media, captions, [{}] * len(captions))
    assert parts["exact_match"].tolist() == [1.0] * len(captions)
    assert parts["likelihood"].mean() > 0.9


def test_ocr_score_mixes_closeness_and_likelihood_by_the_dense_share(reader, clean):
    media, captions = clean
    wrong = captions[1:] + captions[:1]
    parts = reader(media, wrong, [{}] * len(wrong))
    assert np.allclose(parts["score"], 0.75 * parts["one_minus_ned"] + 0.25 * parts["likelihood"], atol=1e-15)
    plain = ocr.build(ocr.Config())(media, wrong, [{}] * len(wrong))
    assert np.array_equal(plain["score"], parts["one_minus_ned"])
    assert plain["exact_match"].mean() < 0.1


def test_ocr_reads_larger_images_of_the_same_text(reader, clean):
    media, captions = clean
    large = torch.nn.functional.interpolate(media.pixels[:6].float(), scale_factor=10, mode="bicubic", antialias=True)
    parts = reader(Images(pixels=large.clamp(0, 255).to(torch.uint8)), captions[:6], [{}] * 6)
    assert parts["exact_match"].tolist() == [1.0] * 6


def test_ocr_refuses_a_character_its_engine_does_not_know(reader, clean):
    with pytest.raises(RewardError, match=r"sample 1.*\u16a0"):
        reader(Images(pixels=clean[0].pixels[:2]), ['"A"', '"\u16a0"'], [{}, {}])


def test_ocr_refuses_a_share_outside_zero_to_one():
    with pytest.raises(ValidationError, match="dense"):
        ocr.Config(dense=1.5)


def test_ocr_names_the_wheel_when_the_model_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match="pip install rapidocr-onnxruntime"):
        ocr.build(ocr.Config())


def brute_force_likelihood(frames, target):
    """Sum over every alignment that collapses to the target, over class sets; floor as in the reward."""
    labels = [(0,), *sorted(set(target))]
    total = 0.0
    for path in itertools.product(labels, repeat=len(frames)):
        collapsed = [label for label, _ in itertools.groupby(path) if label != (0,)]
        if collapsed == list(target):
            total += math.prod(sum(frames[at][index] for index in label) + 1e-12 for at, label in enumerate(path))
    return total ** (1 / len(target))


def test_ctc_likelihood_equals_the_sum_over_all_alignments():
    draw = np.random.default_rng(0)
    targets = [[(1,)], [(1,), (2, 3)], [(2, 3), (2, 3)], [(1,), (2, 3), (1,)], [(1,), (1,), (2, 3)], [(4,), (1,), (4,)]]
    probabilities = draw.dirichlet(np.ones(5), size=(len(targets), 5))
    together = ocr.ctc_likelihood(probabilities, targets)
    for row, target in enumerate(targets):
        assert together[row] == pytest.approx(brute_force_likelihood(probabilities[row], target), rel=1e-12)
        assert together[row] == ocr.ctc_likelihood(probabilities[row:row + 1], [target])[0]


def test_ctc_likelihood_neither_underflows_nor_invents_alignments():
    num_frames, length = 2000, 150
    frames = np.full((2, num_frames, 3), 1 / 3)
    changing, impossible = [(1,), (2,)] * (length // 2), [(1,)] * 1001  # 1001 equal characters need 2001 frames
    likelihoods = ocr.ctc_likelihood(frames, [changing, impossible])
    # C(T + L, 2 L) alignments of L characters, each unlike the one before, in T frames; all equally likely, 3^-T.
    log_prob = math.log(math.comb(num_frames + length, 2 * length)) + num_frames * math.log(1 / 3 + 1e-12)
    assert likelihoods[0] == pytest.approx(math.exp(log_prob / length), rel=1e-11)
    assert likelihoods[1] == 0.0


def test_tesseract_reads_nine_in_ten_clean_renders(clean):
    media, captions = clean
    parts = tesseract.build(tesseract.Config())(media, captions, [{}] * len(captions))
    assert parts["exact_match"].mean() > 0.9
    assert np.array_equal(parts["score"], parts["one_minus_ned"])


def test_tesseract_with_any_character_allowed_still_reads(clean):
    media, captions = clean
    parts = tesseract.build(tesseract.Config(characters=""))(media, captions, [{}] * len(captions))
    assert parts["exact_match"].mean() > 0.8


def test_tesseract_refuses_a_target_it_may_not_read(clean):
    with pytest.raises(RewardError, match=r"sample 0.*'!'"):
        tesseract.build(tesseract.Config())(Images(pixels=clean[0].pixels[:1]), ['"A!"'], [{}])


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_tesseract_says_what_to_install_when_its_model_is_missing_or_broken(tmp_path, content):
    if content is not None:
        (tmp_path / "eng.traineddata").write_bytes(content)
    with pytest.raises(RewardError, match=r"eng\.traineddata.*pip install") as caught:
        tesseract.build(tesseract.Config(tessdata=str(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_tesseract_uses_one_engine_a_thread(clean):
    reader = tesseract.build(tesseract.Config())
    engines = [reader._engine(), reader._engine()]
    thread = threading.Thread(target=lambda: engines.append(reader._engine()))
    thread.start()
    thread.join()
    assert engines[0] is engines[1] is not engines[2]


def test_jpeg_prefers_flat_images_to_busy_ones():
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 3, 32, 32)))
    busyness = torch.tensor([0.0, 5.0, 20.0, 60.0]).reshape(4, 1, 1, 1)
    pixels = (128 + busyness * noise).clamp(0, 255).to(torch.uint8)
    parts = jpeg_compressibility.build(jpeg_compressibility.Config())(Images(pixels=pixels), ["x"] * 4, [{}] * 4)
    assert np.all(np.diff(parts["score"]) < 0)
    assert np.array_equal(parts["score"], -parts["bytes"] / 1000)


def test_number_of_prompts_must_be_the_number_of_images(clean):
    with pytest.raises(RewardError, match="48 images and 2 prompts"):
        jpeg_compressibility.build(jpeg_compressibility.Config())(clean[0], ["x", "y"], [{}, {}])
