"""Tiny random models saved in Hugging Face's layout, with a tokenizer, and tampering with them."""

import json
import pathlib
import struct
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.tiny_models import TINY_MODELS, VOCABULARY

FAMILIES = ["llama", "gpt2", "qwen3", "t5", "bart"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
)


def save_model(
    family: str,
    directory: pathlib.Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard: str = "1GB",
    seed: int = 0,
    is_with_tokenizer: bool = False,
) -> pathlib.Path:
    """Save a tiny random model as transformers does."""
    torch.manual_seed(seed)
    model: Any = TINY_MODELS[family].build(0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: ones and zeros would hide a mix-up.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard)
    if is_with_tokenizer:
        save_tokenizer(directory)
    return directory


def save_mixtral(directory: pathlib.Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    transformers.MixtralForCausalLM(config).bfloat16().save_pretrained(
        directory, max_shard_size="8KB"
    )


def save_deepseek(directory: pathlib.Path) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        kv_lora_rank=4,
        q_lora_rank=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    model: Any = transformers.DeepseekV3ForCausalLM(config)
    model.model.layers[0].mlp.gate.e_score_correction_bias.normal_()
    model.save_pretrained(directory)


def save_own_code(directory: pathlib.Path, is_right: bool = False) -> None:
    """Save a model with code of its own, which computes a buffer in its constructor only.

    With `is_right` also where transformers 5 wants it.
    """
    buffer = "module.table.copy_(torch.arange(4.0))" if is_right else "pass"
    code = f"""
import pathlib, torch, transformers
pathlib.Path({str(directory / "ran")!r}).touch()

class OwnConfig(transformers.PretrainedConfig):
    model_type = "own-{directory.name}"

class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.post_init()
    def _init_weights(self, module):
        if module is self:
            {buffer}
"""
    (directory / "own.py").write_text(code)
    config = {
        "model_type": f"own-{directory.name}",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
    rewrite(directory / "model.safetensors", tensors)


def save_tokenizer(directory: pathlib.Path) -> None:
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(directory))


def load_whole(directory: pathlib.Path, dtype: torch.dtype | None = torch.bfloat16) -> Any:
    """The judge: transformers' own loading, which must find all keys and no others."""
    names = json.loads((directory / "config.json").read_text())["architectures"]
    kind = getattr(transformers, names[0])
    model, found = kind.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


def logits(model: Any, family: str) -> torch.Tensor:
    batch = TINY_MODELS[family].batch(3, torch.bfloat16)
    with torch.no_grad():
        found = model(**batch).logits
    assert isinstance(found, torch.Tensor)
    return found


def stored_tensors(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """All tensors in the files, by safetensors' own reader."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def rewrite(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def change_header(path: pathlib.Path, **changes: Any) -> None:
    """Change the entry of the file's first tensor, leaving all bytes of tensors as they are."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    fields = json.loads(content[8 : 8 + length])
    name = next(name for name in fields if name != "__metadata__")
    fields[name] |= changes
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
