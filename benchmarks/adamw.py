"""Speed of the AdamW kernel against the memory of this machine and against torch.

    python benchmarks/adamw.py [--params 100000000] [--repeats 5] [--threads 1 2]

All competitors work on the same number of parameters and take turns within every repeat, so noise
of the machine falls on all alike; medians are reported. GB/s counts the bytes the split update
moves (read 14, write 12 per parameter) for everyone, so ratios of GB/s are ratios of time.
The last line is one JSON object.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from lohan import _native
from lohan.optimizer import AdamWSettings, SplitState, update_states

BYTES_PER_PARAM = 26
"""Read G16 2, P16 2, LO16 2, M32 4, V32 4; write all but G16."""

Competitor = Callable[[], None]


class SplitRun:
    """The kernel and the ceilings, on one split state with bf16 gradients."""

    def __init__(self, num_params: int) -> None:
        torch.manual_seed(0)
        self.grad = torch.empty(num_params, dtype=torch.bfloat16).normal_(0.0, 1e-2)
        masters = torch.empty(num_params).normal_(0.0, 2e-2)
        self.state = SplitState(
            p16=torch.empty(num_params, dtype=torch.bfloat16),
            lo16=torch.empty(num_params, dtype=torch.int16),
            m32=torch.zeros(num_params),
            v32=torch.zeros(num_params),
        )
        state = self.state
        _native.split_masters(
            p32=masters.data_ptr(),
            p16=state.p16.data_ptr(),
            lo16=state.lo16.data_ptr(),
            v32=state.v32.data_ptr(),
            num_elements=num_params,
            num_threads=2,
        )
        self.settings = AdamWSettings(lr=1e-5)
        self.num_steps = 0

    def update(self, num_threads: int) -> None:
        """One step of the kernel."""
        self.num_steps += 1
        update_states(
            self.grad,
            self.state,
            settings=self.settings,
            step=self.num_steps,
            num_threads=num_threads,
        )

    def stream(self, num_threads: int) -> None:
        """The same reads and writes in place, one exclusive-or instead of the arithmetic."""
        _native.stream_split(
            grad=self.grad.data_ptr(),
            p16=self.state.p16.data_ptr(),
            lo16=self.state.lo16.data_ptr(),
            m32=self.state.m32.data_ptr(),
            v32=self.state.v32.data_ptr(),
            num_elements=self.grad.numel(),
            num_threads=num_threads,
        )


class TorchRun:
    """torch's fused AdamW on fp32, with and without the casts bf16 training needs."""

    def __init__(self, num_params: int) -> None:
        self.grad16 = torch.empty(num_params, dtype=torch.bfloat16).normal_(0.0, 1e-2)
        self.param = torch.nn.Parameter(torch.empty(num_params).normal_(0.0, 2e-2))
        self.param.grad = self.grad16.float()
        self.param16 = self.param.detach().to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW([self.param], lr=1e-5, fused=True)

    def step(self, num_threads: int) -> None:
        """One fused step, gradients already fp32."""
        torch.set_num_threads(num_threads)
        self.optimizer.step()

    def step_with_casts(self, num_threads: int) -> None:
        """Gradient bf16 to fp32, fused step, weights fp32 to bf16."""
        torch.set_num_threads(num_threads)
        assert self.param.grad is not None
        self.param.grad.copy_(self.grad16)
        self.optimizer.step()
        self.param16.copy_(self.param.detach())


class CopyRun:
    """Plain copies between separate arrays: half of the bytes read, half written."""

    def __init__(self, num_params: int) -> None:
        self.source = torch.zeros(num_params * BYTES_PER_PARAM // 2, dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)

    def copy(self, num_threads: int) -> None:
        """One copy of 13 bytes per parameter."""
        torch.set_num_threads(num_threads)
        self.target.copy_(self.source)


def measure(num_params: int, num_repeats: int, thread_counts: Sequence[int]) -> dict[str, object]:
    """Return median GB/s per competitor and thread count, and the two ratios that matter."""
    ours, torchs, copies = SplitRun(num_params), TorchRun(num_params), CopyRun(num_params)
    kinds: dict[str, Callable[[int], None]] = {
        "lohan": ours.update,
        "in_place_stream": ours.stream,
        "plain_copy": copies.copy,
        "torch_fused_with_casts": torchs.step_with_casts,
        "torch_fused": torchs.step,
    }
    runs = {(kind, count): [] for count in thread_counts for kind in kinds}
    num_torch_threads = torch.get_num_threads()
    try:
        for repeat in range(num_repeats + 1):
            for count in thread_counts:
                # Streaming twice restores the state, so updates always see a valid one.
                for kind, run in kinds.items():
                    num_calls = 2 if kind == "in_place_stream" else 1
                    begun = time.perf_counter()
                    for _ in range(num_calls):
                        run(count)
                    seconds = (time.perf_counter() - begun) / num_calls
                    if repeat > 0:  # the first round warms up: pages, threads, torch's state
                        runs[kind, count].append(BYTES_PER_PARAM * num_params / seconds / 1e9)
    finally:
        torch.set_num_threads(num_torch_threads)
    result: dict[str, object] = {
        "params": num_params,
        "repeats": num_repeats,
        "isa": _native.kernel_isa(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    for count in thread_counts:
        median = {kind: statistics.median(runs[kind, count]) for kind in kinds}
        result[f"threads_{count}"] = {
            "median_gb_per_second": {kind: round(rate, 2) for kind, rate in median.items()},
            "all_gb_per_second": {
                kind: [round(rate, 2) for rate in runs[kind, count]] for kind in kinds
            },
            "share_of_in_place_stream": round(median["lohan"] / median["in_place_stream"], 3),
            "times_torch_fused_with_casts": round(
                median["lohan"] / median["torch_fused_with_casts"], 3
            ),
            "times_torch_fused": round(median["lohan"] / median["torch_fused"], 3),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    chosen = parser.parse_args(arguments)
    result = measure(chosen.params, chosen.repeats, chosen.threads)
    print(f"{chosen.params} parameters, kernels: {result['isa']}, {chosen.repeats} repeats, median")
    for count in chosen.threads:
        found = result[f"threads_{count}"]
        assert isinstance(found, dict)
        for kind, rate in found["median_gb_per_second"].items():
            milliseconds = BYTES_PER_PARAM * chosen.params / rate / 1e6
            print(f"  {count} threads  {kind:24s} {rate:7.2f} GB/s  {milliseconds:8.1f} ms")
        print(
            f"  {count} threads  lohan is {found['share_of_in_place_stream']:.2f} of the in-place "
            f"stream, {found['times_torch_fused_with_casts']:.2f}x torch fused with casts, "
            f"{found['times_torch_fused']:.2f}x torch fused"
        )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
