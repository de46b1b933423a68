"""Shared by the benchmarks: the machine, its matmul peak, latencies, a table, a JSON file and the RESULT line.

Speeds are given beside the machine's own limit, measured in the same run: a share of the limit says how well code uses
a machine, where a time also says how fast that machine is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"

# Processes that wanted to run, on the mean of the minute before this one began. Far above 0, others are measured too.
LOAD = os.getloadavg()[0]


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same measurements on less, in under a minute")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file (default: %(default)s)")
    return parser


def run_options(description: str | None, seeds: Sequence[int] = (0, 1, 2)) -> argparse.ArgumentParser:
    """Those of a benchmark of many long runs, each of which leaves one JSON file and is not repeated."""
    parser = options(description)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    return parser


def results_of(name: str, chosen: argparse.Namespace) -> Path:
    """The folder of these files; a quick run begins with none."""
    results: Path = chosen.out / (f"{name}_quick" if chosen.quick else name)
    if chosen.quick:
        shutil.rmtree(results, ignore_errors=True)
    return results


def play_apart(play: Callable[..., Any], cases: Sequence[Sequence[Any]], jobs: int) -> None:
    """``play`` of the words of each case, in a process of its own. One that fails is told, and the others go on."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for job in [pool.submit(play, *case) for case in cases]:
            if error := job.exception():
                sys.stderr.write(f"{error!r}\n")


def machine(device: torch.device) -> dict[str, Any]:
    """The facts that the numbers depend on."""
    found = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(LOAD, 2),
        "device": device.type,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def synchronize(device: torch.device) -> None:
    """A CUDA device works on while Python goes ahead; a clock may be read only once it has caught up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean duration of ``count`` calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def calls_for(duration: float, call: Callable[[], Any], device: torch.device) -> int:
    """How many calls take about ``duration`` seconds. It makes four, the first of which does not count."""
    call()
    return max(1, round(duration / min(seconds(call, 1, device) for _ in range(3))))


def latencies(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """The duration of each of ``count`` calls, in seconds. The garbage collector waits until they are over."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(count):
            found.append(seconds(call, 1, device))
    finally:
        gc.enable()
    return found


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(samples)
    position = percent / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


class MatmulPeak:
    """FLOP/s of square matrix products, of the size at which this machine is fastest.

    The size is chosen once; ``measure`` is called beside each timed piece of work, so that both see the machine in the
    same mood: frequency and neighbours change from second to second.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        sizes: list[int] = [2048, 4096, 8192] if device.type == "cuda" else [256, 512, 1024]
        random = torch.Generator(device).manual_seed(0)
        trials: dict[int, Callable[[], Any]] = {}
        for size in sizes:
            a, b = torch.randn((2, size, size), generator=random, device=device).to(dtype)
            trials[size] = partial(torch.mm, a, b, out=torch.empty_like(a))
        # In turns, and the best of many: what else runs can make a product slower, but not faster.
        times = dict.fromkeys(sizes, math.inf)
        for _ in range(20):
            for size, product in trials.items():
                product()
                times[size] = min(times[size], seconds(product, 1, device))
        self.size = max(sizes, key=lambda size: size**3 / times[size])
        self._multiply, self._time = trials[self.size], times[self.size]

    def measure(self, duration: float) -> float:
        """FLOP/s over about ``duration`` seconds; a multiplication and an addition count as two."""
        count = max(1, round(duration / self._time))
        return 2 * self.size**3 / seconds(self._multiply, count, self.device)


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Aligned text; ``columns`` maps a row's keys to formats such as ``",.0f"``. Where a row has None stands a dash."""
    if not rows:
        return "no run yet"
    cells = [list(columns)]
    cells += [["-" if row[key] is None else format(row[key], kind) for key, kind in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if isinstance(rows[0][key], str) else ">" for key in columns]
    lines = ["  ".join(map(format, line, map("{}{}".format, sides, widths))) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for row in rows:
        cells = ("-" if row[key] is None else format(row[key], kind) for key, kind in columns.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(path: Path, *tables: str) -> None:
    """Tables in Markdown beside the JSON file, for the documents to point at."""
    text = f"Written by `python benchmarks/{Path(sys.argv[0]).name}`.\n\n" + "\n".join(tables)
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def embed(document: Path, name: str, text: str) -> None:
    """Put a table where a document keeps its place, between `<!-- name -->` and `<!-- end -->`."""
    before, mark, rest = document.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not mark or not end:
        raise ValueError(f"{document} has no place for {name}: a line <!-- {name} --> and a line <!-- end -->")
    document.write_text(f"{before}{mark}{text}{end}{after}", encoding="utf-8")


def publish(path: Path, report: Mapping[str, Any], text: str, result: Mapping[str, float]) -> None:
    """Write the JSON file; print the table, where the file lies, and the RESULT line, with four digits a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **report, "result": result}
    path.write_text(json.dumps(dated, indent=1) + "\n", encoding="utf-8")
    line = " ".join(f"{key}={value:.4g}" for key, value in result.items())
    sys.stdout.write(f"{text}\n\nwritten to {path}\nRESULT {line}\n")
