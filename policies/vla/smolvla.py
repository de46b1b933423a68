"""SmolVLA (Shukor et al. 2025, arXiv 2506.01844): a flow policy made of a vision-language model and an action expert.

Its chain lives in the model's own units: a state (B, H, D) is a chunk that was normalised as the data were, and padded
with zeros to D numbers an action. `decode` leads from there to actions in [-1, 1], `in_chain` back. The published time
runs from 1 (noise) to 0 (data); here t = 1 - tau, so v(x, t) = -v_published(x, 1 - t), on the same grid.

``tiny_vla`` is the same class with sizes that one core trains in minutes.

**Departures.** A small model learns from several draws of noise and time for each window, one of them pure noise: they
cost little, and there nothing but the observation says where to go. Published is one draw. The expert's keys of an
observation are made once, not at each step of a generation. The loss counts padded coordinates too, as LeRobot did
before 0.5: a fresh model would otherwise sample from states it never saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..chain import masked_mean, require_chunk, require_steps
from ..core.config import LATER
from ..core.errors import BurnishError
from ..core.execute import Precision
from ..core.normalize import FLOOR, Scaling
from ..core.ranges import check_ranges
from ..core.scale import scale_of
from ..core.seed import Generator, normal
from ..core.spec import ObsSpec, PolicySpec
from ..core.tree import rows
from ..core.types import Obs
from ..features import EMBEDDINGS, FEATURES, KEYS
from ..flow import FlowConfig, FlowPolicy, TimeSampling, sample_time
from ..lerobot.features import Feature, Inputs, Kind
from ..lerobot.scaling import FeatureScaling, Normalization
from ..trainable import Remember
from .expert import FlowModel
from .layers import Keys
from .prefix import Prefix, VisionLanguageModel
from .sizes import ExpertConfig, LanguageConfig, VisionConfig, require_sizes

TIMES = FlowConfig(time=TimeSampling.beta, beta_a=1.5)
LATEST = 0.999  # of the times that are trained: tau is at least 0.001
MOST_CAMERAS = 8


@dataclass
class SmolVLAConfig:
    """Settings of a vision-language-action model."""

    steps: int = 10  # Euler steps when acting
    # features in the order in which the model sees them; empty: all cameras by name, and the state
    features: list[Feature] = field(default_factory=list)
    action: Normalization = Normalization.min_max  # normalisation of actions; of a fresh model by their limits
    state_dim: int = 32  # numbers that a state is padded to; 0: none are added
    action_dim: int = 32  # numbers that an action is padded to; 0: none are added
    vision: VisionConfig = field(default_factory=VisionConfig)  # model that looks at pictures
    language: LanguageConfig = field(default_factory=LanguageConfig)  # language model
    expert: ExpertConfig = field(default_factory=ExpertConfig)  # model that makes actions
    frozen: bool = True  # the vision-language model stays as it is, in every kind of training
    # number format of the vision-language model while it is frozen; what is trained stays in float32
    frozen_dtype: Precision = field(default=Precision.float32, metadata=LATER)
    draws: int = 1  # noises and times that each window of imitation is learnt at; of several, the first is pure noise
    bfloat16: list[str] = field(default_factory=list)  # beginnings of the names of weights that were stored so

    def __post_init__(self) -> None:
        require_steps(self.steps)
        check_ranges(self, {"[0, 4096]": "state_dim action_dim", "[1, 64]": "draws"}, "policy.")
        require_sizes(self.vision, self.language, self.expert)
        if self.frozen_dtype is not Precision.float32 and not self.frozen:
            raise BurnishError(
                f"policy.frozen_dtype={self.frozen_dtype.value} is for a model that stays as it is: a step of training "
                "is smaller than such a number can change; take policy.frozen=true, or frozen_dtype=float32"
            )


@dataclass
class TinyVLAConfig(SmolVLAConfig):
    """Settings of a small vision-language-action model, trained from nothing."""

    steps: int = 4  # Euler steps when acting
    state_dim: int = 0  # numbers that a state is padded to; 0: none are added
    action_dim: int = 0  # numbers that an action is padded to; 0: none are added
    # model that looks at pictures
    vision: VisionConfig = field(
        default_factory=lambda: VisionConfig(32, 4, 64, 2, 4, 128, 2, stem=True, instance_norm=True, film=True)
    )
    # language model
    language: LanguageConfig = field(default_factory=lambda: LanguageConfig(1024, 64, 2, 4, 2, 16, 128))
    expert: ExpertConfig = field(default_factory=lambda: ExpertConfig(48, 2, 128))  # model that makes actions
    frozen: bool = False  # the vision-language model stays as it is, in every kind of training
    draws: int = 4  # noises and times that each window of imitation is learnt at; of several, the first is pure noise


class SmolVLA(FlowPolicy):
    """A flow policy that reads pictures, the words of its instruction, and the state of the robot."""

    unsaid = 0  # tokens that its tokenizer knows beyond its table of words, which no instruction may hold

    def __init__(self, spec: PolicySpec, config: SmolVLAConfig) -> None:
        nn.Module.__init__(self)
        if spec.history != 1 or spec.start != 0:
            raise BurnishError("a vision-language-action model observes one frame, and its chunk begins now")
        sensed = {key: shape for key, shape in spec.obs.shapes.items() if key != "tokens"}
        features = list(config.features) or usual_features(sensed)
        self.config = replace(config, features=features)
        self.inputs = Inputs(replace(spec, obs=ObsSpec(sensed)), features)
        state, dim = self.inputs.width(Kind.state), spec.action.dim
        state_dim, action_dim = config.state_dim or state or 1, config.action_dim or dim
        if state > state_dim or dim > action_dim:
            raise BurnishError(
                f"a state of {state} numbers and actions of {dim} do not fit a model that is made for {state_dim} and "
                f"{action_dim} at most"
            )
        if not 1 <= len(self.inputs.cameras()) <= MOST_CAMERAS:
            raise BurnishError(
                f"a vision-language-action model needs 1 to {MOST_CAMERAS} cameras, and the observations are "
                f"{sorted(spec.obs.shapes)}"
            )
        if (known := getattr(spec.words, "vocabulary", 0)) > config.language.vocabulary + self.unsaid:
            raise BurnishError(
                f"policy.language.vocabulary={config.language.vocabulary} must be at least {known}: so many tokens the "
                "tokenizer knows"
            )
        self.spec = replace(spec, noise_shape=(spec.horizon, action_dim), goal_free=False)
        self.action_scaling = FeatureScaling(config.action, (dim,))
        if config.action is Normalization.min_max:  # of a fresh model; one that was saved brings its own
            self.action_scaling.first.copy_(torch.tensor(spec.action.low))
            self.action_scaling.second.copy_(torch.tensor(spec.action.high))
        self.model: Any = self.made(state_dim, action_dim)
        if config.frozen_dtype is Precision.bfloat16:
            self.vlm.bfloat16()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not self.is_frozen(name))

    def made(self, state_dim: int, action_dim: int) -> FlowModel:
        """The networks, with fresh weights."""
        vlm = VisionLanguageModel(self.config.vision, self.config.language)
        return FlowModel(vlm, self.config.language, self.config.expert, state_dim, action_dim)

    @property
    def step_size(self) -> float:
        return 0.0

    @property
    def cond_dim(self) -> int:
        return 2 * self.config.language.width

    @property
    def normalizer(self) -> SmolVLA:
        """The part that imitation fits to its data: this policy itself."""
        return self

    def fit(self, columns: Obs, kind: Scaling) -> None:
        """The normalisation of the state, which is that of ``features`` whatever ``kind``."""
        del kind
        for feature in self.inputs.features:
            if feature.normalization is Normalization.mean_std and feature.key in columns:
                data, scaling = columns[feature.key].double(), self.inputs.scaling(feature)
                std = data.std(0, correction=0)
                scaling.first.copy_(data.mean(0))
                scaling.second.copy_(torch.where(std < FLOOR, 1.0, std))

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is never trained: those of the vision-language model, or those that nothing reads."""
        return ".lm_head." in name or (self.config.frozen and self.is_encoder(name))

    def is_encoder(self, name: str) -> bool:
        """Whether a parameter belongs to what looks and reads, and not to what acts."""
        return name.startswith("model.vlm_with_expert.vlm.")

    def adapts(self, name: str) -> bool:
        """Whether low-rank changes are made to a layer: as published, to the expert's queries and values and to the
        five maps between numbers and tokens."""
        parts = name.split(".")
        return parts[0] == "model" and (
            len(parts) == 2 or (parts[2:3] == ["lm_expert"] and parts[-1] in ("q_proj", "v_proj"))
        )

    def in_chain(self, action: Tensor) -> Tensor:
        actuator = scale_of(self.spec.action, action.device).to_actuator(action)
        width = (self.spec.noise_shape or (0, 0))[1]
        return F.pad(self.action_scaling(actuator), (0, width - action.shape[-1]))

    def decode(self, x: Tensor) -> Tensor:
        real = x[..., : self.spec.action.dim]
        return scale_of(self.spec.action, x.device).to_unit(self.action_scaling.inverse(real))

    def velocity(self, x: Tensor, t: Tensor, d: Tensor | float, cond: Prefix) -> Tensor:
        del d
        return -self.model.velocity(x, (1 - t).float(), cond)

    def encode(self, obs: Obs) -> Prefix:
        """Of an observation as it is, or as it is remembered."""
        seen = None if KEYS in obs else self._look(obs)
        mean, keys = self._remembered(obs) if seen is None else self.vlm.understand(seen, self._words(obs))
        return self.with_state(obs, mean, keys)

    def with_state(self, obs: Obs, mean: Tensor, keys: list[Keys]) -> Prefix:
        """The whole of an observation, of which pictures and words were understood."""
        prefix = self.vlm.add_state(self.state_token(obs), mean, keys)
        return self.model.vlm_with_expert.lm_expert.mapped(prefix)

    def state_token(self, obs: Obs) -> Tensor:
        state = self.state_of(obs)
        return self.model.state_proj(F.pad(state, (0, self.model.state_proj.in_features - state.shape[1])))

    def state_of(self, obs: Obs) -> Tensor:
        """(B, S): the numbers of the state, normalised."""
        own = self.inputs(obs, self.dtype, [Kind.state])[Kind.state]
        return torch.cat([*own, self.model.action_in_proj.weight.new_zeros(len(next(iter(obs.values()))), 0)], 1)

    @torch.no_grad()
    def features(self, obs: Obs, level: Remember) -> Obs:
        """``obs`` with the output of the vision-language model in the place of its pictures (`features.py`)."""
        if level is Remember.pictures or EMBEDDINGS in obs or KEYS in obs:
            return obs
        seen = self._look(obs)
        mean, keys = self.vlm.understand(seen, self._words(obs))
        kept = {key: obs[key] for key in self.spec.obs.shapes if not key.startswith("image.")}
        if level is Remember.embeddings:
            return {**kept, FEATURES: mean, EMBEDDINGS: seen}
        return {**kept, FEATURES: mean, KEYS: torch.stack([torch.stack(each[:2], 1) for each in keys], 1)}

    def feature_shapes(self, level: Remember) -> ObsSpec:
        """Of ``features``."""
        if level is Remember.pictures:
            return self.spec.obs
        shapes, language = self.spec.obs.shapes, self.config.language
        kept = {key: shape for key, shape in shapes.items() if not key.startswith("image.")}
        seen = len(self.inputs.cameras()) * self.vlm.picture_tokens
        form = (seen, language.width)
        if level is Remember.keys:
            count = seen + sum(shapes.get("tokens", ()))
            form = (language.layers, 2, count, language.key_heads, language.head_dim)
        return ObsSpec({**kept, FEATURES: (language.width,), f"{FEATURES}.{level.value}": form})

    @property
    def vlm(self) -> VisionLanguageModel:
        return self.model.vlm_with_expert.vlm

    @property
    def dtype(self) -> torch.dtype:
        """Of what acts."""
        return self.model.action_in_proj.weight.dtype

    def _look(self, obs: Obs) -> Tensor:
        """The tokens of all pictures."""
        if EMBEDDINGS in obs:
            return obs[EMBEDDINGS]
        pictures = self.inputs(obs, self.dtype)[Kind.visual]
        said = self.vlm.sum_of(self._words(obs)) if self.config.vision.film else None
        return self.vlm.look(pictures, said=said)[0]

    def _remembered(self, obs: Obs) -> tuple[Tensor, list[Keys]]:
        self.feature_shapes(Remember.keys).check(obs)
        mean, kept = obs[FEATURES], obs[KEYS]
        seen = torch.ones(len(mean), 1, kept.shape[3], dtype=torch.bool, device=mean.device)
        if (words := self._words(obs)) is not None:
            seen[:, 0, -words.shape[1] :] = words >= 0
        return mean, [Keys(each[:, 0], each[:, 1], seen) for each in kept.unbind(1)]

    def _words(self, obs: Obs) -> Tensor | None:
        if "tokens" not in self.spec.obs.shapes:
            return None
        ObsSpec({"tokens": self.spec.obs.shapes["tokens"]}).check(obs)
        tokens, known = obs["tokens"], self.config.language.vocabulary
        # A recording cannot ask; the calls before it did.
        asks = tokens.device.type == "cpu" or (self.unsaid and not torch.cuda.is_current_stream_capturing())
        if asks and tokens.numel() and int(tokens.max()) >= known:
            raise BurnishError(
                f"an instruction has the token {int(tokens.max())}, and this model knows {known}: it was made with "
                "another tokenizer"
            )
        return tokens

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        del drop  # there are no goals
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        draws = self.config.draws  # the observation is encoded once for them
        data = self.in_chain(action)
        shape = len(data), draws  # drawn row by row, whichever rows of a batch these are
        noise = normal((*shape, *data.shape[1:]), generator, device=data.device, dtype=data.dtype).flatten(0, 1)
        t = LATEST * sample_time(TIMES, shape, generator, data).flatten()
        data = data.repeat_interleave(draws, 0)
        if draws > 1:
            t[::draws] = 0.0
        cond = self.encode(obs).repeat(draws)
        found = self.velocity(torch.lerp(noise, data, rows(t, data)), t, 0.0, cond)
        real = None if mask is None else mask.repeat_interleave(draws, 0)
        return masked_mean((found - (data - noise)).square(), real).unflatten(0, (-1, draws)).mean(1)


def usual_features(shapes: dict[str, tuple[int, ...]]) -> list[Feature]:
    """Of a model that begins from nothing: its cameras by name, and the state."""
    cameras = [Feature(key, Kind.visual, Normalization.identity) for key in sorted(shapes) if key.startswith("image.")]
    state = [Feature("state", Kind.state, Normalization.mean_std)] if "state" in shapes else []
    if rest := set(shapes) - {feature.key for feature in [*cameras, *state]}:
        raise BurnishError(
            f"a vision-language-action model reads pictures, words and the state, and not {sorted(rest)}; leave them "
            "out"
        )
    return [*cameras, *state]
