"""Which policy a run delivers: its last one, its best one on the way, or the one that it began with.

Training may end below where it has been, and below its start. Choosing the best of many evaluations rewards luck, so a
run chooses in two steps:

* *Selection.* Every evaluation along the run plays the same seeds, of the stream "select". The policy with the highest
  mean there is the **candidate**; of equals, the later one, which has learnt for longer.
* *Confirmation.* When the run has ended, the start, the candidate and the last policy play ``eval.confirm`` fresh
  seeds, of the stream "confirm", on which nothing was chosen. The candidate or the last policy is delivered if the
  interval of its difference from the start (of pairs, where the world honours its seeds) lies above 0, at a level
  corrected for the number of policies that were tried there (Bonferroni). If both pass, the higher mean decides.
  Otherwise the run delivers its start.

The folder of the run holds

    start.json     the evaluation of the start on the seeds for selection, if the run began with a policy
    candidate/     the candidate
    confirm.json   the evaluations on the fresh seeds, and which policy they chose
    best/          the policy to deploy; absent where that is the start

A run that began with nothing has nothing to beat: its candidate is delivered without confirmation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .build import describe, load_policy
from .core.errors import BurnishError
from .core.files import refuse_link, replace
from .measure.evaluate import Evaluation, compare, why_unpaired
from .runs.checkpoint import load, save
from .runs.run import START
from .runs.state_codec import Place

BEST, CANDIDATE, CONFIRMED = "best", "candidate", "confirm.json"
ERROR = 0.05  # share of runs without any progress that may deliver something other than their start, either way


class Best:
    """Of the run in ``folder``, which a resumed run continues. ``origin`` is what its policies remember,
    ``left_out`` are weights that they do not hold (`partial.py`)."""

    def __init__(
        self, folder: Path | str, origin: Mapping[str, Any], left_out: Mapping[Place, str] | None = None
    ) -> None:
        self.folder, self._origin, self._left_out = Path(folder), origin, left_out
        self.path, self.candidate = refuse_link(self.folder / BEST), refuse_link(self.folder / CANDIDATE)
        self.start = Evaluation.load(self.folder / START) if (self.folder / START).is_file() else None
        self.step, self.evaluation = _kept(self.candidate)
        self.confirmed = _confirmation(self.folder / CONFIRMED)

    @property
    def delivered(self) -> int | None:
        """The step of the policy in ``best/``; None where the run delivers its start."""
        return load(self.path).metrics["step"] if self.path.is_dir() else None

    def begin(self, evaluation: Evaluation) -> None:
        """``evaluation`` of the policy that the run starts from, on the seeds for selection."""
        self.start = evaluation
        evaluation.save(self.folder / START)

    def offer(self, policy: Any, step: int, evaluation: Evaluation) -> None:
        """``evaluation`` on the seeds for selection."""
        if self.evaluation is None or mean(evaluation) >= mean(self.evaluation):
            self._keep(self.candidate, policy, step, evaluation)
            self.step, self.evaluation = step, evaluation
            if self.start is None:
                self._keep(self.path, policy, step, evaluation)

    def confirm(self, start: Any, last: Any, step: int, examine: Callable[[str, Any], Evaluation]) -> None:
        """Decide what is delivered. ``examine`` plays a policy, with a name to say, on the fresh seeds; ``last`` is the
        policy of ``step``.

        Does nothing if it was decided before, or if the run began with nothing."""
        if start is None or self.start is None or self.confirmed is not None:
            return
        played = {"start": examine("start", start), "last": examine("last", last)}
        policies, steps = {"last": last}, {"last": step}
        if self.evaluation is not None and self.step != step:
            policies["candidate"], steps["candidate"] = self._candidate(start, last), self.step
            played["candidate"] = examine("candidate", policies["candidate"])
        confidence = 1 - ERROR / len(policies)
        better = [name for name in policies if difference(played[name], played["start"], confidence)[1] > 0]
        chosen = max(better, key=lambda name: mean(played[name]), default=None)
        if chosen is not None:
            self._keep(self.path, policies[chosen], steps[chosen], played[chosen])
        facts = {
            "chosen": chosen,
            "steps": steps,
            "evaluations": {name: found.to_dict() for name, found in played.items()},
        }
        replace(self.folder / CONFIRMED, json.dumps(facts) + "\n")
        self.confirmed = _confirmation(self.folder / CONFIRMED)

    def sentence(self) -> str:
        """The folder of the policy to deploy."""
        if self.confirmed is None:
            if self.start is None and self.evaluation is not None:
                return f"best: {self.path}, of step {self.step:,}"
            return "best: no policy of this run has been tried"
        played, steps, chosen = (self.confirmed[name] for name in ("evaluations", "steps", "chosen"))
        confidence = 1 - ERROR / len(steps)
        found = "; ".join(
            f"the {name} (step {steps[name]:,}) {_versus(played[name], played['start'], confidence)}" for name in steps
        )
        start = played["start"]
        evidence = f"on {len(start.seeds)} fresh seeds the start has {criterion(start)} {mean(start):.4g}, {found}"
        if unpaired := why_unpaired(played["last"], start):
            evidence += f" (not paired: {unpaired})"
        if chosen is not None:
            return f"best: {self.path}, of step {steps[chosen]:,}: {evidence}"
        return f"best: the policy that this run began with. No other is better beyond doubt: {evidence}"

    def _candidate(self, start: Any, last: Any) -> Any:
        """A start that is not ours cannot be stored, so it stands in for itself."""
        device = next(last.parameters()).device if isinstance(last, nn.Module) else "cpu"
        handed_in = self._left_out is not None or not isinstance(start, nn.Module)
        return load_policy(self.candidate, device, base=start if handed_in else None)[0]

    def _keep(self, path: Path, policy: Any, step: int, evaluation: Evaluation) -> None:
        facts = {"step": step, "evaluation": evaluation.to_dict()}
        config = describe(policy, self._origin)
        options: dict[str, Any] = {"metrics": facts, "elsewhere": self._left_out, "overwrite": path.exists()}
        save(path, config=config, state=policy.state_dict(), **options)


def criterion(evaluation: Evaluation) -> str:
    """The quantity that is compared: "success", or "return" where the world reports no success."""
    return "return" if evaluation.success is None else "success"


def mean(evaluation: Evaluation) -> float:
    """The number by which evaluations are ranked: the success rate, or the mean return where it is not reported."""
    facts = evaluation.summary()
    return facts.get("success_rate", facts["return_mean"])


def difference(evaluation: Evaluation, start: Evaluation, confidence: float) -> tuple[float, float, float]:
    """(difference, low, high), as `compare` finds them. A single episode proves nothing."""
    if len(evaluation.seeds) < 2:
        return mean(evaluation) - mean(start), float("-inf"), float("inf")
    found = compare(evaluation, start, confidence)
    return found.difference, found.difference_low, found.difference_high


def _versus(evaluation: Evaluation, start: Evaluation, confidence: float) -> str:
    middle, low, high = difference(evaluation, start, confidence)
    return f"{mean(evaluation):.4g} ({middle:+.3g} [{low:+.3g}, {high:+.3g}] at {confidence:.3g})"


def _kept(path: Path) -> tuple[int, Evaluation | None]:
    if not path.is_dir():
        return 0, None
    facts = load(path).metrics
    return facts["step"], Evaluation.from_dict(facts["evaluation" if "evaluation" in facts else "exam"])  # an older one


def _confirmation(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        stored = facts["evaluations" if "evaluations" in facts else "exams"]  # an older one
        played = {name: Evaluation.from_dict(found) for name, found in stored.items()}
        return {"chosen": facts["chosen"], "steps": facts["steps"], "evaluations": played}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BurnishError(f"{path} is malformed; delete it, and the run confirms its result once more") from error
