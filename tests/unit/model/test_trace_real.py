"""The trace on fake tensors against the same model run for real on the CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.model import INPUT
from lohan.model.paper_models import Dit, Gpt
from lohan.model.tracing.blocks import find_blocks
from lohan.model.tracing.trace_ops import is_counted, storage_key, tensors_in
from support.traced import traced_shape as shape_of

BATCH, SEQUENCE = 3, 48


class Operators(TorchDispatchMode):
    """Counts like the engine will, and keeps what every call returned."""

    def __init__(self):
        super().__init__()
        self.names, self.results = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_counted(func):
            self.names.append(func._overloadpacket.__name__)
            self.results.append(result)
        return result


def llama(**settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        **settings,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=3, vocab_size=97, attn_pdrop=0.0, resid_pdrop=0.1
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


def gpt():
    return Gpt(num_layers=3, num_heads=4, hidden=64, vocabulary=97, longest_sequence=64)


MODELS = {"gpt": gpt, "llama": llama, "gpt2": gpt2}


def tokens(model):
    ids = torch.randint(0, 97, (BATCH, SEQUENCE))
    # A cache of keys and values, on by default in transformers, would dispatch operators too.
    extra = {"use_cache": False} if hasattr(model, "config") else {}
    return {"input_ids": ids, "labels": ids, **extra}


@pytest.fixture(params=MODELS, scope="module", name="model")
def a_model(request):
    return MODELS[request.param]().bfloat16()


@pytest.fixture(scope="module", name="shape")
def its_shape(model):
    return shape_of(model)


def run_block(model, block, hooks=None):
    """Run the whole model and record the calls of one block."""
    operators = Operators()
    inside = []

    def enter(module, args, kwargs):
        inside.extend(tensors_in((args, kwargs)))
        operators.__enter__()
        if hooks is not None:
            hooks.__enter__()

    def leave(module, args, result):
        if hooks is not None:
            hooks.__exit__(None, None, None)
        operators.__exit__(None, None, None)

    handles = [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        block.register_forward_hook(leave),
    ]
    loss = model(**tokens(model))
    for handle in handles:
        handle.remove()
    return operators, inside, loss


@pytest.mark.parametrize("with_gradients", [True, False])
def test_ordinals_are_those_of_a_real_run(model, shape, with_gradients):
    with torch.set_grad_enabled(with_gradients):
        operators, _, _ = run_block(model, find_blocks(model)[1].module)
    for operator in shape.kinds[1].operators:
        ran = operators.names[operator.index]
        assert operator.name.rpartition("/")[2].rpartition("+")[2] == ran
        result = operators.results[operator.index]
        results = result if isinstance(result, tuple) else (result,)
        made = {storage_key(t): t.untyped_storage().nbytes() for t in results if t is not None}
        assert operator.output_bytes.at(BATCH, SEQUENCE) == sum(made.values())


def test_saved_bytes_are_what_autograd_keeps(model, shape):
    kept = {}
    parameters = {storage_key(parameter) for parameter in model.parameters()}

    def pack(tensor):
        kept[storage_key(tensor)] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    operators, entered, _ = run_block(model, find_blocks(model)[1].module, hooks)
    assert operators.names
    outside = parameters | {storage_key(tensor) for tensor in entered}
    owned = [tensor for key, tensor in kept.items() if key not in outside]
    real_bytes = sum(tensor.untyped_storage().nbytes() for tensor in owned)
    assert real_bytes == shape.kinds[1].saved_bytes.at(BATCH, SEQUENCE)


def test_input_and_output_bytes_are_those_of_the_hidden_tensor(shape):
    block = shape.kinds[1]
    assert block.input_bytes.at(BATCH, SEQUENCE) == BATCH * SEQUENCE * 64 * 2
    assert block.output_bytes.at(BATCH, SEQUENCE) == BATCH * SEQUENCE * 64 * 2


def test_parameters_are_counted_once(model, shape):
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_blocks == 5


def test_the_module_is_left_as_it_was(model):
    before = {name: id(value) for name, value in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    shape_of(model)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_on_meta_has_the_same_shape_as_one_with_weights():
    with torch.device("meta"):
        on_meta = gpt()
    assert shape_of(on_meta) == shape_of(gpt())


@pytest.mark.slow
def test_a_module_in_full_precision_is_traced_in_the_compute_dtype():
    assert shape_of(gpt()).dtype_bytes == 2
    full = shape_of(gpt(), dtype=torch.float32)
    assert full.dtype_bytes == 4
    assert full.kinds[1].input_bytes.per_token == 64 * 4


@pytest.mark.slow
def test_gradient_checkpointing_of_the_module_is_looked_through():
    plain, checkpointed = llama(), llama()
    checkpointed.gradient_checkpointing_enable()
    assert shape_of(checkpointed.train()) == shape_of(plain.train())


def test_a_diffusion_model_is_what_its_real_run_is():
    model = Dit(num_layers=2, num_heads=2, hidden=32, latent=8)
    shape = shape_of(model)
    assert shape.tokens_per_sample == 16
    noise = torch.zeros(2, 16, 32)
    place = torch.zeros(2, dtype=torch.long)
    loss = model(latents=torch.zeros(2, 4, 8, 8), timestep=place, labels=place, noise=noise)
    loss.backward()
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.kinds[0].num_frozen_parameters == 16 * 32
    hidden, condition = 16 * 32 * 2, 32 * 2
    assert shape.kinds[1].input_bytes.at(1, 16) == hidden + condition
    assert all(operator.inputs or operator.index for operator in shape.kinds[1].operators)
    assert INPUT in shape.kinds[1].operators[0].inputs
