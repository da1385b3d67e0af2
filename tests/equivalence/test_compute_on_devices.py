"""Compute on the emulated device equals plain CPU compute bit for bit, on whole models."""

import warnings

import pytest
import torch

from lohan.device import EmulatedDevice


def llama(dropout: float) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=dropout,
        )
    )


def gpt2(dropout: float) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def t5(dropout: float) -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_ff=64,
            d_kv=8,
            num_heads=4,
            num_layers=2,
            dropout_rate=dropout,
            decoder_start_token_id=0,
        )
    )


def dit(dropout: float) -> torch.nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        dropout=dropout,
    )


def loss_and_gradients(
    make: object, dropout: float, dtype: torch.dtype
) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = make(dropout)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train()
    torch.manual_seed(2)
    if make is dit:
        image = torch.randn(2, 4, 8, 8, dtype=dtype)
        labels = torch.tensor([1, 5])
        loss = model(image, timestep=labels, class_labels=labels).sample.float().square().mean()
    else:
        tokens = torch.randint(0, 64, (2, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gpt2, t5, dit])
def test_losses_and_gradients_have_the_same_bits(
    make: object, dtype: torch.dtype, dropout: float
) -> None:
    with warnings.catch_warnings(), EmulatedDevice() as device:
        warnings.simplefilter("ignore")  # the libraries' own, about settings of no concern here
        loss, gradients = loss_and_gradients(make, dropout, dtype)
        with device.compute():
            counted_loss, counted_gradients = loss_and_gradients(make, dropout, dtype)
        assert counted_loss == loss
        assert counted_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(counted_gradients[name], gradient), name
        assert device.peak_bytes > sum(g.nbytes for g in gradients.values())
        del counted_gradients, gradient
        assert device.bytes_in_use == 0
