"""pi0 (Black et al. 2024, arXiv 2410.24164) and pi0.5 (2504.16054): SmolVLA's plan on PaliGemma (2407.07726).

Unlike in `smolvla.py`, pictures are padded at all sides, and their tokens are not scaled, while words are; the
layers are Gemma's; the expert stands beside every layer of the language model, and its actions see each other in both
directions. So a shorter chunk is another policy, not the head of a longer one.

    pi0     the state is a token of the expert, before the actions. It sees no action and no time, so its keys are made
            once for an observation, like those of the prefix
    pi0.5   the state is written into the prompt, as numbers of 256 bins over [-1, 1]; the time scales, shifts and gates
            every layer of the expert (AdaRMS) instead of being a part of each action's token

**Departures.** A state is not padded before it is written into the prompt, as in openpi and LeRobot 0.5; LeRobot 0.4.4
wrote 32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import BurnishError
from ..core.types import Obs
from .expert import Expert, FlowModel, time_embedding
from .layers import GEMMA, Keys
from .prefix import Parts, Prefix, TextModel, VisionLanguageModel, VisionModel, block, joined, resized
from .sizes import ExpertConfig, LanguageConfig, VisionConfig
from .smolvla import SmolVLA, SmolVLAConfig

BINS = 256  # of each number of a state that is written into a prompt
PROMPT = "Task: {task}, State: {state};\nAction: "


@dataclass
class Pi0Config(SmolVLAConfig):
    """Settings of a pi0 or pi0.5."""

    # model that looks at pictures
    vision: VisionConfig = field(default_factory=lambda: VisionConfig(224, 14, 1152, 27, 16, 4304, 1))
    # language model
    language: LanguageConfig = field(default_factory=lambda: LanguageConfig(257152, 2048, 18, 8, 1, 256, 16384))
    # model that makes actions
    expert: ExpertConfig = field(default_factory=lambda: ExpertConfig(1024, 18, 4096, 1))
    adaptive: bool = False  # pi0.5: the time scales every layer of the expert, and the state is a part of the prompt
    expert_head: bool = False  # weights of a way from the expert to words are kept, unused, to be written again

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert.layers != self.language.layers or self.expert.self_every != 1:
            raise BurnishError(
                f"the expert of a pi0 stands beside every layer of its language model: expert.layers="
                f"{self.expert.layers} must be {self.language.layers}, and expert.self_every={self.expert.self_every} 1"
            )
        if self.vision.shuffle != 1 or self.vision.late or self.language.special:
            raise BurnishError("a pi0 takes pictures as they are: vision.shuffle=1, vision.late=false, no marks")


class PaliGemma(VisionLanguageModel):
    """SigLIP, a linear map and Gemma. Its way back to words, which nothing here uses, is its table of words; other
    weights of it are kept (``lm_head``)."""

    def __init__(self, vision: VisionConfig, language: LanguageConfig) -> None:
        nn.Module.__init__(self)
        self.side, self.width, self.special = vision.side, language.width, language.special
        self.tokens = vision.patches
        self.model = Parts(
            vision_tower=Parts(vision_model=VisionModel(vision, language.width)),
            multi_modal_projector=Parts(linear=nn.Linear(vision.width, language.width)),
            language_model=TextModel(language, GEMMA),
        )
        if language.lm_head:
            self.lm_head = nn.Linear(language.width, language.vocabulary, bias=False)

    @property
    def text(self) -> TextModel:
        return self.model.language_model

    def seen(self, picture: Tensor, said: Tensor | None = None) -> Tensor:
        shown = resized(picture, self.side, centred=True).to(self.dtype)
        return self.model.multi_modal_projector.linear(self.model.vision_tower.vision_model(shown, said))


class Pi0Model(FlowModel):
    """Everything that the published weights hold, under their names."""

    def __init__(self, config: Pi0Config, state_dim: int, action_dim: int) -> None:
        nn.Module.__init__(self)
        width, language, self.adaptive = config.expert.width, config.language, config.adaptive
        self.periods = config.expert.min_period, config.expert.max_period
        acting = Parts(model=Expert(language, config.expert, GEMMA, causal=False, timed=config.adaptive))
        if config.expert_head:
            acting.lm_head = nn.Linear(width, language.vocabulary, bias=False)
        self.paligemma_with_expert = Parts(paligemma=PaliGemma(config.vision, language), gemma_expert=acting)
        self.action_in_proj = nn.Linear(action_dim, width)
        self.action_out_proj = nn.Linear(width, action_dim)
        if config.adaptive:
            self.time_mlp_in, self.time_mlp_out = (nn.Linear(width, width) for _ in range(2))
        else:
            self.state_proj = nn.Linear(state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def expert(self) -> Expert:
        return self.paligemma_with_expert.gemma_expert.model

    def hidden(self, x: Tensor, tau: Tensor, prefix: Prefix) -> Tensor:
        if not self.adaptive:
            return self.expert(self.timed(x, tau), prefix)
        token = self.action_in_proj(x)
        time = time_embedding(tau, token.shape[2], *self.periods).to(token.dtype)
        time = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
        return self.expert(token, prefix, time)


class Pi0(SmolVLA):
    """A flow policy that reads pictures, the words of its instruction, and the state of the robot."""

    config: Pi0Config
    unsaid = 1  # <image>

    def made(self, state_dim: int, action_dim: int) -> FlowModel:
        return Pi0Model(self.config, state_dim, action_dim)

    @property
    def vlm(self) -> VisionLanguageModel:
        return self.model.paligemma_with_expert.paligemma

    @property
    def cond_dim(self) -> int:
        return self.config.language.width + (0 if self.config.adaptive else self.config.expert.width)

    def is_encoder(self, name: str) -> bool:
        return name.startswith("model.paligemma_with_expert.paligemma.")

    def adapts(self, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "model" and (
            len(parts) == 2 or (parts[2:3] == ["gemma_expert"] and parts[-1] in ("q_proj", "v_proj"))
        )

    def with_state(self, obs: Obs, mean: Tensor, keys: list[Keys]) -> Prefix:
        mean = mean.to(self.dtype)
        before = [Keys(each.to(self.dtype), values.to(self.dtype), seen) for each, values, seen in keys]
        length = before[0].seen[:, 0].sum(1)
        if self.config.adaptive:
            return Prefix(before, mean, length)
        token = self.state_token(obs)[:, None]
        valid = torch.ones(len(token), 1, dtype=torch.bool, device=token.device)
        out, own = block(self.model.expert, token, valid, before)
        return Prefix(joined(before, own), torch.cat([mean, out[:, 0]], 1), length + 1)

    def _words(self, obs: Obs) -> Tensor | None:
        """Of pi0.5 the whole prompt: the task and the state."""
        tokens = super()._words(obs)
        if not self.config.adaptive:
            return tokens
        words = getattr(self, "words", None)
        if tokens is None or words is None:
            raise BurnishError(
                "pi0.5 reads its state in its prompt, so it needs instructions and its tokenizer; give policy.words=..."
            )
        edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)[:-1]
        bins = (torch.bucketize(self.state_of(obs).double().cpu(), edges, right=True) - 1).tolist()
        prompts = []
        for text, state in zip(words.texts(tokens), bins, strict=True):
            task = text.strip().replace("_", " ").replace("\n", " ")
            prompts.append(PROMPT.format(task=task, state=" ".join(map(str, state))))
        return words.ids(prompts, end="").to(tokens.device)
