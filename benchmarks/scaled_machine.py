"""A small model on a machine scaled down with it, so that a step keeps its proportions.

Owns the arithmetic from the paper's machine and one of its workloads to an emulated machine on
which each part (GPU, copies, drives, CPU updates) is busy for the same share of a step. Used by
`iteration.py`.

Note "Scale". A step of the reference keeps each part busy for so many seconds; a step of the small
model must keep it busy for `time_scale` times as many. So every rate in bytes or parameters is
multiplied by (parameters of the small model / of the reference) / time_scale, and the compute rate
by (FLOPs of a step / of the reference) / time_scale. The small model has as many tokens per hidden
unit as the reference, so its activations weigh as much against its weights. RAM goes with the
parameters, GPU memory with what one block's backward pass holds. What published systems add to a
block's pass is scaled so that it takes the same share of a step.
"""

import pathlib
import sys
from dataclasses import dataclass, replace

import torch

from lohan.device.emulated import EmulatedRates
from lohan.engine.planning.traced_model import TracedModel, sizes_of
from lohan.hardware import machine_named
from lohan.hardware.machine import Machine, Ssd, SsdPath
from lohan.model import shape_of
from lohan.model.shape import ModelShape
from lohan.plan.system import DrivingRates, System

# Emulated drives stand with the other stand-ins of the tests.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from support.paced_engine import LinkRates

REFERENCE_MACHINE, REFERENCE_MODEL = "paper-4090", "gpt-70b"
REFERENCE_BATCH, REFERENCE_SEQUENCE = 32, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """A Llama whose blocks fill whole pages on SSD, so that bytes are what plans say."""

    hidden: int = 64
    intermediate: int = 170
    num_layers: int = 20
    num_heads: int = 2
    vocabulary: int = 384
    batch: int = 16
    sequence: int = 16

    def build(self) -> torch.nn.Module:
        """The same weights every time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=max(64, self.sequence),
            use_cache=False,
            tie_word_embeddings=False,
        )
        return LlamaForCausalLM(config).to(torch.bfloat16).train()

    def batch_of(self, step: int) -> dict[str, torch.Tensor]:
        """Random tokens, the same for a step every time."""
        generator = torch.Generator().manual_seed(step)
        size = (self.batch, self.sequence)
        tokens = torch.randint(0, self.vocabulary, size, generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def shape(self) -> ModelShape:
        """As the engine will trace it."""
        batch = self.batch_of(0)
        traced = TracedModel(
            self.build(),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            example=batch,
            loss_fn=None,
        )
        return traced.shape(sizes_of([batch]), [batch])


def step_flops(shape: ModelShape, batch: int, sequence: int) -> float:
    """Forward and backward, nothing recomputed."""
    return sum(
        block.forward_flops.at(batch, sequence) + block.backward_flops.at(batch, sequence)
        for block in shape.blocks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors from the reference to the small model."""

    time: float
    """Seconds of a step over those of the reference."""
    parameters: float
    flops: float
    blocks: float
    block_activations: float

    @staticmethod
    def of(small: SmallModel, shape: ModelShape, time_scale: float) -> "Scale":
        """From the reference workload to a step of the small model."""
        reference = shape_of(REFERENCE_MODEL)
        sizes, small_sizes = (REFERENCE_BATCH, REFERENCE_SEQUENCE), (small.batch, small.sequence)
        return Scale(
            time=time_scale,
            parameters=shape.num_parameters / reference.num_parameters,
            flops=step_flops(shape, *small_sizes) / step_flops(reference, *sizes),
            blocks=shape.num_blocks / reference.num_blocks,
            block_activations=max(kind.saved_bytes.at(*small_sizes) for kind in shape.kinds)
            / max(kind.saved_bytes.at(*sizes) for kind in reference.kinds),
        )

    @property
    def rates(self) -> float:
        """Of everything that counts bytes or parameters per second."""
        return self.parameters / self.time

    def machine(self, num_ssds: int, *, extra_ram_bytes: int, gpu_factor: float) -> Machine:
        """The reference machine with some number of drives, scaled down.

        `extra_ram_bytes` are what small buffers lose to rounding and the engine keeps for itself,
        `gpu_factor` allows for temporaries that weigh more in a small model.
        """
        found = machine_named(REFERENCE_MACHINE).with_ssds(num_ssds)
        read, write = found.ssd_read_bytes_per_second, found.ssd_write_bytes_per_second
        return replace(
            found,
            name=f"{found.name} scaled down",
            gpu=replace(
                found.gpu,
                memory_bytes=int(found.gpu.memory_bytes * self.block_activations * gpu_factor),
                flops_per_second=found.gpu.flops_per_second * self.flops / self.time,
            ),
            ram_bytes=int(found.ram_bytes * self.parameters) + extra_ram_bytes,
            ram_to_gpu_bytes_per_second=found.ram_to_gpu_bytes_per_second * self.rates,
            gpu_to_ram_bytes_per_second=found.gpu_to_ram_bytes_per_second * self.rates,
            cpu_update_parameters_per_second=found.cpu_update_parameters_per_second * self.rates,
            # All drives and their path as one drive.
            ssds=(
                Ssd(
                    name="emulated drive",
                    read_bytes_per_second=read * self.rates,
                    write_bytes_per_second=write * self.rates,
                    capacity_bytes=found.ssd_capacity_bytes,
                    endurance_bytes=int(found.ssd_endurance_bytes),
                    price_dollars=0.0,
                ),
            ),
            ssd_path=SsdPath(
                is_duplex=found.ssd_path.is_duplex,
                read_ceiling_bytes_per_second=read,
                write_ceiling_bytes_per_second=write,
            ),
        )

    def system(self, system: System) -> System:
        """A published system with what of its fitted costs the emulation charges."""
        rates = system.rates
        return replace(
            system,
            rates=DrivingRates(
                ssd_share=rates.ssd_share,
                cpu_share=rates.cpu_share,
                gpu_share=rates.gpu_share,
                copy_share=rates.copy_share,
                seconds_per_block_pass=rates.seconds_per_block_pass * self.time / self.blocks,
            ),
            footprint=replace(
                system.footprint,
                ram_fixed_bytes=system.footprint.ram_fixed_bytes * self.parameters,
            ),
        )


def device_rates(machine: Machine, rates: DrivingRates) -> EmulatedRates:
    """What the emulated GPU is set to."""
    return EmulatedRates(
        gpu_to_ram_bytes_per_second=machine.gpu_to_ram_bytes_per_second * rates.copy_share,
        ram_to_gpu_bytes_per_second=machine.ram_to_gpu_bytes_per_second * rates.copy_share,
        flops_per_second=machine.gpu.flops_per_second * rates.gpu_share,
    )


def link_rates(machine: Machine, rates: DrivingRates) -> LinkRates:
    """What the emulated drives are set to."""
    return LinkRates(
        read_bytes_per_second=machine.ssd_read_bytes_per_second * rates.ssd_share,
        write_bytes_per_second=machine.ssd_write_bytes_per_second * rates.ssd_share,
        is_duplex=machine.ssd_path.is_duplex,
    )
