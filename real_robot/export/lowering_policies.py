"""The ``act`` of each policy of ours, in the order of its own code, as operations (`lowering.py`).

Everything that is known at export is computed here: a generation takes the same times at every act, so the embedding of
each goes through the first layer now and becomes a bias of it; what the observation gives to that layer is one product
for all steps. The K steps stand one after the other.

The policy side of this folder does not import `policies`, so classes are known by their names (`ACTS`). What is not in
the table (a temporal U-Net, pictures, a policy of another library) raises `NotLowered`, and is exported as a network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lowering import Lowering, NotLowered

Seen = Mapping[str, str]  # observation -> the value that stands for it
Transition = Callable[[int, str], tuple[str, float]]  # (k, x_k) -> mean and std of x_(k + 1)


def act(low: Lowering, policy: Any, noise: str | None = None, seen: Seen | None = None, **how: Any) -> str:
    """A chunk, flattened. ``noise`` takes the place of the policy's own."""
    kind = type(policy).__name__
    if kind not in ACTS:
        raise NotLowered(f"a policy of the class {kind}")
    return ACTS[kind](low, policy, noise, seen or {}, **how)


def advise(low: Lowering, policy: Any, noise: str | None = None, seen: Seen | None = None, **how: Any) -> str:
    """The refusal of a part that makes no chunk of the policy, and so knows no committed actions."""
    pins, low.pins = low.pins, False
    said = act(low, policy, noise, seen, **how)
    low.pins = pins
    return said


def tick(low: Lowering, policy: Any, action: str) -> str:
    """The action that is played in place of the base's, of a residual per step."""
    if corrects(policy.base):
        action = tick(low, policy.base, action)
    correction = advise(low, policy.net, seen={"base_action": action}, greedy=True)
    return low.clip(low.mix((1, action), (policy.config.bound, correction)))


def corrects(policy: Any) -> bool:
    """Whether single actions are corrected at their time."""
    return type(policy).__name__ == "Residual" and policy.config.every.name == "step"


def _gaussian(low: Lowering, policy: Any, noise: str | None, seen: Seen, greedy: bool = False) -> str:
    config, size = policy.config, math.prod(policy.spec.chunk_shape)
    out = low.layers(policy.trunk, low.encode(policy.encoder, seen))
    raw: str | None = None
    if config.state_dependent_std:
        out, raw = low.slice(out, 0, size), low.slice(out, size, 2 * size)
    if config.tanh_mean:
        out = low.activation(out, "tanh")
    if not greedy:
        # Least squares learns no spread, so such a policy acts by its mean unless it is handed noise.
        noise = noise or low.draw(policy.spec.chunk_shape, drawn=config.loss.name != "least_squares")
        out = low.mix((1, out), (1, low.add("multiply", [noise, _spread(low, policy, raw)])))
    out = low.activation(out, "tanh") if config.squash else low.clip(out)
    return low.committed(out)


def _spread(low: Lowering, policy: Any, head: str | None) -> str:
    """The std, as in `GaussianPolicy.law`; ``head`` is its part that depends on what is observed."""
    config, raw = policy.config, policy.raw_std.detach().double().reshape(-1)
    bounds, floor = config.log_std_bounds, config.min_std
    raw = raw + (math.log(config.init_std) if bounds else math.log(math.expm1(config.init_std - floor)))
    if head is None:
        return low.constant(raw.clamp(*bounds).exp() if bounds else floor + F.softplus(raw))
    value = low.mix((1, low.constant(raw)), (1, head))
    if bounds:
        return low.activation(low.add("clip", [value], low=bounds[0], high=bounds[1]), "exp")
    return low.mix((1, low.activation(value, "softplus")), (1, low.constant(torch.full_like(raw, floor))))


def _one_step(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    encoded = low.encode(policy.encoder, seen)
    drawn = noise or low.draw(policy.spec.chunk_shape)
    return low.committed(low.clip(low.layers(policy.trunk, low.concat(encoded, drawn))))


def _predictor(low: Lowering, net: Any, times: Tensor, seen: Seen) -> Callable[[int, str], str]:
    """(k, x) -> the output of a `nets.denoiser.Denoiser` at the times (K, num_times) of step k."""
    if not net.flat:
        raise NotLowered("a policy with the body unet")
    conds = [low.encode(net.encoder, seen)]
    if net.guidance != 1 and net.encoder.goal_keys:
        conds.append(low.encode(net.encoder, seen, free=True))
    with torch.no_grad():
        embedded = net.time(times.to(next(net.parameters())))
    first, *rest = net.body.layers
    size, width = math.prod(net.chunk_shape), embedded.shape[1]
    folds = isinstance(first, nn.Sequential)  # and not carried around, which would carry the embedding too
    of_cond: list[str] = []
    if folds:
        linear: Any = first[0]
        of_x, of_time, from_cond = linear.weight.split([size, width, net.encoder.dim], 1)
        biases = linear.bias.double() + embedded.double() @ of_time.double().T
        of_cond = [low.linear(cond, from_cond) for cond in conds]

    def predict(k: int, x: str, which: int) -> str:
        if folds:
            y = low.layers(first[1:], low.linear(x, of_x, biases[k], of_cond[which]))
        else:
            y = low.layers(first, low.concat(x, low.constant(embedded[k]), conds[which]))
        for layer in rest:
            y = low.layers(layer, y)
        return y

    def guided(k: int, x: str) -> str:
        given = predict(k, x, 0)
        if len(conds) == 1:
            return given
        return low.mix((net.guidance, given), (1 - net.guidance, predict(k, x, 1)))

    return guided


def _transition(low: Lowering, policy: Any, seen: Seen) -> Transition:
    kind = type(policy).__name__
    if kind == "SplitChain":
        first, last = (_transition(low, runner, seen) for runner in (policy.first, policy.last))
        return lambda k, x: (first if k < policy.config.switch else last)(k, x)
    steps = policy.num_steps
    if kind == "FlowPolicy":
        times = policy.time(torch.arange(steps))[:, None]
        if policy.config.shortcut:
            times = torch.cat([times, torch.full_like(times, policy.step_size)], 1)
        velocity = _predictor(low, policy.net, times, seen)
        return lambda k, x: (low.mix((1, x), (1 / steps, velocity(k, x))), 0.0)
    if kind != "DiffusionPolicy":
        raise NotLowered(f"a chain of the class {kind}")
    output = _predictor(low, policy.net, policy.time(policy.indices)[:, None], seen)

    def denoise(k: int, x: str) -> tuple[str, float]:
        of_x, of_output, of_clean, of_state, std = policy.weights[k].tolist()
        clean = _clean(low, policy, low.mix((of_x, x), (of_output, output(k, x))))
        return low.mix((of_clean, clean), (of_state, x)), std

    return denoise


def _clean(low: Lowering, policy: Any, x: str) -> str:
    return x if policy.config.clip is None else low.clip(x, policy.config.clip)


def _chain(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    """`sample_chain`, with the levels at which the last of the runners pins a prefix."""
    sampler = policy
    while type(sampler).__name__ == "SplitChain":
        sampler = sampler.last
    flow = type(sampler).__name__ == "FlowPolicy"
    if not flow and not sampler.config.gaussian_chain:
        return _solved(low, policy, noise, seen)
    steps, injected = sampler.num_steps, not flow and sampler.config.injected > 0
    step = _transition(low, policy, seen)
    start = noise or low.draw(sampler.spec.chunk_shape)

    def pinned(x: str, k: int) -> str:
        if flow:
            return low.pin(x, start, 1 - k / steps, k / steps)
        level = float(sampler.visited[k])
        return low.pin(x, start, math.sqrt(1 - level), math.sqrt(level))

    x = start if flow else pinned(start, 0)
    for k in range(steps):
        x, std = step(k, x)
        if injected:
            x = low.mix((1, x), (std, low.draw(sampler.spec.chunk_shape)))
        x = pinned(x, k + 1)
    return low.clip(x)


def _solved(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    """The solvers of diffusers are linear in their state and in what the network says, and do the same to every number
    of a chunk. So they are run on weights in place of numbers: a state is the weights of the noise and of each answer
    so far, (1 + calls,), and what comes out is written down."""
    solver = copy.deepcopy(policy._solver)
    sigmas, ticks = solver.sigmas.tolist(), solver.timesteps
    calls = min(len(sigmas), len(ticks))
    grid = policy._log_sigmas
    indices = np.interp(np.log(sigmas[:calls]), grid, np.arange(len(grid)))
    output = _predictor(low, policy.net, policy.time(torch.as_tensor(indices))[:, None], seen)
    made = [noise or low.draw(policy.spec.chunk_shape)]
    basis = torch.eye(1 + calls, dtype=torch.float64)
    state = basis[0] * float(solver.init_noise_sigma)

    def value(weights: Tensor) -> str:
        return low.mix(*zip(weights.tolist(), made, strict=False))

    for i in range(calls):
        level = 1 / (1 + sigmas[i] ** 2)
        x = value(solver.scale_model_input(state, ticks[i]))
        x = low.pin(x, made[0], math.sqrt(1 - level), math.sqrt(level))
        of_x, of_output = _weights(policy, level)
        made.append(_clean(low, policy, low.mix((of_x, x), (of_output, output(i, x)))))
        state = solver.step(basis[i + 1], ticks[i], state, return_dict=False)[0]
    return low.clip(low.committed(value(state)))


def _weights(policy: Any, level: float) -> tuple[float, float]:
    """`schedule.clean_weights` of the three predictions."""
    signal, spread = math.sqrt(level), math.sqrt(1 - level)
    name = policy.config.prediction.name
    return {"eps": (1 / signal, -spread / signal), "sample": (0.0, 1.0), "v": (signal, -spread)}[name]


def _executed(low: Lowering, spec: Any, chunk: str) -> str:
    width = spec.action.dim
    return low.slice(chunk, spec.start * width, (spec.start + spec.execute) * width)


def _with_executed(low: Lowering, spec: Any, chunk: str, executed: str) -> str:
    width = spec.action.dim
    begin, end, size = spec.start * width, (spec.start + spec.execute) * width, spec.horizon * width
    head = [low.slice(chunk, 0, begin)] if begin else []
    tail = [low.slice(chunk, end, size)] if end < size else []
    return low.committed(low.concat(*head, executed, *tail))


def _residual(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    if corrects(policy):
        raise NotLowered("a residual per step inside of another policy")
    chunk = act(low, policy.base, noise, seen)
    base = _executed(low, policy.spec, chunk)
    correction = advise(low, policy.net, seen={**seen, "base_action": base}, greedy=True)
    executed = low.clip(low.mix((1, base), (policy.config.bound, correction)))
    return _with_executed(low, policy.spec, chunk, executed)


def _repeated(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    vector = noise or low.draw(policy.spec.noise_shape)
    return act(low, policy.base, low.concat(*[vector] * policy.count), seen)


def _steered(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    size, more = policy._size, policy._residual
    z = noise or low.draw(policy.spec.noise_shape)
    choice = advise(low, policy.latent, low.concat(z, low.constant(torch.zeros(more))) if more else z, seen)
    w = low.mix((policy.config.latent_bound, low.slice(choice, 0, size)))
    chunk = act(low, policy.base, w, seen)
    if not more:
        return chunk
    change = low.slice(choice, size, size + more)
    base = _executed(low, policy.spec, chunk)
    executed = low.clip(low.mix((1, base), (policy.config.residual_bound, change)))
    return _with_executed(low, policy.spec, chunk, executed)


def _best_of(low: Lowering, policy: Any, noise: str | None, seen: Seen) -> str:
    if low.candidates is not None:
        raise NotLowered("a best of several inside of another")
    low.candidates = policy.config.count
    chunks = act(low, policy.base, None, seen)
    if policy.edit is not None:
        base = _executed(low, policy.spec, chunks)
        change = advise(low, policy.edit, seen={**seen, "base_action": base})
        executed = low.clip(low.mix((1, base), (policy.config.edit_bound, change)))
        chunks = low.add("concat", [chunks, _with_executed(low, policy.spec, chunks, executed)], axis=0)
    low.candidates = None
    return low.add("pick", [chunks, _worst(low, policy.critic, seen, _executed(low, policy.spec, chunks))])


def _worst(low: Lowering, critic: Any, seen: Seen, executed: str) -> str:
    """(rows, 1): the least of what the critic's members say."""
    asked = low.concat(low.encode(critic.encoder, seen), executed)
    said = []
    for member in range(critic.config.members):
        out = low.layers(critic.net.layers, asked, member)
        if critic.config.bins:
            out = low.add("expectation", [out], support=low.tensor("support", critic.support))
        said.append(out)
    return low.add("minimum", said)


ACTS: Mapping[str, Callable[..., str]] = {
    "FlowPolicy": _chain,
    "DiffusionPolicy": _chain,
    "SplitChain": _chain,
    "GaussianPolicy": _gaussian,
    "OneStepPolicy": _one_step,
    "Residual": _residual,
    "Repeated": _repeated,
    "Steered": _steered,
    "BestOf": _best_of,
}
