"""Where a step's time goes: the kernels of one step by torch's profiler, beside the time of steps in a row.

python benchmarks/step_kernels.py --model roberta-large --batch-size 64 --length 32 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
from collections import Counter
from contextlib import ExitStack

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from mezzo.bench.compare import Case, build_setting, check_case, contender_factories, parse_space
from mezzo.bench.contenders import Step
from mezzo.bench.timing import WARM_UP, synchronized_time
from mezzo.config import from_mapping
from mezzo.errors import MezzoError

PRODUCTS = "matrix products"
PRODUCT = re.compile(r"nvjet|gemm|addmm|bmm|aten::mm")
"""Names of the libraries' own products, which differ by shape and are shown as one."""


class Contender:
    """A step with a counter."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.device, self.number = step, device, 0
        self.run_steps(WARM_UP[device.type] + 4)

    def run_steps(self, steps: int) -> float:
        """Run steps in a row; return the milliseconds of each."""
        start = synchronized_time(self.device)
        for _ in range(steps):
            self.step(self.number)
            self.number += 1
        return 1e3 * (synchronized_time(self.device) - start) / steps

    def profile(self, steps: int) -> tuple[Counter[str], Counter[str]]:
        """Milliseconds and launches of each kernel (on a CPU: of each operation) in one step."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on standard error
        on_gpu = self.device.type == "cuda"
        with torch_profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
            self.run_steps(steps)
        milliseconds: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in recorded.key_averages():
            name = PRODUCTS if PRODUCT.search(event.key) else re.sub(r"<.*|\(.*", "", event.key.removeprefix("void "))
            took = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            if took:
                milliseconds[name] += took / 1e3 / steps
                launches[name] += event.count / steps
        return milliseconds, launches


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="roberta-large")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--length", type=positive, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--space", default="lora,full,matrices:lowrank")
    parser.add_argument("--steps", type=positive, default=40, help="in a row, and again under the profiler")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--top", type=positive, default=12, help="kernels shown of each step")
    options = parser.parse_args()
    try:
        show(options)
    except MezzoError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def show(options: argparse.Namespace) -> None:
    config = from_mapping({"dtype": options.dtype, "batch_size": options.batch_size, "model": options.model})
    case = Case(config, options.model, options.batch_size, options.length, 1)
    check_case(case)
    setting = build_setting(case)
    with ExitStack() as stack:
        spaces = [parse_space(text) for text in options.space.split(",")]
        makers = contender_factories(config, setting, spaces, False, stack)
        contenders = {name: Contender(make(), setting.device) for name, make in makers.items()}
        rounds = [
            {name: contender.run_steps(options.steps) for name, contender in contenders.items()}
            for _ in range(options.rounds)
        ]
        for name, contender in contenders.items():
            spent, launches = contender.profile(options.steps)
            step = statistics.median(times[name] for times in rounds)
            print(f"{name}: {step:.2f} ms in a row, {spent.total():.2f} in {launches.total():.0f} kernels")
            for kernel, took in spent.most_common(options.top):
                each = 1e3 * took / launches[kernel]
                print(f"  {took:6.3f} ms  {launches[kernel]:5.0f} x {each:6.1f} µs  {kernel[:70]}")


if __name__ == "__main__":
    main()
