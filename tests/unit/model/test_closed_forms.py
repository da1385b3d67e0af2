"""Traced shapes against formulas derived by hand.

Letters: b batch, s sequence, h hidden, L layers, V vocabulary, n heads, d width of a head, k key
and value heads, f width of the MLP.
"""

import pytest

from lohan.model import Growth, shape_of
from lohan.model.public_models import PAPER_DITS, PAPER_GPTS, PUBLIC_MODELS
from support.hand_made import all_output_bytes

V, S = 50257, 1024


@pytest.mark.parametrize("name", PAPER_GPTS)
def test_gpt_parameters(name):
    layers, h = PAPER_GPTS[name].num_layers, PAPER_GPTS[name].hidden
    shape = shape_of(name)
    assert shape.num_parameters == 12 * layers * h**2 + 13 * layers * h + (V + S) * h + 2 * h
    assert shape.num_blocks == layers + 2
    assert shape.tied == ((0, layers + 1, V * h),)
    assert shape.kinds[0].num_parameters == (V + S) * h
    assert shape.kinds[-1].num_parameters == 2 * h


@pytest.mark.parametrize("name", PAPER_GPTS)
def test_gpt_flops(name):
    h = PAPER_GPTS[name].hidden
    embedding, block, head = shape_of(name).kinds
    assert block.forward_flops == Growth(per_token=24 * h**2, per_token_pair=4 * h)
    # Projections cost twice their forward; attention two and a half times, as it makes its scores
    # again instead of keeping them.
    assert block.backward_flops == Growth(per_token=48 * h**2, per_token_pair=10 * h)
    assert head.forward_flops == Growth(per_token=2 * h * V)
    assert head.backward_flops == Growth(per_token=4 * h * V)
    assert embedding.forward_flops == Growth()


@pytest.mark.parametrize("name", PAPER_GPTS)
def test_gpt_activations_are_34bsh_between_one_block_input_and_the_next(name):
    h, heads = PAPER_GPTS[name].hidden, PAPER_GPTS[name].num_heads
    block = shape_of(name).kinds[1]
    statistics = 2 * 2  # Mean and inverse deviation per token, in bf16 on the CPU.
    log_sums = 4 * heads  # Per token and head in fp32, which attention's backward needs.
    assert [(o.output_bytes.per_token, o.is_saved) for o in block.operators] == [
        (2 * h + statistics, True),  # first norm
        (6 * h, True),  # q, k and v
        (2 * h + log_sums, True),  # attention
        (2 * h, False),  # its projection: goes into the sum only
        (2 * h, True),  # first sum, input of the second norm
        (2 * h + statistics, True),  # second norm
        (8 * h, True),  # fc1, input of GELU
        (8 * h, True),  # GELU, input of fc2
        (2 * h, False),  # fc2: goes into the sum only
        (2 * h, False),  # second sum: the next block's input
    ]
    small = 2 * statistics + log_sums
    inter = 2 * h
    assert block.input_bytes == block.output_bytes == Growth(per_token=inter)
    # The paper's A_all: all outputs but the last sum, which is the next block's A_inter.
    assert all_output_bytes(block) == Growth(per_token=34 * h + inter + small)
    assert block.saved_bytes == Growth(per_token=30 * h + small)


def test_the_papers_activation_sizes_of_13b_at_batch_32():
    block = shape_of("gpt-13b").kinds[1]
    inter = 40 * block.input_bytes.at(32, 1024)
    every = 40 * (all_output_bytes(block).at(32, 1024) - block.output_bytes.at(32, 1024))
    assert inter / 2**30 == 12.5
    assert every / 2**30 == pytest.approx(213, rel=0.01)


@pytest.mark.parametrize("name", PAPER_DITS)
def test_dit_parameters(name):
    layers, h = PAPER_DITS[name].num_layers, PAPER_DITS[name].hidden
    shape = shape_of(name)
    # Attention 4h^2+4h, MLP 8h^2+5h, six modulations 6h^2+6h; norms have no weights.
    assert shape.kinds[1].num_parameters == 18 * h**2 + 15 * h
    patches = 4 * 2 * 2 * h + h
    timestep, classes, places = 256 * h + h + h * h + h, 1001 * h, 1024 * h
    head = 32 * h + 32 + 2 * h * h + 2 * h
    outside = patches + timestep + classes + places + head
    assert shape.num_parameters == layers * (18 * h**2 + 15 * h) + outside
    assert shape.tokens_per_sample == 1024


@pytest.mark.parametrize("name", PAPER_DITS)
def test_dit_flops(name):
    h = PAPER_DITS[name].hidden
    block = shape_of(name).kinds[1]
    s = 1024
    assert block.forward_flops == Growth(
        per_sequence=24 * s * h**2 + 4 * s**2 * h + 12 * h**2,
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("dit-0.67b", 0.676),
        ("dit-0.90b", 0.893),
        ("dit-1.4b", 1.370),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("mistral-large", 122.610),
        ("gpt2", 0.124),
        ("gpt2-xl", 1.558),
        ("smollm2-135m", 0.135),
        ("llama-2-13b", 13.016),
        ("qwen3-8b", 8.191),
        ("mistral-7b", 7.248),
        ("gemma-3-1b", 1.0),
        ("gpt-oss-20b", 20.915),
    ],
)
def test_known_sizes(name, billions):
    assert round(shape_of(name).num_parameters / 1e9, 3) == billions


GATED = [
    name
    for name, model in PUBLIC_MODELS.items()
    if model.model_type in ("llama", "qwen3", "mistral")
]


@pytest.mark.parametrize("name", GATED)
def test_llama_like_parameters_and_flops(name):
    settings = PUBLIC_MODELS[name].settings
    h, f = settings["hidden_size"], settings["intermediate_size"]
    n, k = settings["num_attention_heads"], settings["num_key_value_heads"]
    d = settings.get("head_dim", h // n)
    layers, vocabulary = settings["num_hidden_layers"], settings["vocab_size"]
    shape = shape_of(name)
    matrices = 2 * h * n * d + 2 * h * k * d + 3 * h * f
    norms = 2 * h + (2 * d if PUBLIC_MODELS[name].model_type == "qwen3" else 0)
    block = shape.kinds[1]
    assert block.num_parameters == matrices + norms
    assert block.forward_flops == Growth(per_token=2 * matrices, per_token_pair=4 * n * d)
    assert block.backward_flops == Growth(per_token=4 * matrices, per_token_pair=10 * n * d)
    tables = 1 if settings["tie_word_embeddings"] else 2
    assert shape.num_parameters == layers * (matrices + norms) + tables * vocabulary * h + h
    assert bool(shape.tied) == settings["tie_word_embeddings"]


@pytest.mark.parametrize("name", GATED)
def test_llama_like_activations_hold_no_score_matrix(name):
    settings = PUBLIC_MODELS[name].settings
    h, f = settings["hidden_size"], settings["intermediate_size"]
    n, k = settings["num_attention_heads"], settings["num_key_value_heads"]
    d = settings.get("head_dim", h // n)
    is_qwen = PUBLIC_MODELS[name].model_type == "qwen3"
    block = shape_of(name).kinds[1]
    # A norm keeps its input in fp32, its inverse deviation (fp32), its result before the weight,
    # and its result: 4 + 2 + 2 bytes per element. Without a gain's gradient nothing differs.
    norms = 2 * (8 * h + 4)
    # Norms of q and k keep the same but for the result, which rotary embedding does not need.
    norms += (6 * (n + k) * d + 4 * (n + k)) if is_qwen else 0
    attention = 2 * n * d + 2 * k * d + 2 * k * d + (2 * n * d + 4 * n)
    gated = 4 * 2 * f
    assert block.saved_bytes == Growth(per_token=norms + attention + gated)
    assert all_output_bytes(block).per_token_pair == 0
