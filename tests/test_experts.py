"""What holds for every scripted expert of the arm: it works in either kind of action, and says what it needs."""

import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.build import ENVS, make_env
from burnish.sim.desk import ActionMode
from burnish.sim.experts import SCRIPTED, make_expert

pytestmark = pytest.mark.sim


# Errors are those of the hand, whatever the action means: taken as shares of the range of the joints they were a
# hundred times larger, and nobody succeeded. Over 32 episodes the worst of the tasks (stack) had 0.66 with joint
# targets; with 16 episodes three standard errors below it are 0.3.
@pytest.mark.parametrize("mode", ActionMode)
@pytest.mark.parametrize("name", SCRIPTED)
def test_a_noisy_expert_succeeds_in_either_kind_of_action(name, mode):
    config = ENVS[name].config(action=mode)
    env = make_env(config, 16)
    expert = make_expert(config, 16, "noisy", env=env)
    assert evaluate(ScaledEnv(env), expert, evaluation_seeds(16)).summary()["success_rate"] > 0.3


def test_what_an_expert_needs_is_said():
    reach = make_env("reach", 2)
    for wrong in (None, ScaledEnv(reach), make_env("reach", 3), make_env("push", 2)):
        with pytest.raises(BurnishError, match="give 2 worlds of reach as env="):
            make_expert("reach", 2, env=wrong)
    with pytest.raises(BurnishError, match="hopper has no scripted expert; let a policy act"):
        make_expert("hopper", 2)
