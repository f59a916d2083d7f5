"""The mathematics of the SDEs against vectors worked out in numpy float64 by independent code, and their invariants."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import sde
from tasks.contracts.config import SamplingConfig

X = [0.5, -1.25, 2.0, 0.125]
V = [-0.75, 0.5, 1.5, -2.0]
Z = [1.0, -0.5, 0.25, -1.5]
SIGMA_MAX = 27 / 28
"""sigmas[1] of the test schedule, in every flow vector."""

SCHEDULE = [1, 0.964285714286, 0.923076923077, 0.875, 0.818181818182, 0.75, 0.666666666667, 0.5625, 0.428571428571,
            0.25, 0]
SD3_10 = [1, 0.960129310345, 0.913348946136, 0.857692307692, 0.790368271955, 0.707278481013, 0.602150537634,
          0.464876033058, 0.278048780488, 0.00892857142857, 0]
DANCE_16 = [1, 0.978260869565, 0.954545454545, 0.928571428571, 0.9, 0.868421052632, 0.833333333333, 0.794117647059,
            0.75, 0.7, 0.642857142857, 0.576923076923, 0.5, 0.409090909091, 0.3, 0.166666666667, 0]
FLUX_6 = [1, 0.903735569122, 0.789704838816, 0.652489462193, 0.484218448677, 0.273003328354, 0]

# The published tables round sigma to 12 digits; the exact fraction is what they were computed from.
S1, S2, S8 = 27 / 28, 12 / 13, 3 / 7

# id, kind, sigma, sigma_next, noise level, std, mean, next latents, published log-prob,
# Gaussian log-prob (None = no density)
VECTORS = [
    ("F1", "flow", 1.0, S1, 0.7, 0.7, [0.404285714286, -0.961607142857, 1.45642857143, 0.165803571429],
     [1.10428571429, -1.31160714286, 1.63142857143, -0.884196428571], -1.00757608927, -1.00757608927),
    ("F2", "flow", S1, S2, 0.7, 0.738371388728, [0.397132554945, -0.922287087912, 1.35765796703, 0.192273351648],
     [1.13550394367, -1.29147278228, 1.54225081421, -0.915283731444], -1.060942689, -1.060942689),
    ("F3", "flow", 0.5, 0.4, 0.7, 0.221359436212, [0.568875, -1.251, 1.71525, 0.367875],
     [0.790234436212, -1.36167971811, 1.77058985905, 0.0358358456823], 0.143716457231, 0.143716457231),
    ("F4", "flow", 0.75, 0.5625, 1.2, 0.9, [0.471875, -0.73625, 0.43625, 0.7025],
     [1.371875, -1.18625, 0.66125, -0.6475], -1.25889051755, -1.25889051755),
    ("F5", "flow", S8, 0.25, 0.7, 0.256173769149, [0.628459821429, -1.26545758929, 1.51339285714, 0.560072544643],
     [0.884633590578, -1.39354447386, 1.57743629943, 0.175811890919], -0.0023517541695, -0.0023517541695),
    ("F6", "flow", 0.25, 0.0, 0.7, 0.202072594216, [0.692604166667, -1.30354166667, 1.36979166667, 0.737291666667],
     [0.894676760883, -1.40457796377, 1.42030981522, 0.434182775342], 0.234877235628, 0.234877235628),
    ("F7", "flow", 0.02, 0.01, 0.7, 0.01, [0.5080875, -1.2531, 1.976325, 0.1495875],
     [0.5180875, -1.2581, 1.978825, 0.1345875], 3.24091915278, 3.24091915278),
    ("F8", "flow", 0.5, 0.4, 0.001, 0.000316227766017, [0.5749999875, -1.2999999, 1.849999725, 0.3250000875],
     [0.575316215266, -1.30015801388, 1.85007878194, 0.324525745851], 6.69479679227, 6.69479679227),
    ("C1", "cps", 1.0, S1, 0.8, 0.917090212142, [0.193633193716, -0.434975841434, 0.613818489152, 0.113140441286],
     [1.11072340586, -0.893520947505, 0.843091042187, -1.26249487693], -0.749064125949, -1.27770159911),
    ("C2", "cps", S1, S2, 0.8, 0.877898322734, [0.229076104686, -0.484706141954, 0.628356390436, 0.173248093128],
     [1.10697442742, -0.923655303321, 0.84783097112, -1.14359939097], -0.686409554818, -1.23402653561),
    ("C3", "cps", 0.5, 0.4, 0.7, 0.356402609675, [0.547699524987, -1.0815961999, 1.24938954971, 0.516103325091],
     [0.904102134662, -1.25979750473, 1.33849020213, -0.0185005894219], -0.113129699226, -0.332556772114),
    ("C4", "cps", 0.75, 0.5625, 1.0, 0.5625, [0.46484375, -0.7109375, 0.3828125, 0.7109375],
     [1.02734375, -0.9921875, 0.5234375, -0.1328125], -0.281799316406, -0.788886888301),
    ("C5", "cps", 0.5, 0.4, 0.0, 0.0, [0.575, -1.3, 1.85, 0.325], [0.575, -1.3, 1.85, 0.325], 0.0, None),
    ("C6", "cps", 0.25, 0.0, 0.8, 0.0, [0.6875, -1.375, 1.625, 0.625], [0.6875, -1.375, 1.625, 0.625], 0.0, None),
    ("C7", "cps", 0.5, 0.4, 0.5, 0.282842712475, [0.560355339059, -1.18284271247, 1.52781745931, 0.427512626585],
     [0.843198051534, -1.32426406871, 1.59852813742, 0.00324855787278], -0.07125, -0.101386711051),
    ("D1", "dance", 1.0, S1, 0.3, 0.0566946709514, [0.525982142857, -1.26584821429, 1.94321428571, 0.196227678571],
     [0.582676813809, -1.29419554976, 1.95738795345, 0.111185672144], 1.50582402621, 1.50582402621),
    ("D2", "dance", S1, S2, 0.3, 0.0608998457206, [0.529996565934, -1.26823489011, 1.93423763736, 0.20731456044],
     [0.590896411655, -1.29868481297, 1.94946259879, 0.115964791859], 1.43427360439, 1.43427360439),
    ("D3", "dance", 0.5, 0.4, 0.3, 0.0948683298051, [0.573875, -1.291, 1.82525, 0.332875],
     [0.668743329805, -1.3384341649, 1.84896708245, 0.190572505292], 0.991014317618, 0.991014317618),
    ("D4", "dance", 0.75, 0.5625, 0.7, 0.303108891325, [0.621484375, -1.27484375, 1.57328125, 0.52296875],
     [0.924593266325, -1.42639819566, 1.64905847283, 0.0683054130132], -0.17058787248, -0.17058787248),
    ("D5", "dance", S8, 0.25, 0.3, 0.126773138209, [0.632589285714, -1.32120535714, 1.67857142857, 0.501227678571],
     [0.759362423924, -1.38459192625, 1.71026471312, 0.311067971258], 0.701105069992, 0.701105069992),
    ("D6", "dance", 0.25, 0.0, 0.3, 0.15, [0.6903125, -1.335625, 1.484375, 0.686875],
     [0.8403125, -1.410625, 1.521875, 0.461875], 0.532868951681, 0.532868951681),
    ("D7", "dance", 0.02, 0.01, 0.3, 0.03, [0.5127875, -1.2379, 1.906925, 0.1862875],
     [0.5427875, -1.2529, 1.914425, 0.1412875], 2.14230686412, 2.14230686412),
]

# id, sigma, sigma_next, mean((mu_new - mu_old)^2), exact KL, old log-prob, new log-prob, plain ratio, RatioNorm ratio
KL_VECTORS = [
    ("K1", 0.5, 0.4, 2.0344078125e-06, 2.07592633929e-05, 0.143716457231, 0.140707769098, 0.996995833433,
     0.999338812431),
    ("K2", 1.0, S1, 1.67410714286e-07, 1.70827259475e-07, -1.00757608927, -1.00784730601, 0.99972882003,
     0.999810285855),
    ("K3", S8, 0.25, 6.48726981027e-06, 4.9426817602e-05, -0.0023517541695, -0.00701165532727, 0.995350939337,
     0.998819614614),
]
KL_SHIFT = [0.01, -0.02, 0.005, 0.0]
KINDS = ("flow", "dance", "cps")
NOISE_LEVEL = {"flow": 0.7, "dance": 0.3, "cps": 0.8}


def rows(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def step(kind: str, sigma: float, sigma_next: float, noise_level: float, dtype: torch.dtype = torch.float64,
         velocity: torch.Tensor | None = None) -> sde.Transition:
    return sde.transition(kind, rows(X, dtype), rows(V, dtype) if velocity is None else velocity, sigma, sigma_next,
                          noise_level=noise_level, sigma_max=SIGMA_MAX)


def close(found: torch.Tensor | float, expected: list[float] | float, bound: float) -> None:
    found, expected = torch.as_tensor(found).double(), torch.tensor(expected, dtype=torch.float64)
    scale = max(expected.abs().max().item(), 1e-300)
    error = (found.reshape(expected.shape) - expected).abs().max().item()
    assert error <= bound * scale, f"off by {error / scale:.2e} of scale {scale:.3g}, allowed {bound:.0e}"


def batch(num_rows: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector[0])
def test_float64_transition_matches_the_vectors_to_1e_11(vector: tuple) -> None:
    _, kind, sigma, sigma_next, noise_level, std, mean, next_latents, log_prob, gaussian = vector
    found = step(kind, sigma, sigma_next, noise_level)
    sample = found.sample(rows(Z))
    close(found.std, [std], 1e-11)
    close(found.mean, [mean], 1e-11)
    close(sample, [next_latents], 1e-11)
    close(found.log_prob(sample), [log_prob], 1e-11)
    if gaussian is None:
        with pytest.raises(ValueError, match="std 0"):
            found.gaussian_log_prob(sample)
    else:
        close(found.gaussian_log_prob(sample), [gaussian], 1e-11)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector[0])
def test_float32_transition_matches_the_vectors_to_1e_6_of_scale(vector: tuple) -> None:
    _, kind, sigma, sigma_next, noise_level, std, mean, next_latents, log_prob, _ = vector
    found = step(kind, sigma, sigma_next, noise_level, torch.float32)
    sample = found.sample(rows(Z, torch.float32))
    assert found.mean.dtype == found.std.dtype == sample.dtype == torch.float32
    close(found.std, [std], 1e-6)
    close(found.mean, [mean], 1e-6)
    close(sample, [next_latents], 1e-6)
    # x_next is rounded to fp32 before it is scored: one ulp of max |x| is worth |z| / std nats.
    rounding = 2**-22 * max(map(abs, mean)) * (1.5 / std if std and kind != "cps" else 1.5)
    error = abs(found.log_prob(sample).item() - log_prob)
    assert error <= 1e-6 * max(1.0, abs(log_prob)) + rounding


@pytest.mark.parametrize(("sigma", "sigma_next", "log_prob"), [
    (0.5, 0.4, 0.412984712971), (1.0, S1, -0.610780233129), (S8, 0.25, 0.21819685965)], ids=["G1", "G2", "G3"])
def test_log_prob_of_given_latents_matches_the_vectors(sigma: float, sigma_next: float, log_prob: float) -> None:
    close(step("flow", sigma, sigma_next, 0.7).log_prob(rows([0.4, -1.1, 1.7, 0.5])), [log_prob], 1e-11)


@pytest.mark.parametrize(("schedule", "arguments", "noise_level", "stds"), [
    (SCHEDULE, ("linear", 10, 3.0), 0.7, [0.7, 0.738371388728, 0.531688167719, 0.441459356721, 0.387738196585, 0.35,
                                         0.319504825211, 0.290473750966, 0.256173769149, 0.202072594216]),
    (SD3_10, ("sd3", 10, 3.0), 0.7, [0.7, 0.742964100293, 0.536152045966, 0.445897133485, 0.391794301375,
                                    0.352797112188, 0.319070118769, 0.2820067676, 0.225360483583, 0.00627809002917]),
    (FLUX_6, ("flux", 6, 0.63), 0.9, [0.9, 0.931196266967, 0.646043349406, 0.505882814968, 0.400767758795,
                                     0.288166996503]),
    (DANCE_16, ("dance", 16, 3.0), 0.0, [0.0] * 16)], ids=["linear", "sd3", "flux", "dance"])
def test_schedules_and_their_flow_stds_match_the_vectors(schedule: list[float], arguments: tuple, noise_level: float,
                                                         stds: list[float]) -> None:
    sigmas = sde.sigma_schedule(*arguments)
    assert sigmas.dtype == torch.float64
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    torch.testing.assert_close(sigmas, torch.tensor(schedule, dtype=torch.float64), rtol=1e-11, atol=0)
    zeros = torch.zeros(len(stds), 3, dtype=torch.float64)
    found = sde.transition("flow", zeros, zeros, sigmas[:-1], sigmas[1:], noise_level=noise_level, sigma_max=sigmas[1])
    torch.testing.assert_close(found.std, torch.tensor(stds, dtype=torch.float64), rtol=1e-11, atol=0)


@pytest.mark.parametrize(("num_tokens", "mu", "sigmas"), [
    (256, 0.5, [0.936862673821, 0.622459331202, 0.15482809896]),
    (1024, 0.63, [0.944129381377, 0.652489462193, 0.172612410196]),
    (4096, 1.15, [0.966013833402, 0.759510916949, 0.259758414194])])
def test_flux_shift_matches_the_vectors(num_tokens: int, mu: float, sigmas: list[float]) -> None:
    assert sde.flux_mu(num_tokens) == pytest.approx(mu, rel=1e-12)
    schedule = sde.sigma_schedule("flux", 10, sde.flux_mu(num_tokens))
    close(schedule[[1, 5, 9]], sigmas, 1e-11)  # u = 0.9, 0.5, 0.1


@pytest.mark.parametrize("vector", KL_VECTORS, ids=lambda vector: vector[0])
def test_kl_matches_the_vectors(vector: tuple) -> None:
    _, sigma, sigma_next, distance, exact, old_log_prob, new_log_prob, ratio, ratio_norm = vector
    old = step("flow", sigma, sigma_next, 0.7)
    new = step("flow", sigma, sigma_next, 0.7, velocity=rows(V) + rows(KL_SHIFT))
    sample = old.sample(rows(Z))
    # The exact KL is of differences of nearly equal numbers: 1e-4 apart at size 1 leaves 1e-12 of relative accuracy.
    close(sde.gaussian_kl(new.mean, old.mean, old.std), [exact], 1e-10)
    close((new.mean - old.mean).square().mean(1), [distance], 1e-10)
    close(sde.velocity_kl(rows(V) + rows(KL_SHIFT), rows(V)), [0.00013125], 1e-11)
    close(old.log_prob(sample), [old_log_prob], 1e-11)
    close(new.log_prob(sample), [new_log_prob], 1e-11)
    log_ratio = new.log_prob(sample) - old.log_prob(sample)
    close(log_ratio.exp(), [ratio], 1e-11)
    normed = (log_ratio + sde.gaussian_kl(new.mean, old.mean, old.std)) * old.std
    close(normed.exp(), [ratio_norm], 1e-11)
    # Identity: its logarithm is the mean of (mu_new - mu_old) z.
    close(normed, ((new.mean - old.mean) * rows(Z)).mean(1).tolist(), 1e-9)


@pytest.mark.parametrize(("sigma", "sigma_next", "as_shipped"), [
    (0.5, 0.4, 2.07592633929e-06), (1.0, S1, 6.10097355269e-09), (S8, 0.25, 8.82621742894e-06)])
def test_exact_kl_is_the_shipped_one_without_dt_over_minus_dt(sigma: float, sigma_next: float,
                                                              as_shipped: float) -> None:
    old = step("flow", sigma, sigma_next, 0.7)
    new = step("flow", sigma, sigma_next, 0.7, velocity=rows(V) + rows(KL_SHIFT))
    exact = sde.gaussian_kl(new.mean, old.mean, old.std)
    close(exact, [as_shipped / (sigma - sigma_next)], 1e-9)


# --- invariants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_level_0_is_the_euler_step_bit_for_bit_over_a_whole_trajectory(kind: str, dtype: torch.dtype) -> None:
    sigmas = sde.sigma_schedule("linear", 50, 3.0)
    start = batch(3, (2, 4), dtype=dtype)
    latents, plain = start, start
    for here, after in itertools.pairwise(sigmas):
        moved = sde.transition(kind, latents, torch.sin(3 * latents), here, after, noise_level=0, sigma_max=sigmas[1])
        latents = moved.sample(batch(3, (2, 4), seed=9, dtype=dtype))
        plain = sde.ode_step(plain, torch.sin(3 * plain), here, after)
        assert torch.equal(latents, plain)
    reference = start.double()
    for here, after in itertools.pairwise(sigmas.tolist()):
        reference = reference + (after - here) * torch.sin(3 * reference)
    torch.testing.assert_close(plain.double(), reference, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_noise_level_may_be_0_in_some_rows_and_the_log_prob_then_raises_except_for_cps() -> None:
    latents, velocity = batch(3, (4,)), batch(3, (4,), 1)
    levels = torch.tensor([0.7, 0.0, 0.3])
    for kind in KINDS:
        found = sde.transition(kind, latents, velocity, 0.5, 0.4, noise_level=levels, sigma_max=0.9)
        assert (found.std == 0).tolist() == [False, True, False]
        assert torch.equal(found.mean[1:2], sde.ode_step(latents[1:2], velocity[1:2], 0.5, 0.4))
        with pytest.raises(ValueError, match="1 of 3 transitions"):
            found.gaussian_log_prob(latents)
        if kind == "cps":
            scores = found.log_prob(latents)
            assert scores[1] == 0
            assert (scores[[0, 2]] < 0).all()
        else:
            with pytest.raises(ValueError, match="no log-prob"):
                found.log_prob(latents)


def test_cps_step_without_noise_has_score_0_and_zero_gradient_whatever_the_latents() -> None:
    velocity = batch(2, (4,), 1).requires_grad_()
    found = sde.transition("cps", batch(2, (4,)), velocity, 0.25, 0.0, noise_level=0.8, sigma_max=0.9)
    score = found.log_prob(batch(2, (4,), 5))
    assert score.tolist() == [0, 0]
    assert torch.equal(torch.autograd.grad(score.sum(), velocity)[0], torch.zeros(2, 4))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_log_prob_of_a_sample_depends_on_the_noise_and_the_std_only(data: st.DataObject, kind: str) -> None:
    sigma = data.draw(st.floats(0.05, 1.0))
    sigma_next = data.draw(st.floats(0.01, 0.95)) * sigma
    noise_level = data.draw(st.floats(0.05, 1.0))
    seed = data.draw(st.integers(0, 10**6))
    latents, velocity, noise = (batch(1, (8,), seed + part, torch.float64) for part in range(3))
    found = sde.transition(kind, latents, velocity, sigma, sigma_next, noise_level=noise_level, sigma_max=0.999)
    closed_form = -0.5 * noise.square().mean() - found.std.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(found.gaussian_log_prob(found.sample(noise)), closed_form, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_std_is_the_empirical_one_of_1e5_draws(kind: str) -> None:
    num_draws = 100_000
    found = sde.transition(kind, torch.full((num_draws, 1), 0.3), torch.full((num_draws, 1), -0.8), 0.7, 0.6,
                           noise_level=NOISE_LEVEL[kind], sigma_max=0.95)
    drawn = found.sample(sde.noise((num_draws, 1), seed=3))
    # The standard error of a standard deviation is std / sqrt(2 n) = 0.22 %; five of them.
    assert drawn.std().item() == pytest.approx(found.std[0].item(), rel=0.0112)
    assert drawn.mean().item() == pytest.approx(found.mean[0].item(), abs=5 * found.std[0].item() / num_draws**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradient_of_the_log_prob_is_zero(kind: str) -> None:
    num_draws = 50_000
    velocity = torch.full((num_draws, 2), 0.4, dtype=torch.float64, requires_grad=True)
    found = sde.transition(kind, torch.full((num_draws, 2), 0.3, dtype=torch.float64), velocity, 0.7, 0.6,
                           noise_level=NOISE_LEVEL[kind], sigma_max=0.95)
    noise = torch.randn(num_draws, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    score = torch.autograd.grad(found.log_prob(found.sample(noise)).sum(), velocity)[0]
    assert score.std() > 1e-3
    assert (score.mean(0).abs() < 5 * score.std(0) / num_draws**0.5).all()


def test_log_prob_gradient_flows_through_the_mean_only() -> None:
    for kind in KINDS:
        velocity = rows(V).requires_grad_()
        found = step(kind, 0.5, 0.4, NOISE_LEVEL[kind], velocity=velocity)
        sample = found.sample(rows(Z))
        assert sample.requires_grad
        score = found.gaussian_log_prob(sample)
        assert not found.std.requires_grad
        by_mean = torch.autograd.grad(score.sum(), found.mean, retain_graph=True)[0]
        # With the sample held fixed, d log p / d mean = z / std / D; through the sample it would vanish.
        torch.testing.assert_close(by_mean, rows(Z) / found.std / 4, rtol=1e-12, atol=0)
        chain = torch.autograd.grad(found.mean, velocity, by_mean, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(score.sum(), velocity)[0], chain)


def test_raising_the_log_prob_moves_the_mean_to_the_sample() -> None:
    weight = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    for kind in KINDS:
        sample = step(kind, 0.5, 0.4, NOISE_LEVEL[kind]).sample(rows(Z))

        def score(shift: torch.Tensor, kind: str = kind, sample: torch.Tensor = sample) -> torch.Tensor:
            return step(kind, 0.5, 0.4, NOISE_LEVEL[kind], velocity=rows(V) + shift).log_prob(sample)

        gradient = torch.autograd.grad(score(weight).sum(), weight)[0]
        assert score(weight + 1e-3 * gradient) > score(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5,), (4, 3, 7), (2, 3, 5, 4)], ids=str)
def test_a_rows_bits_do_not_depend_on_order_number_of_rows_or_form_of_the_arguments(kind: str, shape: tuple) -> None:
    sigmas = sde.sigma_schedule("sd3", 10, 3.0)
    num_rows = 9
    latents, velocity, noise = (batch(num_rows, shape, seed) for seed in range(3))
    level = torch.linspace(0.2, 0.9, num_rows, dtype=torch.float64)
    arguments = latents, velocity, noise, sigmas[:9], sigmas[1:10], level

    def run(order: torch.Tensor) -> list[torch.Tensor]:
        x, v, z, here, after, a = (value[order] for value in arguments)
        v = v.clone().requires_grad_()
        found = sde.transition(kind, x, v, here, after, noise_level=a, sigma_max=sigmas[1])
        sample = found.sample(z).detach()
        score = found.log_prob(sample)
        gradient = torch.autograd.grad(score.sum(), v)[0]
        return [found.mean.detach(), found.std, sample, score.detach(), gradient,
                sde.gaussian_kl(found.mean.detach(), x, found.std), sde.velocity_kl(v.detach(), z)]

    names = ["mean", "std", "sample", "log_prob", "gradient", "gaussian_kl", "velocity_kl"]
    whole = run(torch.arange(num_rows))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(4))
    for name, mine, other in zip(names, whole, run(order), strict=True):
        assert torch.equal(mine[order], other), name
    for row in range(num_rows):
        for name, mine, other in zip(names, whole, run(torch.tensor([row])), strict=True):
            assert torch.equal(mine[row : row + 1], other), f"{name} of row {row} alone"
    as_floats = sde.transition(kind, latents[3:4], velocity[3:4], sigmas[3].item(), sigmas[4].item(),
                               noise_level=level[3].item(), sigma_max=sigmas[1].item())
    assert torch.equal(as_floats.mean, whole[0][3:4])


def test_log_prob_is_a_mean_over_elements_not_a_sum() -> None:
    narrow = sde.transition("flow", torch.ones(1, 4), torch.ones(1, 4), 0.5, 0.4, noise_level=0.7, sigma_max=0.9)
    wide = sde.transition("flow", torch.ones(1, 4, 64), torch.ones(1, 4, 64), 0.5, 0.4, noise_level=0.7, sigma_max=0.9)
    assert narrow.log_prob(torch.zeros(1, 4)).item() == pytest.approx(wide.log_prob(torch.zeros(1, 4, 64)).item())


def test_row_mean_has_one_order_of_summation_whatever_the_layout_and_number_of_rows() -> None:
    values = batch(8, (3, 1365))
    mean = sde._row_mean(values)
    columns_first = values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not torch.equal(columns_first.mean((1, 2)), values.mean((1, 2)))  # the library's order does depend on it
    assert torch.equal(sde._row_mean(columns_first), mean)
    for row in range(8):
        assert torch.equal(sde._row_mean(columns_first[row : row + 1]), mean[row : row + 1])


def test_row_mean_of_many_elements_is_as_exact_as_fp32_allows() -> None:
    values = batch(2, (16, 65, 63)).square()
    torch.testing.assert_close(sde._row_mean(values).double(), values.double().flatten(1).mean(1), rtol=3e-7, atol=0)


@pytest.mark.parametrize("trip", [
    lambda sigma: sigma.float(), lambda sigma: (sigma.float() * 1000) / 1000, lambda sigma: sigma.bfloat16(),
    lambda sigma: sigma - 6e-8, lambda sigma: torch.nextafter(sigma, torch.zeros_like(sigma)),
    lambda sigma: torch.nextafter(sigma.float(), torch.zeros(1))], ids=range(6))
def test_first_step_std_is_the_noise_level_after_dtype_round_trips(trip) -> None:
    for schedule in (sde.sigma_schedule("sd3", 10, 3.0), sde.sigma_schedule("flux", 6, 0.63)):
        sigma = trip(schedule[:1])
        found = sde.transition("flow", rows(X), rows(V), sigma, schedule[1:2], noise_level=0.7, sigma_max=schedule[1])
        # On the first step of any schedule s = a sqrt(1 / (1 - sigma_1)) sqrt(1 - sigma_1) = a; a clamp would give 1.3.
        assert found.std.item() == pytest.approx(0.7, rel=1e-5)


def test_half_precision_is_raised_to_fp32_before_anything_is_computed() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        latents, velocity, after = (batch(2, (6,), seed, dtype) for seed in range(3))
        half = sde.transition("flow", latents, velocity, 0.5, 0.4, noise_level=0.7, sigma_max=0.9)
        full = sde.transition("flow", latents.float(), velocity.float(), 0.5, 0.4, noise_level=0.7, sigma_max=0.9)
        assert half.mean.dtype == torch.float32
        assert torch.equal(half.mean, full.mean)
        assert torch.equal(half.log_prob(after), full.log_prob(after.float()))
        assert sde.ode_step(latents, velocity, 0.5, 0.4).dtype == torch.float32
    large = torch.full((1, 4), 3e4, dtype=torch.float16)
    assert sde.velocity_kl(large, -large).isfinite().all()


def test_cps_log_ratio_is_2_variances_times_the_gaussian_one() -> None:
    old, new = step("cps", 0.5, 0.4, 0.7), step("cps", 0.5, 0.4, 0.7, velocity=rows(V) + rows(KL_SHIFT))
    sample = old.sample(rows(Z))
    published = new.log_prob(sample) - old.log_prob(sample)
    gaussian = new.gaussian_log_prob(sample) - old.gaussian_log_prob(sample)
    torch.testing.assert_close(published, 2 * old.std**2 * gaussian, rtol=1e-10, atol=0)


def test_time_reversed_models_fit_with_sigma_1_minus_t_and_the_velocity_negated() -> None:
    mean, spread = 0.3, 0.5  # data ~ N(mean, spread^2): both conventions then have an exact field.

    def reversed_field(x: torch.Tensor, t: float) -> torch.Tensor:
        """d x / d t of x_t = t x0 + (1 - t) eps, t from 0 (noise) to 1 (data), in closed form."""
        variance = t * t * spread**2 + (1 - t) ** 2
        return mean + (t * spread**2 - (1 - t)) / variance * (x - t * mean)

    sigmas = sde.sigma_schedule("linear", 40, 1.0).tolist()
    start = batch(4, (3,), dtype=torch.float64)
    forward, ours = start, start
    for here, after in itertools.pairwise(sigmas):
        forward = forward + ((1 - after) - (1 - here)) * reversed_field(forward, 1 - here)
        ours = sde.ode_step(ours, -reversed_field(ours, 1 - here), here, after)
    torch.testing.assert_close(ours, forward, rtol=0, atol=1e-12)
    # and it really goes to the data: noise z ends near mean + spread z
    torch.testing.assert_close(ours, mean + spread * start, rtol=0, atol=0.1)


@pytest.mark.parametrize(("kind", "noise_level", "variances"), [
    ("flow", 0.0, [0.174507, 0.208370, 0.212083]), ("flow", 0.7, [0.202950, 0.210987, 0.212343]),
    ("dance", 0.3, [0.180187, 0.208994, 0.212146]), ("cps", 0.8, [0.115243, 0.137176, 0.140831])],
    ids=["ode", "flow", "dance", "cps"])
def test_variance_of_gaussian_data_at_sigma_0_1_matches_the_vectors(kind: str, noise_level: float,
                                                                    variances: list[float]) -> None:
    """Exact target 0.2125: ODE, flow and dance converge to it; cps keeps the noise coefficient, not the marginal."""
    for num_steps, expected in zip((10, 100, 1000), variances, strict=True):
        sigmas = torch.linspace(0.9, 0.1, num_steps + 1, dtype=torch.float64)
        here = sigmas[:-1]
        field = (here - (1 - here) * 0.25) / ((1 - here) ** 2 * 0.25 + here**2)
        ones = torch.ones(num_steps, 1, dtype=torch.float64)
        found = sde.transition(kind, ones, field[:, None], here, sigmas[1:], noise_level=noise_level, sigma_max=0.95)
        variance = 0.1**2 * 0.25 + 0.9**2  # at sigma 0.9
        for factor, std in zip(found.mean[:, 0].tolist(), found.std.tolist(), strict=True):
            variance = factor**2 * variance + std**2
        assert variance == pytest.approx(expected, abs=6e-7)


# --- schedules and training steps ------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(["linear", "sd3", "flux", "dance"]), num_steps=st.integers(1, 200),
       shift=st.floats(0.2, 12.0))
def test_every_schedule_falls_strictly_from_exactly_1_to_exactly_0(kind: str, num_steps: int, shift: float) -> None:
    sigmas = sde.sigma_schedule(kind, num_steps, shift)
    assert sigmas.shape == (num_steps + 1,)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_dance_and_linear_schedules_are_the_same_numbers() -> None:
    assert torch.equal(sde.sigma_schedule("dance", 16, 3.0), sde.sigma_schedule("linear", 16, 3.0))


@pytest.mark.parametrize("schedule", ["sd3", "dance"])
@pytest.mark.parametrize("num_steps", [5, 10, 28, 200])
def test_the_last_step_alone_is_left_out_of_training_under_every_schedule(schedule: str, num_steps: int) -> None:
    sampling = SamplingConfig(num_inference_steps=num_steps, schedule=schedule, shift=3.0)
    assert list(range(*sampling.window_range)) == list(range(num_steps - 1))
    sigmas = sde.sigma_schedule(schedule, num_steps, 3.0)
    assert all(sigmas[index + 1] > 0 for index in range(*sampling.window_range))


def test_a_fast_window_in_the_first_half_covers_the_noisiest_steps() -> None:
    sampling = SamplingConfig(num_inference_steps=8, schedule="flux", shift=0.63,
                              sde_window={"size": 2, "range": (0, 4)})
    sigmas = sde.sigma_schedule("flux", 8, 0.63)
    zeros = torch.zeros(8, 2)
    stds = sde.transition("flow", zeros, zeros, sigmas[:-1], sigmas[1:], noise_level=0.7, sigma_max=sigmas[1]).std
    low, high = sampling.window_range
    assert stds[low:high].min() > stds[high:].max()


# --- noise and seeds -------------------------------------------------------------------------------------------------


def test_noise_depends_on_its_seed_only_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = sde.noise((2, 5), 2**63 - 1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, sde.noise((2, 5), 2**63 - 1))
    assert not torch.equal(first, sde.noise((2, 5), 0))
    assert first.dtype == torch.float32
    assert first.device.type == "cpu"


def test_derived_seeds_are_63_bit_distinct_and_the_same_in_another_process() -> None:
    keys = [(run, iteration, sample, purpose) for run in range(3) for iteration in range(5) for sample in range(40)
            for purpose in ("initial", *(f"step/{index}" for index in range(6)))]
    seeds = {sde.derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert len({sde.derive_seed(1, 23, 4, "a"), sde.derive_seed(12, 3, 4, "a"), sde.derive_seed(1, 2, 34, "a")}) == 3
    code = "import json; from tasks.sde import derive_seed; print(json.dumps(derive_seed(7, 3, 11, 'step/3')))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == sde.derive_seed(7, 3, 11, "step/3")


def test_seeds_refuse_what_is_not_a_whole_number_or_has_no_purpose() -> None:
    with pytest.raises(TypeError):
        sde.derive_seed(0, 1.5, 0, "initial")
    with pytest.raises(ValueError, match="purpose"):
        sde.derive_seed(0, 1, 0, "")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": "flowsde"}, "unknown SDE kind"),
    ({"sigma": 1.1}, "sigma 1.1"), ({"sigma_next": 0.5}, "sigma_next 0.5"), ({"sigma_next": -0.1}, "sigma_next -0.1"),
    ({"sigma": math.nan}, "sigma nan"), ({"noise_level": -0.1}, "noise_level"),
    ({"noise_level": math.inf}, "noise_level"),
    ({"kind": "cps", "noise_level": 1.01}, "above 1"), ({"sigma": 1.0, "sigma_max": 1.0}, "sigma_max"),
    ({"sigma": torch.tensor([0.5, 0.5])}, r"sigma has shape \[2\]"), ({"sigma": torch.full((3, 1), 0.5)}, "sigma has"),
    ({"velocity": torch.zeros(3, 5)}, "differ in shape"), ({"velocity": torch.zeros(3, 1)}, "differ in shape"),
    ({"latents": torch.zeros(3)}, "rank >= 2"), ({"latents": torch.zeros(3, 4, dtype=torch.int64)}, "expected floats")])
def test_transition_refuses_what_it_cannot_do(change: dict, message: str) -> None:
    arguments = {"kind": "flow", "latents": torch.zeros(3, 4), "velocity": torch.zeros(3, 4), "sigma": 0.5,
                 "sigma_next": 0.4, "noise_level": 0.7, "sigma_max": 0.9, **change}
    with pytest.raises(ValueError, match=message):
        sde.transition(**arguments)


def test_shapes_that_would_broadcast_are_refused() -> None:
    found = sde.transition("flow", torch.zeros(3, 4), torch.zeros(3, 4), 0.5, 0.4, noise_level=0.7, sigma_max=0.9)
    with pytest.raises(ValueError, match="next_latents has shape"):
        found.log_prob(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="noise has shape"):
        found.sample(torch.zeros(4))
    with pytest.raises(ValueError, match="do not fit"):
        sde.gaussian_kl(found.mean, found.mean[:1], found.std)
    with pytest.raises(ValueError, match="do not fit"):
        sde.gaussian_kl(found.mean, found.mean, found.std[:, None])
    with pytest.raises(ValueError, match="std is 0"):
        sde.gaussian_kl(found.mean, found.mean, found.std * torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="differ"):
        sde.velocity_kl(torch.zeros(3, 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="sigma_next"):
        sde.ode_step(torch.zeros(3, 4), torch.zeros(3, 4), 0.4, 0.5)


@pytest.mark.parametrize("arguments", [
    ("cosine", 10, 1.0), ("linear", 0, 1.0), ("linear", 10, 0.0), ("sd3", 10, -3.0), ("flux", 10, math.inf),
    ("linear", 10, math.nan), ("linear", 10, 1e17), ("flux", 10, 90.0)])
def test_schedules_refuse_what_they_cannot_do(arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"schedule|num_inference_steps"):
        sde.sigma_schedule(*arguments)


def test_kl_carries_gradient_to_the_policy_and_none_to_the_reference() -> None:
    policy, reference = batch(2, (4,), 1).requires_grad_(), batch(2, (4,), 2).requires_grad_()
    latents = batch(2, (4,))

    def mean(velocity: torch.Tensor) -> torch.Tensor:
        return sde.transition("cps", latents, velocity, 0.5, 0.4, noise_level=0.8, sigma_max=0.9).mean

    exact = sde.gaussian_kl(mean(policy), mean(reference), torch.full((2,), 0.3))
    for kl in (sde.velocity_kl(policy, reference), exact):
        gradient, other = torch.autograd.grad(kl.sum(), [policy, reference], allow_unused=True)
        assert gradient.abs().sum() > 0
        assert other is None


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import sys, tasks.sde; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
