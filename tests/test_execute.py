"""However an update is executed, it does the same; where it cannot be executed so, a sentence says why."""

from typing import Any, NamedTuple

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution, Precision, autocast, execution

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Result(NamedTuple):
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


class Regression:
    """What the update of a learner holds: noise from an explicit generator, an optimizer, and a moving average."""

    def __init__(self, device: str, noise_seed: int = 1, adam: bool = True) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        self.net = net.to(device, torch.float64)
        self.average = [p.detach().clone() for p in self.net.parameters()]
        if adam:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2, capturable=device == "cuda")
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-2, momentum=0.9)
        self.generator = torch.Generator(device).manual_seed(noise_seed)

    def update(self, batch: dict[str, torch.Tensor], scale: float = 0.1) -> Result:
        self.optimizer.zero_grad(set_to_none=True)
        x = batch["x"]
        noise = torch.randn(x.shape, generator=self.generator, device=x.device, dtype=x.dtype)
        loss = (self.net(x + scale * noise) - batch["y"]).square().mean()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for mean, p in zip(self.average, self.net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return Result(loss.detach(), {"noise": noise.mean()})


def batch(seed: int, device: str, rows: int = 16) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    return {"x": x, "y": 3 * x[:, :2]}


def train(device: str, *modes: Execution, noise_seed: int = 1, adam: bool = True) -> list[torch.Tensor]:
    """Everything that eight updates produce: losses, metrics, then weights and their averages."""
    learner = Regression(device, noise_seed, adam)
    update: Any = learner.update
    for mode in modes:
        update = execution(update, mode, device=device, generators=[learner.generator] if device == "cuda" else [])
    results = [update(batch(seed, device)) for seed in range(8)]
    metrics = [r.metrics["noise"] for r in results]
    return [*(r.loss for r in results), *metrics, *map(torch.clone, learner.net.parameters()), *learner.average]


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def test_eager_is_the_function_itself():
    update = Regression("cpu").update
    assert execution(update, Execution.eager, device="cpu") == update


@pytest.mark.slow
def test_compile_equals_eager():
    eager = train("cpu", Execution.eager, adam=False)
    # float64 rounds at 1e-16; eight small steps on numbers of about ten leave three orders of magnitude to spare.
    assert difference(eager, train("cpu", Execution.compile, adam=False)) < 1e-12
    assert difference(eager, train("cpu", Execution.eager, noise_seed=2, adam=False)) > 1e-3  # The comparison can fail.
    assert eager[7] < eager[0]


def test_cudagraph_on_the_cpu_is_refused():
    with pytest.raises(BurnishError, match="execution=cudagraph needs a CUDA device, but device=cpu"):
        execution(lambda: None, Execution.cudagraph, device="cpu")


@pytest.mark.gpu
@needs_cuda
def test_cudagraph_equals_eager_bit_for_bit():
    eager = train("cuda", Execution.eager)
    assert difference(eager, train("cuda", Execution.cudagraph)) == 0
    assert difference(eager, train("cuda", Execution.cudagraph, noise_seed=2)) > 1e-3
    assert eager[7] < eager[0]


@pytest.mark.gpu
@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("modes", [[Execution.compile], [Execution.compile, Execution.cudagraph]], ids=len)
def test_compile_on_the_gpu_equals_eager_alone_and_under_a_graph(modes):
    assert difference(train("cuda", Execution.eager, adam=False), train("cuda", *modes, adam=False)) < 1e-12
    # A compiled Adam forms 1 - 0.999^t in float32: the step of at most 1e-2 is wrong by half of 6e-8 / 1e-3 of itself,
    # eight times over. The weights, after eight losses and eight metrics, show it undiluted.
    adam = difference(train("cuda", Execution.eager)[16:], train("cuda", *modes)[16:])
    assert adam < 8 * 1e-2 * 3e-5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("change", ["rows", "constant", "key", "dtype"])
def test_cudagraph_refuses_other_shapes_and_constants(change):
    learner = Regression("cuda")
    update = execution(learner.update, Execution.cudagraph, device="cuda", generators=[learner.generator])
    for seed in range(5):
        update(batch(seed, "cuda"), 0.1)
    changed: dict[str, Any] = {
        "rows": (batch(5, "cuda", rows=8), 0.1),
        "constant": (batch(5, "cuda"), 0.2),
        "key": ({**batch(5, "cuda"), "z": torch.zeros(1)}, 0.1),
        "dtype": ({k: x.float() for k, x in batch(5, "cuda").items()}, 0.1),
    }
    with pytest.raises(BurnishError, match="recorded a call with argument"):
        update(*changed[change])


@pytest.mark.gpu
@needs_cuda
def test_cudagraph_refuses_what_cannot_be_recorded():
    update = execution(lambda x: x.sum().item(), Execution.cudagraph, device="cuda")
    with pytest.raises(BurnishError, match=r"cannot record the update: .*captur"):
        for _ in range(5):
            update(torch.ones(3, device="cuda"))


def test_autocast_changes_the_arithmetic_and_not_the_weights():
    net, x = torch.nn.Linear(8, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with autocast("cpu", Precision.float32):
        assert net(x).dtype is torch.float32
    with autocast("cpu", Precision.bfloat16):
        assert net(x).dtype is torch.bfloat16
    assert net.weight.dtype is torch.float32


def test_autocast_refuses_other_devices():
    with pytest.raises(BurnishError, match="needs device=cuda or cpu, but device=mps"):
        autocast("mps", Precision.bfloat16)
    autocast("mps", Precision.float32)
