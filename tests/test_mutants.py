"""Mutants of the pure functions: each is one small mistake that somebody could make, and each must be noticed.

A check (`mutant_checks.py`) is an independent slow loop that takes the function as its argument. The real function
passes it; the same function with a piece of its source replaced does not. A mutant whose old text is no longer in the
source exactly once fails, so the table follows the code.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

import pytest
from mutant_checks import CHECKS

from burnish.finetune import surrogate
from burnish.finetune.exploration import adversarial_surprise, information, novelty, submodular
from burnish.offline import descent, returns, soft, td
from burnish.policies import chain
from burnish.policies.core import chunk


class Mutant(NamedTuple):
    module: Any
    function: str  # of the module, or Class.method
    old: str
    new: str


MUTANTS = [
    Mutant(td, "td_target", "torch.where(discount > 0, discount * next_value, 0.0)", "discount * next_value"),
    Mutant(td, "td_target", "(reward + ", "(-reward + "),
    Mutant(td, "td_target", ".detach()", ""),
    Mutant(surrogate, "gae", " * ~ended", ""),
    Mutant(surrogate, "gae", "lam * discount * ~ended", "lam * ~ended"),
    Mutant(surrogate, "gae", "future - value", "future + value"),
    Mutant(surrogate, "gae", "discount * next_value, 0.0", "discount * value, 0.0"),
    Mutant(surrogate, "gae", "torch.where(discount > 0, discount * next_value, 0.0)", "discount * next_value"),
    Mutant(surrogate, "gae", "range(len(delta) - 1, -1, -1)", "range(len(delta) - 1, 0, -1)"),
    Mutant(surrogate, "gae", "advantage + value", "advantage"),
    Mutant(returns, "lambda_returns", "lerp(next_value[t], running, lam)", "lerp(running, next_value[t], lam)"),
    Mutant(returns, "lambda_returns", "torch.where(ended[t], next_value[t], ", "torch.where(ended[t], running, "),
    Mutant(returns, "lambda_returns", "running = next_value[-1]", "running = torch.zeros_like(next_value[-1])"),
    Mutant(returns, "n_step", "discount.cumprod(1)[:, :-1]", "discount[:, :-1]"),
    Mutant(returns, "n_step", "torch.where(valid, discount, 1.0)", "discount"),
    Mutant(returns, "n_step", "torch.where(valid, before * reward, 0.0)", "(before * reward)"),
    Mutant(returns, "n_step", "valid.sum(1)", "valid.sum(1) - 1"),
    Mutant(returns, "Discount.per_step", "(1 / execute)", "execute"),
    Mutant(surrogate, "normalized", "correction=0", "correction=1"),
    Mutant(surrogate, "normalized", "advantage - advantage.mean()", "advantage"),
    Mutant(surrogate, "normalized", "torch.maximum(advantage, low)", "advantage"),
    Mutant(surrogate, "value_error", "torch.maximum(error", "torch.minimum(error"),
    Mutant(surrogate, "value_error", "clamp(-clip, clip)", "clamp(-clip, 0)"),
    Mutant(surrogate, "clipped_surrogate", "torch.maximum(ratio, 1 - clip)", "ratio"),
    Mutant(surrogate, "clipped_surrogate", "-torch.minimum(ratio * scaled", "-torch.maximum(ratio * scaled"),
    Mutant(surrogate, "clipped_surrogate", "advantage[:, None] * weight", "advantage[:, None]"),
    Mutant(surrogate, "clipped_surrogate", "return -torch", "return torch"),
    Mutant(surrogate, "kl_k3", ") - log_ratio)", ") + log_ratio)"),
    Mutant(surrogate, "clip_fraction", ".abs()", ""),
    Mutant(surrogate, "clip_schedule", "torch.tensor([top])", "torch.tensor([base])"),
    Mutant(surrogate, "clip_schedule", "torch.linspace(0, 1, count)", "torch.arange(count) / count"),
    Mutant(surrogate, "denoising_weight", "torch.arange(count - 1, -1, -1, ", "torch.arange(count, "),
    Mutant(surrogate, "denoising_weight", "torch.arange(count - 1, -1, -1, ", "torch.arange(count, 0, -1, "),
    Mutant(surrogate, "divisor", "coordinates / transitions", "coordinates * transitions"),
    Mutant(surrogate, "divisor", "Reduction.mean_dim_and_step", "Reduction.mean_dim"),
    Mutant(surrogate, "divisor", "return transitions", "return coordinates"),
    Mutant(surrogate, "effective_clip", "torch.log1p(clip)", "clip"),
    Mutant(td, "expectile", "1 - tau, tau", "tau, 1 - tau"),
    Mutant(td, "advantage_weight", "math.log(cap)", "cap"),
    Mutant(td, "advantage_weight", ".detach()", ""),
    Mutant(td, "chunk_weight", "terminated | (steps == execute)", "(steps == execute)"),
    Mutant(td, "chunk_weight", "steps == execute", "steps >= execute - 1"),
    Mutant(td, "row_weight", 'known * columns["weight"]', "known"),
    Mutant(td, "row_weight", 'known * columns["weight"]', 'columns["weight"]'),
    Mutant(td, "row_mean", "weight.sum().clamp(min=1)", "weight.sum()"),
    Mutant(td, "row_mean", "weight.sum().clamp(min=1)", "len(weight)"),
    Mutant(td, "pessimistic", "q.amin(0)", "q.mean(0)"),
    Mutant(td, "pessimistic", "[:subset]", "[: subset - 1]"),
    Mutant(td, "calibrated", "torch.maximum", "torch.minimum"),
    Mutant(td, "cql_gap", "- log_proposal, -1", "+ log_proposal, -1"),
    Mutant(td, "cql_gap", ' - math.log(sizes["M"])', ""),
    Mutant(td, "cql_gap", "temperature * spread - q_data", "spread - q_data"),
    Mutant(td, "cql_gap", "temperature * spread - q_data", "temperature * spread + q_data"),
    Mutant(soft, "soft_value", "q - alpha", "q + alpha"),
    Mutant(soft, "soft_losses", "loss = -soft_value", "loss = soft_value"),
    Mutant(soft, "soft_losses", "loss + temp", "loss - temp"),
    Mutant(soft, "soft_losses", ".detach().mean()", ".detach().sum()"),
    Mutant(descent, "clip_each", "limit / (norm", "limit / (norm.mean().expand_as(norm)"),
    Mutant(descent, "clip_each", "g.norm(dim=1)", "g.amax(1)"),
    Mutant(descent, "clip_each", ".clamp(max=1)", ""),
    Mutant(descent, "clip_each", "limit / ", "1 / "),
    Mutant(soft, "Temperature.loss", "+ self.target", "- self.target"),
    Mutant(soft, "Temperature.loss", "-self.log_alpha", "self.log_alpha"),
    Mutant(soft, "smoothed", ".clamp(-clip, clip)", ""),
    Mutant(soft, "smoothed", ".clamp(-1, 1)", ""),
    Mutant(soft, "q_scale", ".detach()", ""),
    Mutant(soft, "q_scale", "q.detach().abs()", "q.detach()"),
    Mutant(soft, "polyak", "tau)  #", "1 - tau)  #"),
    Mutant(chunk, "ChunkEnv.step", "self.gamma**tick", "self.gamma"),
    Mutant(chunk, "ChunkEnv.step", "* ~terminated).to", "* ~(terminated | truncated)).to"),
    Mutant(chunk, "ChunkEnv.step", "steps.double()", "torch.full_like(steps, self.execute).double()"),
    Mutant(chunk, "ChunkEnv.step", "where(active, step.obs, next_obs)", "step.obs"),
    Mutant(chunk, "ChunkEnv.step", "map_tree(torch.clone, step.obs) if", "step.obs if"),
    Mutant(chunk, "ChunkEnv.step", "terminated |= active & step.terminated", "terminated |= step.terminated"),
    Mutant(chunk, "ChunkEnv.step", "torch.where(active[:, None], taken, executed[:, tick])", "taken"),
    Mutant(chunk, "ChunkEnv.step", "Outcome(obs, next_obs, ", "Outcome(obs, obs, "),
    Mutant(novelty, "novelty", "largest=False", "largest=True"),
    Mutant(novelty, "novelty", ".mean(1)", ".sum(1)"),
    Mutant(novelty, "novelty", "min(neighbours + own, len(archive))", "1 + own"),
    Mutant(novelty, "novelty", "[:, int(own) :]", ""),
    Mutant(submodular, "gain", "1 + (along", "(along"),
    Mutant(submodular, "gain", "left.log() / 2", "left.log()"),
    Mutant(submodular, "gain", "inverse - along", "inverse + along"),
    Mutant(submodular, "gain", " / left[:, None, None]", ""),
    Mutant(information, "information", "[:, asked:, asked:]", "[:, :asked, :asked]"),
    Mutant(information, "information", "torch.logdet(precision) - ", "torch.logdet(precision) + "),
    Mutant(information, "information", ") / 2", ")"),
    Mutant(adversarial_surprise, "surprise", " / variance +", " +"),
    Mutant(adversarial_surprise, "surprise", ".square() / variance + (", ".square() / variance - ("),
    Mutant(adversarial_surprise, "surprise", "(2 * math.pi * variance)", "(2 * math.pi / variance)"),
    Mutant(adversarial_surprise, "surprise", ".mean(1) / 2", ".mean(1)"),
    Mutant(adversarial_surprise, "with_seen", "count + rows[:, None]", "count + 1"),
    Mutant(adversarial_surprise, "with_seen", "torch.where(rows[:, None], x - mean, 0.0)", "(x - mean)"),
    Mutant(adversarial_surprise, "with_seen", "mean + delta / count", "mean + delta"),
    Mutant(adversarial_surprise, "with_seen", " * (1 - 1 / count)", ""),
    Mutant(chain, "executed_sum", "spec.executed(density)", "density[:, : spec.execute]"),
    Mutant(chain, "executed_sum", " * executed[:, :, None]", ""),
    Mutant(chain, "executed_sum", "< steps", "<= steps"),
]


def real(mutant):
    found = mutant.module
    for name in mutant.function.split("."):
        found = getattr(found, name)
    return found


def mutated(mutant):
    """The function with its mistake, in a copy of the names that its module knows."""
    source = textwrap.dedent(inspect.getsource(real(mutant)))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in {mutant.function} exactly once"
    names = dict(vars(mutant.module))
    exec("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), names)
    return names[mutant.function.rpartition(".")[2]]


@pytest.mark.parametrize("name", CHECKS)
def test_the_real_function_passes(name, float64):
    (function,) = {real(mutant) for mutant in MUTANTS if mutant.function == name}
    CHECKS[name](function)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.function}: {m.old} -> {m.new}")
def test_a_mutant_is_killed(mutant, float64):
    broken = mutated(mutant)
    with pytest.raises(AssertionError):
        CHECKS[mutant.function](broken)


def test_every_formula_has_a_mutant():
    # One call or one number each; a step of an optimizer by two formulas that have theirs.
    spared = {"returns_to_go", "uniform_log_density", "unchanged", "uniform", "soft_step"}
    for module in (returns, soft, surrogate, td):
        own = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__]
        public = {x.__name__ for x in own if not x.__name__.startswith("_")}
        assert public - spared - {mutant.function for mutant in MUTANTS} == set()
