"""Segments, kinds, parameters and ties of whole modules, and what cannot be traced."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model import Growth
from lohan.model.tracing.trace_model import TraceableModel
from support.small_modules import WIDTH, Mix, Model, mixes
from support.traced import traced_shape as shape_of

TOKEN = 2 * WIDTH
MIX = WIDTH * WIDTH + WIDTH


def test_a_model_is_an_embedding_its_blocks_and_a_head():
    shape = shape_of(Model(mixes(4)))
    assert [kind.name for kind in shape.kinds] == ["embedding", "block", "head"]
    assert shape.sequence_of_kinds == (0, 1, 1, 1, 1, 2)
    assert [kind.num_parameters for kind in shape.kinds] == [16 * WIDTH, MIX, 16 * WIDTH + 16]
    assert shape.kinds[0].output_bytes == shape.kinds[2].input_bytes == Growth(per_token=TOKEN)
    assert shape.kinds[0].input_bytes == Growth()
    assert shape.kinds[2].output_bytes == Growth(fixed=4)


def test_a_sequential_of_blocks_is_traced_the_same_way():
    assert shape_of(Model(mixes(4), nn.Sequential)) == shape_of(Model(mixes(4)))


def test_unequal_blocks_are_kinds_of_their_own():
    class Wide(Mix):
        def __init__(self, layer_idx):
            super().__init__(layer_idx=layer_idx)
            self.extra = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(self.extra(x))

    shape = shape_of(Model([Mix(), Wide(1), Mix(layer_idx=2), Wide(3)]))
    assert [kind.name for kind in shape.kinds] == ["embedding", "block", "block-2", "head"]
    assert shape.sequence_of_kinds == (0, 1, 2, 1, 2, 3)
    assert shape.kinds[2].num_parameters == 2 * MIX


def test_frozen_parameters_are_counted_and_cost_no_gradient():
    model = Model(mixes(3))
    for block in model.blocks:
        block.fc.weight.requires_grad_(False)
    shape = shape_of(model)
    block = shape.kinds[1]
    assert block.num_frozen_parameters == WIDTH * WIDTH
    assert block.backward_flops == Growth(per_token=2 * WIDTH * WIDTH)
    assert block.saved_bytes == Growth()


def test_below_the_first_trained_parameter_there_is_no_backward():
    model = Model(mixes(4))
    model.embed.requires_grad_(False)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    shape = shape_of(model)
    first, second, third, fourth = shape.blocks[1:-1]
    assert first == second
    assert first.backward_flops == first.input_bytes == Growth()
    assert first.output_bytes == Growth(per_token=TOKEN)
    # The lowest trained block needs the gradient of its weights only.
    assert third.backward_flops == Growth(per_token=2 * WIDTH * WIDTH)
    assert third.input_bytes == Growth()
    assert fourth.backward_flops == Growth(per_token=4 * WIDTH * WIDTH)
    assert fourth.input_bytes == Growth(per_token=TOKEN)


def test_a_tied_weight_is_owned_by_the_first_block_that_uses_it():
    model = Model(mixes(2))
    model.head.weight = model.embed.weight
    shape = shape_of(model)
    assert shape.tied == ((0, 3, 16 * WIDTH),)
    assert shape.kinds[-1].num_parameters == 16
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_weight_shared_by_blocks_is_owned_by_the_first():
    model = Model(mixes(3))
    for block in model.blocks:
        block.fc.weight = model.blocks[0].fc.weight
    shape = shape_of(model)
    assert shape.tied == ((1, 2, WIDTH * WIDTH), (1, 3, WIDTH * WIDTH))
    assert [block.num_parameters for block in shape.blocks[1:-1]] == [MIX, WIDTH, WIDTH]


def test_a_parameter_nobody_uses_is_still_counted():
    model = Model(mixes(2))
    model.unused = nn.Parameter(torch.zeros(11))
    assert shape_of(model).num_parameters == sum(p.numel() for p in model.parameters())


def test_a_norm_registered_before_the_blocks_but_run_after_them_is_the_heads():
    class LateNorm(Model):
        def __init__(self):
            super().__init__(mixes(2))
            late = nn.LayerNorm(WIDTH)
            blocks, head = self.blocks, self.head
            del self.blocks, self.head
            self.late, self.blocks, self.head = late, blocks, head

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.late(x)).mean()

    shape = shape_of(LateNorm())
    assert shape.kinds[0].num_parameters == 16 * WIDTH
    assert shape.kinds[-1].num_parameters == 2 * WIDTH + 16 * WIDTH + 16


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.encoder = nn.ModuleList(mixes(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Cross(layer_idx=index) for index in range(3))

    def forward(self, input_ids):
        memory = self.embed(input_ids)
        for block in self.encoder:
            memory = block(memory)
        memory = self.norm(memory)
        x = self.embed(input_ids)
        for block in self.decoder:
            x = block(x, memory=memory)
        return (x @ self.embed.weight.t()).mean()


class Cross(Mix):
    def forward(self, x, memory):
        return super().forward(x + memory)


def test_an_encoder_and_a_decoder_have_a_bridge_between_them():
    shape = shape_of(EncoderDecoder())
    assert [kind.name for kind in shape.kinds] == [
        "embedding",
        "encoder",
        "bridge",
        "decoder",
        "head",
    ]
    assert shape.sequence_of_kinds == (0, 1, 1, 2, 3, 3, 3, 4)
    assert shape.kinds[2].num_parameters == 2 * WIDTH
    assert shape.kinds[2].output_bytes == Growth(per_token=2 * TOKEN)
    assert shape.kinds[3].input_bytes == Growth(per_token=2 * TOKEN)
    assert shape.tied == ((0, 3, 16 * WIDTH), (0, 7, 16 * WIDTH))


def test_work_between_two_blocks_belongs_to_the_earlier_one():
    class Glued(Model):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x).mean()

    shape = shape_of(Glued(mixes(3)))
    assert shape.kinds[1].operators[-1].name == "tanh"
    assert shape.sequence_of_kinds == (0, 1, 1, 1, 2)


def test_blocks_whose_output_looks_unlike_their_input_are_all_run():
    class Widen(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.fc = nn.Linear(width, 2 * width)

        def forward(self, x):
            return self.fc(x)

    model = Model([Widen(WIDTH), Widen(2 * WIDTH)])
    model.head = nn.Linear(4 * WIDTH, 4)
    shape = shape_of(model)
    assert [kind.name for kind in shape.kinds] == ["embedding", "block", "block-2", "head"]
    assert shape.kinds[2].output_bytes == Growth(per_token=4 * TOKEN)


def test_inputs_of_an_own_making_are_used():
    class Odd(Model):
        def forward(self, words, scale):
            return super().forward(words) * scale

    def inputs(batch, sequence):
        words = torch.zeros(batch, sequence, dtype=torch.long)
        return {"words": words, "scale": torch.zeros(())}

    assert shape_of(Odd(mixes(2)), inputs=inputs).num_blocks == 4
    fixed = shape_of(Odd(mixes(2)), inputs=lambda batch: inputs(batch, 24))
    assert fixed.tokens_per_sample == 24
    assert fixed.kinds[1].input_bytes == Growth(per_sequence=24 * TOKEN)


class Reused(Model):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(x).mean()


class Skipping(Model):
    def forward(self, input_ids):
        return self.head(self.blocks[0](self.embed(input_ids))).mean()


class UsesNone(Model):
    def forward(self, input_ids):
        return self.head(self.embed(input_ids)).mean()


def test_blocks_that_do_not_run_have_weights_and_nothing_to_compute():
    shape = shape_of(Skipping(mixes(3)))
    unused = [block for block in shape.blocks if block.num_parameters and not block.operators]
    assert len(unused) == 2
    assert len({block.num_parameters for block in unused}) == 1


class Rounding(Model):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        padded = -(-x.shape[1] // 24) * 24
        x = nn.functional.pad(x, (0, 0, 0, padded - x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


class Choosing(Model):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        x = x.tanh() if x.shape[1] > 20 else x
        return self.head(x).mean()


class Strange(Model):
    def forward(self, words):
        return super().forward(words)


class Detached(Model):
    def forward(self, input_ids):
        with torch.no_grad():
            return super().forward(input_ids)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Reused, "block blocks.0 runs twice"),
        (UsesNone, "none of the 3 blocks ran, blocks.0 the first"),
        (Rounding, "does not grow in a known way: .* at batch 2 and length 16"),
        (Choosing, "the list of operators of 'head' changes with the batch or the sequence"),
        (Strange, "it is not known what to call Strange with: its forward takes words"),
        (Detached, "the model's output has no gradient"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_reason(kind, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(kind(mixes(3)))


@pytest.mark.slow  # Importing the compiler takes seconds.
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_module_is_refused():
    model = torch.compile(Model(mixes(2)))
    with pytest.raises(ConfigError, match="is a compiled module"):
        shape_of(model, inputs=lambda batch: {})


def test_an_error_inside_forward_names_the_module_it_came_from():
    model = Model(mixes(2))
    model.blocks[0].fc = nn.Linear(WIDTH + 1, WIDTH)
    with pytest.raises(ConfigError, match=r"it stopped in block blocks.0, in fc: "):
        shape_of(model)


class Assigning(Mix):
    """Puts another tensor in the place of a buffer, whose memory could then be somebody else's."""

    stays: ClassVar[list[bool]] = []
    """Of the class: a trace would note it in a copy of what a module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        old = weakref.ref(self.count)
        self.count = self.count + 1
        self.stays.append(old() is not None)
        return super().forward(x) + self.count


def test_a_buffer_that_is_replaced_stays_until_the_trace_ends():
    traceable = TraceableModel(
        Model([Assigning(), Assigning()]),
        dtype=torch.float32,
        device=torch.device("cpu"),
        should_assume_flash=False,
    )

    def tokens(batch, sequence):
        return {"input_ids": torch.zeros(batch, sequence, dtype=torch.long)}

    for batch in (2, 3):
        traceable.run(tokens, (batch, 4))
    assert len(Assigning.stays) >= 2
    assert all(Assigning.stays)


class Remembering(Mix):
    """Puts tensors into a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(x.detach())
        return super().forward(x) + self.seen[-1]


def test_what_a_forward_puts_into_a_list_is_not_left_in_the_model():
    model = Model([Remembering(), Remembering()])
    shape_of(model)
    assert not any(block.seen for block in model.modules() if isinstance(block, Remembering))


class Counts(Model):
    """Counts how often each of four experts was chosen, as losses of routers do."""

    def forward(self, input_ids):
        hidden = super().forward(input_ids)
        counts = torch.bincount(input_ids.flatten() % 4, minlength=4)
        return (hidden * counts.sum()).mean()


def test_counts_of_a_known_number_of_values_are_traced():
    assert shape_of(Counts(mixes(2))).sequence_of_kinds == (0, 1, 1, 2)
