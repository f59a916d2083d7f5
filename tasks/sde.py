"""Sigma schedules, stochastic transitions and their log-probabilities: the mathematics rollout and update share.

In: latents, a velocity and two noise levels. Out: a `Transition`, which samples (rollout) and scores (update's replay).
Next: `tasks.algorithms`. Left out on purpose: models, guidance, which steps are stochastic, and generators that carry
state; every draw has a seed of its own.

Conventions: sigma falls from 1 (noise) to 0 (data), ``x = (1 - sigma) x0 + sigma eps``, velocity ``v = eps - x0``, so
``dt = sigma_next - sigma < 0``. A row's bits depend on that row alone: not on its neighbours, their number or the
number of threads. That holds because every transition here is ``mean = c_x x + c_v v`` with coefficients worked out a
row at a time in double precision, and because means over dimensions are sums in one fixed order (`_row_mean`).
"""

import hashlib
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

from tasks.contracts.config import Schedule, SDEKind

if TYPE_CHECKING:
    from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_AT_ONE = 1e-6
"""A sigma this close to 1 is 1: it went through fp32, or through timestep = 1000 sigma and back."""


@dataclass(frozen=True)
class Transition:
    """The Gaussian transition of N samples from sigma to sigma_next.

    Attributes:
        kind: The SDE.
        mean: fp32 or fp64 [N, ...]; differentiable in the velocity.
        std: Same dtype, [N]: the FULL standard deviation of the transition, 0 = deterministic (ODE).
        log_std: Same dtype, [N]; -inf where std is 0.
        num_deterministic: How many rows have std 0, and so no density.
    """

    kind: SDEKind
    mean: "Tensor"
    std: "Tensor"
    log_std: "Tensor"
    num_deterministic: int

    def sample(self, noise: "Tensor") -> "Tensor":
        """The next latents ``mean + std * noise``, [N, ...]; `noise` is standard normal of the mean's shape.

        Raises:
            ValueError: wrong shape of `noise`.
        """
        return self.mean + _per_row(self.std, self.mean) * self._like_mean("noise", noise)

    def log_prob(self, next_latents: "Tensor") -> "Tensor":
        """Score of `next_latents`, [N], averaged over latent elements; differentiable through the mean only.

        flow and dance: the Gaussian log-density in nats an element. cps: the published ``-mean((x_next - mean)^2)``,
        without constants and without ``1 / (2 std^2)``, and 0 where std is 0. So a log-ratio of cps is ``2 std^2``
        times the Gaussian one, and clip ranges are not interchangeable between kinds.

        Raises:
            ValueError: wrong shape; or a flow or dance row has std 0.

        Source: Flow-GRPO, arXiv 2505.05470; Flow-CPS, arXiv 2509.05952.
        """
        if self.kind != "cps":
            return self.gaussian_log_prob(next_latents)
        residual = self._like_mean("next_latents", next_latents).detach() - self.mean
        score = -_row_mean(residual * residual)
        return score.masked_fill(self.std == 0, 0.0)

    def gaussian_log_prob(self, next_latents: "Tensor") -> "Tensor":
        """Full Gaussian log-density of `next_latents`, [N], in nats an element (mean, not sum, over the latent).

        Raises:
            ValueError: wrong shape; or a row has std 0, so there is no density.
        """
        if self.num_deterministic:
            raise ValueError(
                f"{self.num_deterministic} of {len(self.std)} transitions of kind {self.kind!r} have std 0 "
                "(noise_level 0, or the last step of cps): a deterministic step has no log-prob. Leave it out of the "
                "trained steps.")
        residual = self._like_mean("next_latents", next_latents).detach() - self.mean
        # Divided before it is squared: the square of a residual over a small std would lose range in fp32.
        scaled = residual / _per_row(self.std, self.mean)
        return -0.5 * _row_mean(scaled * scaled) - self.log_std - _HALF_LOG_2PI

    def _like_mean(self, name: str, value: "Tensor") -> "Tensor":
        if value.shape != self.mean.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, expected that of the mean, "
                             f"{list(self.mean.shape)}")
        return value.to(self.mean)


def transition(
    kind: SDEKind, latents: "Tensor", velocity: "Tensor", sigma: "float | Tensor", sigma_next: "float | Tensor", *,
    noise_level: "float | Tensor", sigma_max: "float | Tensor",
) -> Transition:
    """The stochastic step of `latents` from `sigma` to `sigma_next` under `velocity`.

    With ``D`` the diffusion coefficient, flow and dance are the reverse SDE of the same marginals::

        mean = x + dt (v + D^2 / (2 sigma) (x + (1 - sigma) v)),  std = D sqrt(-dt)
        flow: D = noise_level sqrt(sigma / (1 - sigma)), with sigma_max in the denominator where sigma is 1
        dance: D = noise_level

    cps keeps the noise coefficient, not the marginal::

        std = sigma_next sin(noise_level pi / 2),  mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) eps
        with x0 = x - sigma v and eps = x + (1 - sigma) v

    Args:
        kind: ``flow``, ``dance`` or ``cps``.
        latents, velocity: [N, ...] of one shape. fp16 and bf16 are raised to fp32, fp64 stays.
        sigma, sigma_next: Floats or tensors [N]; ``0 <= sigma_next < sigma <= 1``. Keep them on the CPU: they are read.
        noise_level: Float or tensor [N], >= 0, dimensionless, at most 1 for cps. 0 = a deterministic row, equal to
            `ode_step` bit for bit.
        sigma_max: ``sigmas[1]`` of the schedule the samples were drawn with; used by flow where sigma is 1.

    Raises:
        ValueError: unknown kind, shapes that differ, or values out of range.

    Source: Flow-GRPO, arXiv 2505.05470; DanceGRPO, arXiv 2505.07818; Flow-CPS, arXiv 2509.05952.
    """
    import torch

    if kind not in get_args(SDEKind):
        raise ValueError(f"unknown SDE kind {kind!r}; expected one of {', '.join(get_args(SDEKind))}")
    latents, velocity = _raised("latents", latents), _raised("velocity", velocity)
    num_rows = len(latents)
    rows = zip(*(_row_values(name, value, num_rows) for name, value in (
        ("sigma", sigma), ("sigma_next", sigma_next), ("noise_level", noise_level), ("sigma_max", sigma_max))),
        strict=True)
    coefficients = [_coefficients(kind, *row) for row in rows]
    mean = _affine(latents, velocity, [row[0] for row in coefficients], [row[1] for row in coefficients])
    stds = [row[2] for row in coefficients]
    std = torch.tensor(stds, dtype=mean.dtype)
    return Transition(
        kind=kind, mean=mean, std=std.to(mean.device),
        log_std=mean.new_tensor([math.log(value) if value else -math.inf for value in stds]),
        # Counted after the cast and on the CPU: fp32 may round a tiny std to 0, and a GPU need not be waited for.
        num_deterministic=int((std == 0).sum()))


def ode_step(latents: "Tensor", velocity: "Tensor", sigma: "float | Tensor", sigma_next: "float | Tensor") -> "Tensor":
    """The deterministic (Euler) step ``x + (sigma_next - sigma) v``, [N, ...], fp32 or fp64.

    Raises:
        ValueError: shapes that differ, or values out of range.
    """
    latents, velocity = _raised("latents", latents), _raised("velocity", velocity)
    num_rows = len(latents)
    steps = []
    for here, after in zip(_row_values("sigma", sigma, num_rows), _row_values("sigma_next", sigma_next, num_rows),
                           strict=True):
        _check_sigmas(here, after)
        steps.append(after - here)
    return _affine(latents, velocity, [1.0] * num_rows, steps)


def gaussian_kl(mean: "Tensor", mean_reference: "Tensor", std: "Tensor") -> "Tensor":
    """Exact KL of two Gaussians of equal std, [N]: ``mean_d((mean - mean_ref)^2) / (2 std^2)``, nats an element.

    `std` [N] is the full one of `Transition`. Differentiable in `mean`; the reference is a constant.

    Raises:
        ValueError: shapes that differ, or a std that is not positive: two point masses have no finite KL.
    """
    mean, mean_reference = _raised("mean", mean), _raised("mean_reference", mean_reference)
    if mean.shape != mean_reference.shape or std.shape != mean.shape[:1]:
        raise ValueError(f"gaussian_kl: mean {list(mean.shape)}, mean_reference {list(mean_reference.shape)} and std "
                         f"{list(std.shape)} do not fit; expected [N, ...], the same, and [N]")
    if not bool((std > 0).all()):
        raise ValueError("gaussian_kl: a std is 0 (a deterministic step), so the KL is not defined. Leave the step "
                         "out, or use the velocity form")
    scaled = (mean - mean_reference.detach()) / _per_row(std.to(mean), mean)
    return 0.5 * _row_mean(scaled * scaled)


def velocity_kl(velocity: "Tensor", velocity_reference: "Tensor") -> "Tensor":
    """The velocity form of the KL, ``mean_d((v - v_ref)^2)``, [N]; about 100x the exact one.

    Differentiable in `velocity`; the reference is a constant.

    Raises:
        ValueError: shapes that differ.
    """
    velocity, velocity_reference = _raised("velocity", velocity), _raised("velocity_reference", velocity_reference)
    if velocity.shape != velocity_reference.shape:
        raise ValueError(f"velocity_kl: shapes {list(velocity.shape)} and {list(velocity_reference.shape)} differ")
    difference = velocity - velocity_reference.detach()
    return _row_mean(difference * difference)


def sigma_schedule(kind: Schedule, num_inference_steps: int, shift: float) -> "Tensor":
    """The sigmas of a sampler, float64 [T + 1], from exactly 1 down to exactly 0.

    Args:
        kind: ``linear``: ``u = linspace(1, 1/T, T)``, shifted. ``dance``: ``linspace(1, 0, T + 1)``, shifted, as
            DanceGRPO has it; the same numbers. ``sd3``: as diffusers has it, ``u = linspace(1, sigma_min, T)`` with
            ``sigma_min`` already shifted once (huggingface/diffusers#13243), so the last sigma is tiny.
            ``flux``: ``e^mu / (e^mu + 1/u - 1)`` on the linear u, with mu = `shift`; see `flux_mu`.
        num_inference_steps: T >= 1.
        shift: Static shift > 0, ``shift u / (1 + (shift - 1) u)``; the exponent mu, between -100 and 100, for ``flux``.

    Raises:
        ValueError: unknown kind, values out of range, or a shift so large that sigmas coincide.
    """
    import torch

    num_steps = operator.index(num_inference_steps)
    if kind not in get_args(Schedule):
        raise ValueError(f"unknown schedule {kind!r}; expected one of {', '.join(get_args(Schedule))}")
    if num_steps < 1:
        raise ValueError(f"num_inference_steps must be at least 1, got {num_inference_steps}")
    low, high = (-100, 100) if kind == "flux" else (0, math.inf)
    if not low < shift < high:
        raise ValueError(f"shift of schedule {kind!r} must lie between {low} and {high}, got {shift}")

    def shifted(u: float) -> float:
        if kind == "flux":
            return math.exp(shift) / (math.exp(shift) + (1 / u - 1))
        return shift * u / (1 + (shift - 1) * u)

    if kind == "sd3":
        sigma_min = shifted(1 / 1000)
        u_values = [1 + (sigma_min - 1) * step / max(num_steps - 1, 1) for step in range(num_steps)]
    else:
        u_values = [(num_steps - step) / num_steps for step in range(num_steps)]
    # Exactly 1: shift / (1 + (shift - 1)) may round, and the first step is recognised by its sigma.
    sigmas = [1.0, *(shifted(u) for u in u_values[1:]), 0.0]
    if any(here <= after for here, after in itertools.pairwise(sigmas)):
        raise ValueError(f"schedule {kind!r} with shift {shift} and {num_steps} steps is not strictly decreasing; "
                         "use a shift nearer to 1")
    return torch.tensor(sigmas, dtype=torch.float64)


def flux_mu(num_tokens: int) -> float:
    """FLUX's resolution-dependent shift exponent, ``0.5 + 0.65 (L - 256) / 3840``, for L packed latent tokens."""
    return 0.5 + 0.65 * (num_tokens - 256) / 3840


def noise(shape: Sequence[int], seed: int) -> "Tensor":
    """Standard normal noise, fp32 on the CPU, from a generator of its own; torch's global state is not touched."""
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def derive_seed(run_seed: int, iteration: int, sample_index: int, purpose: str) -> int:
    """A 63-bit seed that depends on exactly these four, so that any sharding of the samples draws the same noise.

    Purposes are separate streams: ``"initial"`` is the noise a sample starts from, ``"step/3"`` that of its denoising
    step 3. Group members that share their initial noise pass one common index for ``"initial"`` and their own for the
    steps. `sample_index` is the global one, never a position within a lane or a request.

    Raises:
        ValueError: empty purpose. TypeError: a number that is not an integer.
    """
    if not purpose:
        raise ValueError("derive_seed needs a purpose, such as 'initial' or 'step/3'")
    numbers = (operator.index(run_seed), operator.index(iteration), operator.index(sample_index))
    text = "/".join([*map(str, numbers), purpose])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=8192)
def _coefficients(kind: SDEKind, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
                  ) -> tuple[float, float, float]:
    """``(c_x, c_v, std)`` of one row: ``mean = c_x x + c_v v``."""
    _check_sigmas(sigma, sigma_next)
    if not 0 <= noise_level < math.inf:
        raise ValueError(f"noise_level must be finite and >= 0, got {noise_level}")
    dt = sigma_next - sigma
    if kind == "cps":
        if noise_level > 1:
            raise ValueError(f"noise_level {noise_level} is above 1, which cps cannot use: its std is "
                             "sigma_next * sin(noise_level * pi / 2)")
        if noise_level == 0:
            return 1.0, dt, 0.0
        angle = noise_level * math.pi / 2
        std, kept = sigma_next * math.sin(angle), sigma_next * math.cos(angle)
        return (1 - sigma_next) + kept, kept * (1 - sigma) - (1 - sigma_next) * sigma, std
    diffusion = noise_level
    if kind == "flow":
        clean = 1 - sigma
        if clean <= _AT_ONE:
            if not 0 < sigma_max < 1:
                raise ValueError(f"sigma_max must lie between 0 and 1 where sigma is 1, got {sigma_max}; it is "
                                 "sigmas[1] of the schedule")
            clean = 1 - sigma_max
        diffusion *= math.sqrt(sigma / clean)
    pull = diffusion * diffusion / (2 * sigma)
    return 1 + pull * dt, (1 + pull * (1 - sigma)) * dt, diffusion * math.sqrt(-dt)


def _check_sigmas(sigma: float, sigma_next: float) -> None:
    if not 0 <= sigma_next < sigma <= 1:
        raise ValueError(f"got sigma {sigma} and sigma_next {sigma_next}; expected 0 <= sigma_next < sigma <= 1 "
                         "(sigma falls from 1 = noise to 0 = data)")


def _raised(name: str, value: "Tensor") -> "Tensor":
    """`value` in fp32, or fp64 if it is: the residual of a step loses all its bits in bf16, and fp16 overflows."""
    import torch

    if not value.is_floating_point() or value.ndim < 2:
        raise ValueError(f"{name}: got {value.dtype} {list(value.shape)}, expected floats [N, ...] of rank >= 2")
    return value if value.dtype == torch.float64 else value.float()


def _row_values(name: str, value: "float | Tensor", num_rows: int) -> list[float]:
    if isinstance(value, int | float) or value.ndim == 0:
        return [float(value)] * num_rows
    if tuple(value.shape) != (num_rows,):
        raise ValueError(f"{name} has shape {list(value.shape)}, expected a number or [{num_rows}], one value a row")
    return [float(item) for item in value.tolist()]


def _per_row(values: "Tensor", like: "Tensor") -> "Tensor":
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _affine(latents: "Tensor", velocity: "Tensor", of_latents: list[float], of_velocity: list[float]) -> "Tensor":
    import torch

    if latents.shape != velocity.shape:
        raise ValueError(f"latents {list(latents.shape)} and velocity {list(velocity.shape)} differ in shape")
    dtype = torch.promote_types(latents.dtype, velocity.dtype)
    latents, velocity = latents.to(dtype), velocity.to(dtype)
    c_x, c_v = latents.new_tensor(of_latents), latents.new_tensor(of_velocity)
    return _per_row(c_x, latents) * latents + _per_row(c_v, latents) * velocity


def _row_mean(values: "Tensor") -> "Tensor":
    """Mean over all but the first dimension, [N].

    Summed by halving, in one fixed order: a library's reduction may choose its order by N or by the thread count.
    """
    from torch.nn.functional import pad

    folded = values.reshape(len(values), math.prod(values.shape[1:]))
    count = width = folded.shape[1]
    while width > 1:
        half = (width + 1) // 2
        folded = pad(folded, (0, 2 * half - width))
        folded, width = folded[:, :half] + folded[:, half:], half
    return folded[:, 0] / count
